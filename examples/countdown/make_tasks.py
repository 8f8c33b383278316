"""Writes the tasks of this example: ``python examples/countdown/make_tasks.py``.

Three different numbers from 1 to 9, and a target below 100 that can be made of them. Training, validation and test
have sets of numbers of their own.
"""

import json
import random
import re
from collections.abc import Sequence
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

from game import told

EXPRESSIONS = [
    shape.format(a, one, b, two, c)
    for shape in ("({}{}{}){}{}", "{}{}({}{}{})")
    for a, b, c in permutations(("{0}", "{1}", "{2}"))
    for one, two in product("+-*/", repeat=2)
]
"""All ways to write three numbers, to be filled in."""


def tasks(split: str) -> list[dict[str, Any]]:
    """A split's tasks in an order drawn once; of training each comes in all orders of its numbers, else in one."""
    rng = random.Random(split)
    sets = list(combinations(range(1, 10), 3))
    random.Random(0).shuffle(sets)
    rows = []
    for numbers in {"train": sets[:46], "validation": sets[46:62], "test": sets[62:]}[split]:
        for target in targets(numbers):
            for order in permutations(numbers) if split == "train" else [rng.sample(numbers, 3)]:
                query = f"{' '.join(map(str, order))} make {target}"
                rows.append({"main_query": query, "numbers": list(order), "target": target})
    rng.shuffle(rows)
    return rows


def targets(numbers: Sequence[int]) -> list[int]:
    """What can be made of the numbers."""
    worth = dict.fromkeys(told(expression.format(*numbers), numbers) for expression in EXPRESSIONS)
    return [int(found[1]) for found in (re.fullmatch(r"That is ([1-9]\d?)\.", text) for text in worth) if found]


if __name__ == "__main__":
    for split in ("train", "validation", "test"):
        file = Path(__file__).parent / f"data/{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in tasks(split)))
