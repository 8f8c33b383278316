"""Writes the tasks of this example: ``python examples/learning_to_ask/make_tasks.py``.

A guest wants a table for so many people, on a day, at an hour, and says any or all of that, or nothing. What is said
besides has prepositions and numbers too. Training, validation and test have combinations of wordings of their own.
"""

from __future__ import annotations

import argparse
import json
import random
import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

SIZES = {"train": 1600, "validation": 256, "test": 512}
VALUES = {
    "people": [str(n) for n in range(2, 10)],
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
    "hour": [str(n) for n in range(1, 10)],
}
OPENINGS = ("A table", "Can we have a table", "Please book a table", "I need a table", "Do you have a table")
WORDINGS = {
    "people": ("for {}", "for {} people", "for a party of {}", "for {} of us"),
    "day": ("on {}", "this {}", "next {}", "{} evening"),
    "hour": ("at {}", "at {} o'clock", "around {}", "not before {}"),
}
BESIDES = ("", "", "for my birthday", "on the terrace", "at the window", "like table {}", "with {} candles")


def split_of(wording: str) -> str:
    """Where a combination of wordings belongs, whatever their order and values: a fifth each is validation and test."""
    return {0: "validation", 1: "test"}.get(zlib.crc32(wording.encode()) % 5, "train")


def tasks(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Tasks without end; no sentence comes twice."""
    rng, seen = random.Random(f"{seed}/{split}"), set()
    while True:
        wish = {part: rng.choice(values) for part, values in VALUES.items()}
        said = [part for part in wish if rng.random() < 0.5]
        phrases = [(rng.choice(WORDINGS[part]), wish[part]) for part in said]
        if besides := rng.choice(BESIDES):
            phrases.append((besides, str(rng.randint(1, 9))))
        rng.shuffle(phrases)
        opening = rng.choice(OPENINGS)
        wording = " ".join(sorted(words for words, _ in phrases))
        text = " ".join([opening, *(words.format(value) for words, value in phrases)]) + "."
        if split_of(wording) == split and text not in seen:
            seen.add(text)
            yield {"main_query": text, "wish": wish, "missing": [part for part in wish if part not in said]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        rows = (json.dumps(task) + "\n" for task in islice(tasks(split), size))
        (folder / f"{split}.jsonl").write_text("".join(rows), encoding="utf-8")
