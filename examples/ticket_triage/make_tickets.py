"""Writes the tickets of this example: ``python examples/ticket_triage/make_tickets.py``.

A ticket is a wording with a thing, a day and a number in it; no ticket comes twice.  Training, validation and test have
wordings of their own (``wordings.yaml``), so a test ticket says what no training ticket says.  Choose a recipe by the
validation tickets; the test tickets are for its one report.  Forty training tickets are demonstrations, with answers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from triage import conversation, label_as_json

HERE = Path(__file__).parent
WORDINGS = yaml.safe_load((HERE / "wordings.yaml").read_text(encoding="utf-8"))
LABELS = tuple(WORDINGS["train"])
SIZES = {"train": 500, "validation": 128, "test": 256}
DEMONSTRATIONS = 40
THINGS = (
    "lamp", "radio", "phone", "camera", "watch", "printer", "speaker", "tablet", "toaster", "fan", "clock", "drill",
    "mixer", "kettle", "scale", "router", "laptop", "keyboard", "mouse", "oven", "fridge", "shaver", "iron", "blender",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")


def tickets(split: str, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield the tasks of a split, with the labels in turn, so that all are equally frequent."""
    rng, written = random.Random(f"{seed}/{split}"), set[str]()
    while len(written) < SIZES[split]:
        label = LABELS[len(written) % len(LABELS)]
        wording = rng.choice(WORDINGS[split][label])
        text = wording.format(thing=rng.choice(THINGS), day=rng.choice(DAYS), number=rng.randint(100, 999))
        if text not in written:
            written.add(text)
            yield {"main_query": text, "label": label}


def demonstration(ticket: dict[str, str]) -> dict[str, Any]:
    """Return a training ticket with its answer in the agent's format; messages of the prompt have weight 0."""
    asked: list[dict[str, Any]] = [{**message, "weight": 0} for message in conversation(ticket["main_query"])]
    return {"messages": [*asked, {"role": "assistant", "content": label_as_json(ticket["label"])}]}


def write(file: Path, rows: Sequence[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "data")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for split in SIZES:
        rows = list(tickets(split))
        random.Random(split).shuffle(rows)
        write(folder / f"{split}.jsonl", rows)
    write(folder / "demonstrations.jsonl", list(map(demonstration, list(tickets("train", seed=1))[:DEMONSTRATIONS])))
