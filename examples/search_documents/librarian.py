"""Search a folder of documents with an AgentScope agent, and judge its answers."""

import functools
import re
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from agentscope.agent import Agent, InjectionConfig, ReActConfig
from agentscope.message import TextBlock, ToolResultBlock, UserMsg
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask

SYSTEM_PROMPT = "Search the documents. Quote what you go by."
HERE = Path(__file__).parent
ALLOW = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")  # without it, AgentScope asks for permission
NO_CLOCK = InjectionConfig(inject_runtime_state=False)  # without it, the prompt contains the time


def sections(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield titles and texts in the Markdown files of a folder."""
    for file in sorted(folder.glob("*.md")):
        _, *parts = re.split(r"^#+ (.+)$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        yield from zip(parts[::2], map(str.strip, parts[1::2]), strict=True)


class Index:
    """Full-text index with BM25 ranking (SQLite's FTS5)."""

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE VIRTUAL TABLE sections USING fts5(title, text)")
        self._database.executemany("INSERT INTO sections VALUES (?, ?)", texts)

    def best(self, query: str) -> str | None:
        """Return the best matching section, with words in titles counted three times, or None."""
        words = " OR ".join(f'"{word}"' for word in re.findall(r"\w+", query))  # quotes prevent operators
        rank = "SELECT title, text FROM sections WHERE sections MATCH ? ORDER BY bm25(sections, 3, 1) LIMIT 1"
        found = self._database.execute(rank, (words,)).fetchone() if words else None
        return found and f"# {found[0]}\n{found[1]}"


@functools.cache
def toolkit(folder: Path) -> Toolkit:
    """Return the toolkit for a folder. Episodes share it, because the search keeps no state."""
    index = Index(sections(folder))

    def search(query: str) -> str:
        """Find the document that fits best.

        Args:
            query (str): Words that are in it.
        """
        return index.best(query) or "nothing found"

    return Toolkit(tools=[FunctionTool(search, permission=ALLOW)])


def texts(result: ToolResultBlock) -> list[str]:
    """Return the texts of a tool's result. AgentScope's own errors are a plain string."""
    if isinstance(result.output, str):
        return [result.output]
    return [block.text for block in result.output if isinstance(block, TextBlock)]


class Librarian(Workflow):
    """Workflow of one episode: question, searches, answer."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        task = workflow_task.task
        agent = Agent(
            name="librarian",
            system_prompt=SYSTEM_PROMPT,
            model=model_tuner,  # this makes the agent trainable
            toolkit=toolkit(HERE / "documents" / task.metadata["documents"]),
            react_config=ReActConfig(max_iters=4),
            injection_config=NO_CLOCK,
        )
        reply = await agent.reply(UserMsg("user", task.main_query))
        results = [block for message in agent.state.context for block in message.get_content_blocks("tool_result")]
        read = [text for result in results for text in texts(result)]
        return WorkflowOutput(metadata={"final_answer": reply.get_text_content() or "", "read": read})


class RightAndRead(Judge):
    """Judge: 1 if the answer is right and its document was found, else 0, so that guesses do not pay."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        task, read = workflow_task.task.metadata, output.metadata.get("read", [])
        said = re.findall(r"Answer: (\w+)", output.metadata.get("final_answer", output.response) or "")
        grounded = any(text.startswith(f"# {task['source']}\n") for text in read)
        right = said == [task["answer"]]
        return JudgeOutput(
            reward=float(right and grounded),
            metrics={"right": float(right), "grounded": float(grounded), "searches": float(len(read))},
        )
