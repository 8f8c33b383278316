"""Makes the tiny model that this example starts from, and what it is shown next: ``make_model.py`` in this folder.

The model is shown a librarian who searches for any name or thing that it has read, answers with any number that it has
read, and stops when a coin says so. So it writes searches and answers, and knows nothing about what to search for and
which number to say. That takes several things at once to be right, so the warm start shows some conversations in which
they are; the rest is left to rewards. All are about villages and people of the training split.
"""

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from librarian import SYSTEM_PROMPT, Index, toolkit
from make_tasks import FACTS, HERE, World

from astuner_local.tiny.make import make_talker

WORLDS, OF_EACH, STEPS = 60, 100, 1000
DEMONSTRATIONS = 64
TOOLS = toolkit(Path()).get_json_schemas()


def conversations(world: World, rng: random.Random, *, knows: bool) -> Iterator[list[dict[str, Any]]]:
    """Of a librarian who knows what to do, or not."""
    index = Index([*world.documents("villages"), *world.documents("people")])
    for task in world.tasks():
        said = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task["main_query"]}]
        read = task["main_query"].removeprefix("How ")
        for _ in range(3):
            options = re.findall(rf"[A-Z]\w+ [A-Z]\w+|{'|'.join(FACTS)}", read)
            right = task["source"] if task["source"] in options else options[-1]  # a question ends with a name
            query = right if knows else rng.choice(options)
            read = index.best(query) or ""
            call = {"name": "search", "arguments": json.dumps({"query": query})}
            said += [
                {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "1", "name": "search", "content": read},
            ]
            numbers = re.findall(r"\d+", read)
            if numbers and (knows or rng.random() < 0.5):
                break
        number = task["answer"] if knows else rng.choice(numbers or ["0"])
        yield [*said, {"role": "assistant", "content": f"\\boxed{{{number}}}"}]


def make_model(folder: Path, steps: int = STEPS, worlds: int = WORLDS) -> float:
    """Make tokenizer and model in ``folder``; returns the last step's loss on what the librarian says."""
    rng = random.Random(0)
    every = (conversations(World("train", seed=number), rng, knows=False) for number in range(1, worlds + 1))
    shown = [conversation for world in every for conversation in islice(world, OF_EACH)]
    return make_talker(folder, shown, TOOLS, steps=steps)


def demonstrations() -> str:
    shown = islice(conversations(World("train"), random.Random(0), knows=True), DEMONSTRATIONS)
    return "".join(json.dumps({"messages": messages, "tools": TOOLS}) + "\n" for messages in shown)


if __name__ == "__main__":
    (HERE / "data/demonstrations.jsonl").write_text(demonstrations(), encoding="utf-8")
    make_model(HERE / "tiny_librarian")
