"""Writes the tasks of this example: ``python examples/learning_to_ask/make_tasks.py``.

A guest wants a table for so many people, on a day, at an hour, and says any or all of that, or nothing. Training,
validation and test have combinations of wordings of their own.
"""

import json
import random
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SIZES = {"train": 1600, "validation": 256, "test": 512}
WORDINGS = yaml.safe_load((HERE / "wordings.yaml").read_text(encoding="utf-8"))
VALUES = WORDINGS.pop("values")


def split_of(wordings: list[str]) -> str:
    """Where a combination of wordings belongs, whatever its order and values: a fifth each is validation and test."""
    return {0: "validation", 1: "test"}.get(zlib.crc32(" ".join(sorted(wordings)).encode()) % 5, "train")


def tasks(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Tasks without end; no sentence comes twice."""
    rng, seen = random.Random(f"{seed}/{split}"), set()
    while True:
        wish = {part: rng.choice(values) for part, values in VALUES.items()}
        said = [part for part in wish if rng.random() < 0.5]
        phrases = [(rng.choice(WORDINGS[part]), wish[part]) for part in said]
        if besides := rng.choice(WORDINGS["besides"]):
            phrases.append((besides, str(rng.randint(1, 9))))
        rng.shuffle(phrases)
        text = " ".join([rng.choice(WORDINGS["openings"]), *(words.format(value) for words, value in phrases)]) + "."
        if split_of([words for words, _ in phrases]) == split and text not in seen:
            seen.add(text)
            yield {"main_query": text, "wish": wish, "missing": [part for part in wish if part not in said]}


if __name__ == "__main__":
    (HERE / "data").mkdir(exist_ok=True)
    for name, size in SIZES.items():
        rows = (json.dumps(task) + "\n" for task in islice(tasks(name), size))
        (HERE / f"data/{name}.jsonl").write_text("".join(rows), encoding="utf-8")
