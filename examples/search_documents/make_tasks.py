"""Create documents and questions of this example: ``python examples/search_documents/make_tasks.py``.

A document describes a village, or a person who lives or was born there. Half of the questions name the village; the
others name only a person and take two searches. Training, validation and test use different villages and people, so
memorized facts do not help.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
SPLITS = {"train": slice(50), "validation": slice(50, 66), "test": slice(66, 100)}
"""Range of the 100 villages and of the 100 people in each split."""
WORDS = yaml.safe_load((HERE / "words.yaml").read_text(encoding="utf-8"))
FACTS, NUMBERS, TIES = WORDS["facts"], WORDS["numbers"], WORDS["ties"]


class World:
    """Villages and people of a split, with facts drawn from the seed."""

    def __init__(self, split: str, seed: int = 0) -> None:
        self.split, self._rng = split, random.Random(f"{seed}/{split}")
        names = [[f"{a} {b}" for a in WORDS[of][0] for b in WORDS[of][1]] for of in ("villages", "people")]
        villages, people = (random.Random(0).sample(every, len(every))[SPLITS[split]] for every in names)
        self.villages = {name: dict(zip(FACTS, self._rng.sample(NUMBERS, 4), strict=True)) for name in villages}
        self.people = {name: {self._rng.choice([*TIES]): self._rng.choice(villages)} for name in people}

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield titles and texts."""
        for name, facts in (self.villages | self.people).items():
            yield name, "\n".join(f"- {what} {said}" for what, said in facts.items())

    def tasks(self) -> Iterator[dict[str, Any]]:
        """Yield every question in random order."""
        asked = [(name, f"in {name}") for name in self.villages]
        asked += [(there, TIES[tie].format(name)) for name, of in self.people.items() for tie, there in of.items()]
        every = [(village, f"How many {fact} are there {where}?", fact) for village, where in asked for fact in FACTS]
        for village, text, fact in self._rng.sample(every, len(every)):
            yield dict(main_query=text, answer=self.villages[village][fact], source=village, documents=self.split)


if __name__ == "__main__":
    for split in SPLITS:
        world, folder = World(split), HERE / "documents" / split
        folder.mkdir(parents=True, exist_ok=True)
        texts = (f"# {title}\n\n{text}\n" for title, text in world.documents())
        (folder / "parish.md").write_text("\n".join(texts), encoding="utf-8")
        rows = (json.dumps(task) + "\n" for task in world.tasks())
        (HERE / f"data/{split}.jsonl").write_text("".join(rows), encoding="utf-8")
