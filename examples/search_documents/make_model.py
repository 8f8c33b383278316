"""Makes the tiny model that this example starts from: ``python examples/search_documents/make_model.py``.

It is shown a librarian who reads documents aloud, line by line in any order; and one who searches for anything in the
question, quotes a line of what was found, and goes on with that: searches for a village, says a number. The line is now
and then one that fits the question, else any. So it reads, quotes and follows a quote; to go by the question is left to
the training. It is shown villages and people of the training split only, of whom other things are said.
"""

import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentscope.tool import FunctionTool, Toolkit  # 2.x
from librarian import SYSTEM_PROMPT, Index, make_tool
from make_tasks import FACTS, HERE, World

from astuner_local.tiny.make import make_talker

WORLDS, STEPS = 6, 600
KNOWS = 0.3
"""The share of quotes that fit the question on purpose."""
NAME = r"[A-Z]\w+ [A-Z]\w+"


def search(thought: str, query: str) -> dict[str, Any]:
    call = {"name": "search", "arguments": json.dumps({"query": query})}
    return {"role": "assistant", "content": thought, "tool_calls": [{"type": "function", "function": call}]}


def begun(asked: str, query: str, found: str | None) -> list[dict[str, Any]]:
    """Return a conversation up to the result of the first search."""
    system, user = {"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": asked}
    return [system, user, search("", query), {"role": "tool", "name": "search", "content": found}]


def conversations(world: World, rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    texts = dict(world.documents())
    index = Index(texts.items())
    for task, (title, text) in zip(world.tasks(), itertools.cycle(texts.items())):
        lines = text.splitlines()
        aloud = "\n".join(line.replace("-", ">") for line in rng.sample(lines, len(lines)))
        yield [*begun(f"Read all about {title}.", title, index.best(title)), {"role": "assistant", "content": aloud}]
        asked = task["main_query"]
        query = rng.choice(re.findall(rf"{NAME}|{'|'.join(FACTS)}", asked))
        said = begun(asked, query, index.best(query))
        while query:
            lines = re.findall(r"- (.+)", said[-1]["content"])
            fitting = [line for line in lines if line.split()[0] in asked]
            quote = rng.choice(fitting if rng.random() < KNOWS else lines)
            if query := " ".join(re.findall(NAME, quote)):
                said += [search(f"> {quote}", query), {"role": "tool", "name": "search", "content": index.best(query)}]
        yield [*said, {"role": "assistant", "content": f"> {quote}\nAnswer: {quote.split()[-1]}"}]


def make_model(folder: Path, steps: int = STEPS, worlds: int = WORLDS) -> float:
    """Make tokenizer and model in ``folder``; returns the last step's loss on what the librarian says."""
    rng = random.Random(0)
    shown = [said for seed in range(1, worlds + 1) for said in conversations(World("train", seed), rng)]
    toolkit = Toolkit(tools=[FunctionTool(make_tool(Index([]), []))])
    return make_talker(folder, shown, asyncio.run(toolkit.get_tool_schemas()), steps=steps)


if __name__ == "__main__":
    make_model(HERE / "tiny_librarian")
