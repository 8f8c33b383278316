"""Makes the tiny model that this example starts from: ``python examples/search_documents/make_model.py``.

It is shown a librarian who searches for any name or thing that it has read, answers with any number that it has read,
and stops when a coin says so. So it writes searches and answers, and knows nothing about what to search for and which
number to say: that is left to the training. The villages and people are those of the training split, with other facts.
"""

import json
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from librarian import SYSTEM_PROMPT, Index, toolkit
from make_tasks import FACTS, World

from astuner_local.tiny.make import make_talker

WORLDS, OF_EACH, STEPS = 60, 100, 1000


def conversations(world: World, rng: random.Random) -> Iterator[list[dict[str, Any]]]:
    index = Index([*world.documents("villages"), *world.documents("people")])
    for task in world.tasks():
        said = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task["main_query"]}]
        read = task["main_query"].removeprefix("How ")
        for _ in range(3):
            query = rng.choice(re.findall(rf"[A-Z]\w+ [A-Z]\w+|{'|'.join(FACTS)}", read))
            read = index.best(query) or ""
            call = {"name": "search", "arguments": json.dumps({"query": query})}
            said += [
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "tool", "name": "search", "content": read},
            ]
            numbers = re.findall(r"\d+", read)
            if numbers and rng.random() < 0.5:
                break
        yield [*said, {"role": "assistant", "content": f"\\boxed{{{rng.choice(numbers or ['0'])}}}"}]


def make_model(folder: Path, steps: int = STEPS, worlds: int = WORLDS) -> float:
    """Make tokenizer and model in ``folder``; returns the last step's loss on what the librarian says."""
    rng = random.Random(0)
    every = (conversations(World("train", seed=number), rng) for number in range(1, worlds + 1))
    shown = [conversation for world in every for conversation in islice(world, OF_EACH)]
    return make_talker(folder, shown, toolkit(Path()).get_json_schemas(), steps=steps)


if __name__ == "__main__":
    make_model(Path(__file__).parent / "tiny_librarian")
