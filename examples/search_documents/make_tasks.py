"""Writes documents and questions of this example: ``python examples/search_documents/make_tasks.py``.

A document is about a village or a person, who was born in one village and lives in another. Some questions name the
village, others only somebody of there, so that it takes two searches. Training, validation and test have villages and
people of their own: whatever was learned about one is of no use for another.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SPLITS = {"train": (72, 40), "validation": (30, 20), "test": (42, 28)}
"""How many villages and people."""
PLACES = (
    "Upper Lower Old New North South East West Great Little Long Dry".split(),
    "Marsh Harbour Hill Bay Moor Ferry Bridge Mill Wood Lake Field Ford".split(),
)
NAMES = (
    "Ada Ben Cleo Dan Eva Finn Gus Hal Ida Jon Kim Leo Mia Ned Ola Pia".split(),
    "Archer Baker Carter Dyer Eel Fisher Glover Hooper Inman Joiner Keeper Lister Mason Nailer Oster Potter".split(),
)
FACTS = "boats goats houses wells".split()
TIES = ("lives", "was born")


class World:
    """The villages and people of a split, whom no other split has; what is said of them is drawn from the seed."""

    def __init__(self, split: str, seed: int = 0) -> None:
        self.split, rng = split, random.Random(f"{seed}/{split}")
        names = [[f"{a} {b}" for a in first for b in last] for first, last in (PLACES, NAMES)]
        for each in names:
            random.Random(0).shuffle(each)
        begin = [sum(SPLITS[s][kind] for s in list(SPLITS)[: list(SPLITS).index(split)]) for kind in (0, 1)]
        villages, people = (n[b : b + size] for n, b, size in zip(names, begin, SPLITS[split], strict=True))
        self.villages = {name: {fact: str(rng.randint(2, 99)) for fact in FACTS} for name in villages}
        self.people = {name: dict(zip(TIES, rng.sample(villages, 2), strict=True)) for name in people}
        self._rng = rng

    def documents(self, of: str) -> Iterator[tuple[str, str]]:
        """Titles and texts of `villages` or `people`; what is said of one comes in any order."""
        for name, facts in getattr(self, of).items():
            said = self._rng.sample(list(facts.items()), len(facts))
            yield name, ", ".join(f"{n} {fact}" if of == "villages" else f"{fact} in {n}" for fact, n in said) + "."

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Every question, in any order."""
        asked = [(name, f"in {name}") for name in self.villages]
        asked += [(ties[t], f"where {name} {t}") for name, ties in self.people.items() for t in TIES]
        every = [(village, where, fact) for village, where in asked for fact in FACTS]
        for village, where, fact in self._rng.sample(every, len(every)):
            yield {
                "main_query": f"How many {fact} are there {where}?",
                "answer": self.villages[village][fact],
                "source": village,
                "documents": self.split,
            }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out = parser.parse_args().out
    for split in SPLITS:
        world, folder = World(split), out / "documents" / split
        folder.mkdir(parents=True, exist_ok=True)
        for of in ("villages", "people"):
            text = "\n".join(f"# {title}\n\n{text}\n" for title, text in world.documents(of))
            (folder / f"{of}.md").write_text(text, encoding="utf-8")
        (out / "data").mkdir(exist_ok=True)
        rows = "".join(json.dumps(task) + "\n" for task in world.tasks())
        (out / "data" / f"{split}.jsonl").write_text(rows, encoding="utf-8")
