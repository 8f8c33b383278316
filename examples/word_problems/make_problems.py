"""Writes the problems of this example: ``python examples/word_problems/make_problems.py``.

They are those of `astuner_local.tiny.problems` in GSM8K's layout: eight wordings, two numbers, one operation.  What is
held out are wordings with two numbers in them; validation and test share none of these either.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from astuner_local.tiny.problems import Problem, distinct

SIZES = {"train": 1000, "validation": 128, "test": 256}


def problems() -> dict[str, list[Problem]]:
    """Return the problems of each split."""
    held_out = list(distinct(4 * sum(SIZES.values()), seed=1, held_out=True))
    triples = sorted({(p.wording, p.a, p.b) for p in held_out})
    random.Random(0).shuffle(triples)
    for_test = {*triples[: len(triples) * 2 // 3]}
    return {
        "train": list(distinct(SIZES["train"], seed=0, held_out=False)),
        "validation": [p for p in held_out if (p.wording, p.a, p.b) not in for_test][: SIZES["validation"]],
        "test": [p for p in held_out if (p.wording, p.a, p.b) in for_test][: SIZES["test"]],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for split, found in problems().items():
        lines = [json.dumps(problem.as_gsm8k()) + "\n" for problem in found]
        (folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
