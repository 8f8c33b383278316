"""Writes documents and questions of this example: ``python examples/search_documents/make_tasks.py``.

A document is about a village or a person, who was born in one village and lives in another. Some questions name the
village, others only somebody of there, so that it takes two searches. Training, validation and test have villages and
people of their own: whatever was learned about one is of no use for another.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SPLITS = {
    "train": (slice(72), slice(40)),
    "validation": (slice(72, 102), slice(40, 60)),
    "test": (slice(102, 144), slice(60, 88)),
}
"""Which of the villages and people."""
WORDS = yaml.safe_load((HERE / "words.yaml").read_text(encoding="utf-8"))
FACTS, TIES = WORDS["facts"], WORDS["ties"]


class World:
    """The villages and people of a split, whom no other split has; what is said of them is drawn from the seed."""

    def __init__(self, split: str, seed: int = 0) -> None:
        self.split, self._rng = split, random.Random(f"{seed}/{split}")
        names = [[f"{a} {b}" for a in WORDS[of][0] for b in WORDS[of][1]] for of in ("villages", "people")]
        for every in names:
            random.Random(0).shuffle(every)
        villages, people = (every[mine] for every, mine in zip(names, SPLITS[split], strict=True))
        self.villages = {name: dict(zip(FACTS, self._rng.sample("123456789", 4), strict=True)) for name in villages}
        self.people = {name: dict(zip(TIES, self._rng.sample(villages, 2), strict=True)) for name in people}

    def documents(self, of: str) -> Iterator[tuple[str, str]]:
        """Titles and texts of `villages` or `people`; what is said of one comes in any order."""
        for name, facts in getattr(self, of).items():
            said = self._rng.sample(list(facts.items()), len(facts))
            yield name, ", ".join(f"{fact} {n}" if of == "villages" else f"{fact} in {n}" for fact, n in said) + "."

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Every question, in any order."""
        asked = [(name, f"in {name}") for name in self.villages]
        asked += [(ties[t], f"where {name} {t}") for name, ties in self.people.items() for t in TIES]
        every = [(village, where, fact) for village, where in asked for fact in FACTS]
        for village, where, fact in self._rng.sample(every, len(every)):
            text, answer = f"How many {fact} are there {where}?", self.villages[village][fact]
            yield {"main_query": text, "answer": answer, "source": village, "documents": self.split}


if __name__ == "__main__":
    for split in SPLITS:
        world, folder = World(split), HERE / "documents" / split
        folder.mkdir(parents=True, exist_ok=True)
        for of in ("villages", "people"):
            text = "\n".join(f"# {title}\n\n{text}\n" for title, text in world.documents(of))
            (folder / f"{of}.md").write_text(text, encoding="utf-8")
        (HERE / "data").mkdir(exist_ok=True)
        rows = "".join(json.dumps(task) + "\n" for task in world.tasks())
        (HERE / f"data/{split}.jsonl").write_text(rows, encoding="utf-8")
