"""Create the tasks of this example: ``python examples/learning_to_ask/make_tasks.py``.

A guest wants a table for a number of people, on a day, at an hour, and mentions any of these. Training, validation and
test use different combinations of wordings.
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
    """Return the split of a combination of wordings in any order: 20 % each for validation and test."""
    return {0: "validation", 1: "test"}.get(zlib.crc32(" ".join(sorted(wordings)).encode()) % 5, "train")


def tasks(split: str, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield an endless sequence of tasks without repeated sentences."""
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
