"""Makes the tiny model that this example starts from: ``python examples/search_documents/make_model.py``.

It is shown a librarian who searches for any name or thing that it has read, says any number that it has read, and stops
when a coin says so; two times in five, each of these happens to be right. So it writes searches and answers, and has
little more than a hunch of what to search for and which number to say: the rest is left to the training. It is shown
villages and people of the training split only, with other facts.
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

WORLDS, OF_EACH, STEPS = 60, 100, 600
HUNCH = 0.4
"""How often the librarian does what is right on purpose."""


def conversations(world: World, rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    index = Index([*world.documents("villages"), *world.documents("people")])
    for task in world.tasks():
        said = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task["main_query"]}]
        read = task["main_query"].removeprefix("How ")
        for _ in range(3):
            options = re.findall(rf"[A-Z]\w+ [A-Z]\w+|{'|'.join(FACTS)}", read)
            right = task["source"] if task["source"] in options else options[-1]  # a question ends with a name
            query = right if rng.random() < HUNCH else rng.choice(options)
            read = index.best(query) or ""
            call = {"name": "search", "arguments": json.dumps({"query": query})}
            said += [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "name": "search", "content": read},
            ]
            numbers = re.findall(r"\d+", read)
            if numbers and rng.random() < (1 + HUNCH) / 2:
                break
        number = task["answer"] if task["answer"] in numbers and rng.random() < HUNCH else rng.choice(numbers or ["0"])
        yield [*said, {"role": "assistant", "content": f"\\boxed{{{number}}}"}]


def make_model(folder: Path, steps: int = STEPS, worlds: int = WORLDS) -> float:
    """Make tokenizer and model in ``folder``; returns the last step's loss on what the librarian says."""
    rng = random.Random(0)
    every = (conversations(World("train", seed=number), rng) for number in range(1, worlds + 1))
    shown = [conversation for world in every for conversation in islice(world, OF_EACH)]
    return make_talker(folder, shown, toolkit(Path()).get_json_schemas(), steps=steps)


if __name__ == "__main__":
    make_model(HERE / "tiny_librarian")
