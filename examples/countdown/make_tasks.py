"""Writes the tasks of this example: ``python examples/countdown/make_tasks.py``.

Four different numbers from 1 to 9, and a target that two of them make and that is none of them. Training, validation
and test have sets of numbers of their own.
"""

import json
import random
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from game import told

EXPRESSIONS = [f"{{{a}}}{sign}{{{b}}}" for a in range(4) for b in range(4) if a != b for sign in "+-*/"]
"""All ways to write two of four numbers, to be filled in."""
ORDERS = 3


def tasks(split: str) -> list[dict[str, Any]]:
    """Return a split's tasks in a fixed random order; training tasks appear in several orders of their numbers."""
    rng = random.Random(split)
    sets = list(combinations(range(1, 10), 4))
    random.Random(24).shuffle(sets)
    rows = []
    for numbers in {"train": sets[:74], "validation": sets[74:98], "test": sets[98:]}[split]:
        for target in targets(numbers):
            for _ in range(ORDERS if split == "train" else 1):
                order = rng.sample(numbers, 4)
                query = f"{' '.join(map(str, order))} make {target}"
                rows.append({"main_query": query, "numbers": order, "target": target})
    rng.shuffle(rows)
    return rows


def targets(numbers: Sequence[int]) -> list[int]:
    """Return the numbers that two of the given numbers make."""
    worth = dict.fromkeys(told(expression.format(*numbers), numbers) for expression in EXPRESSIONS)
    whole = [int(found[1]) for found in (re.fullmatch(r"That is (\d+)\.", text) for text in worth) if found]
    return [target for target in whole if target not in numbers]


if __name__ == "__main__":
    for split in ("train", "validation", "test"):
        file = Path(__file__).parent / f"data/{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in tasks(split)))
