"""A librarian: an AgentScope agent that searches a folder of documents, and the judge of its answers."""

import functools
import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner_agentscope import make_tool_agent

SYSTEM_PROMPT = "Search the documents. Quote what you go by."
HERE = Path(__file__).parent


def sections(folder: Path) -> Iterator[tuple[str, str]]:
    """Titles and texts in the Markdown files of a folder."""
    for file in sorted(folder.glob("*.md")):
        _, *parts = re.split(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        yield from zip(parts[::2], map(str.strip, parts[1::2]), strict=True)


class Index:
    """Texts under titles, found by their words: BM25, as SQLite's FTS5 has it."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE sections USING fts5(title, text)")
        self._database.executemany("INSERT INTO sections VALUES (?, ?)", texts)

    def best(self, query: str) -> str | None:
        """Return the section that fits best (a word in its title counts three times), or None if nothing matches."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))  # quoted: no word is an operator
        rank = "SELECT title, text FROM sections WHERE sections MATCH ? ORDER BY bm25(sections, 3, 1) LIMIT 1"
        found = self._database.execute(rank, (words,)).fetchone() if words else None
        return found and f"# {found[0]}\n{found[1]}"


@functools.cache
def open_index(folder: Path) -> Index:
    """Return the index of a folder. Episodes share it, because a search changes nothing."""
    return Index(sections(folder))


def make_tool(index: Index, read: list[str]) -> Callable[[str], str]:
    """Return the librarian's tool. It adds each text that it returns to ``read``."""

    def search(query: str) -> str:
        """Find the document that fits best.

        Args:
            query (str): Words that are in it.
        """
        read.append(index.best(query) or "nothing found")
        return read[-1]

    return search


class Librarian(Workflow):
    """One episode: a question, searches, an answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        task, read = workflow_task.task, list[str]()
        search = make_tool(open_index(HERE / "documents" / task.metadata["documents"]), read)
        agent = make_tool_agent(model_tuner, name="librarian", system_prompt=SYSTEM_PROMPT, tools=[search], max_iters=4)
        answer = await agent.reply(task.main_query)
        return WorkflowOutput(metadata={"final_answer": answer, "read": read})


class RightAndRead(Judge):
    """1 where the answer is right and the document that says so was found, else 0: a lucky guess is no answer."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        task, read = workflow_task.task.metadata, output.metadata.get("read", [])
        said = re.findall(r"Answer: (\w+)", output.metadata.get("final_answer", output.response) or "")
        grounded = any(text.startswith(f"# {task['source']}\n") for text in read)
        right = said == [task["answer"]]
        return JudgeOutput(
            reward=float(right and grounded),
            metrics={"right": float(right), "grounded": float(grounded), "searches": float(len(read))},
        )
