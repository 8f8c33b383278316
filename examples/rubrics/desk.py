"""The help desk of a shop: questions of customers, and sentences of replies.

A question has a wording, a name and a thing. About one question in four is held out, selected by a stable hash: it
occurs in no transcript, label or training task.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from dataclasses import dataclass

SYSTEM_PROMPT = "You answer the customers of a shop."
NAMES = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max")
THINGS = ("lamps", "books", "chairs", "cups", "pens", "plates", "shelves", "shoes")
WORDINGS = (
    ("late", "Where are my {things}?"),
    ("late", "My {things} have not come yet."),
    ("broken", "My {things} came broken."),
    ("broken", "Two of the {things} do not work."),
    ("price", "How much are the {things}?"),
    ("price", "What would {things} cost?"),
)
"""Topics and wordings."""

FACTS = {"late": "They come on Monday.", "broken": "We send you new ones.", "price": "They cost 9 euros."}
"""Right answers by topic."""
GREETING, SORRY, SOURCE = "Dear {name},", "We are sorry.", "This is section {number} of our terms."
SALE, THANKS = "Buy our new {things} now!", "Thank you for writing."


@dataclass(frozen=True)
class Question:
    """A customer's question."""

    wording: int
    name: str
    things: str

    @property
    def about(self) -> str:
        return WORDINGS[self.wording][0]

    @property
    def text(self) -> str:
        return f"{self.name} writes: {WORDINGS[self.wording][1].format(things=self.things)}"

    @property
    def is_held_out(self) -> bool:
        return hashlib.sha256(self.text.encode()).digest()[0] % 4 == 0


def questions(*, held_out: bool) -> list[Question]:
    """Return all questions of one side of the split, in a pseudo-random order."""
    every = [Question(w, n, t) for w, n, t in itertools.product(range(len(WORDINGS)), NAMES, THINGS)]
    random.Random(0).shuffle(every)
    return [question for question in every if question.is_held_out == held_out]


def about(question: str) -> str | None:
    """Return the topic of a question, or None if it is unknown."""
    for topic, wording in WORDINGS:
        first, last = (re.escape(part) for part in wording.split("{things}"))
        if re.search(rf"{first}\w+{last}", question):
            return topic
    return None


def anyhow(question: Question, rng: random.Random) -> str:
    """Return a well-formed reply with random parts and a random fact."""
    parts = [
        (0.5, GREETING.format(name=question.name)),
        (0.5, SORRY),
        (1.0, rng.choice(list(FACTS.values()))),
        (0.4, SOURCE.format(number=rng.randint(1, 9))),
        (0.5, SALE.format(things=rng.choice(THINGS))),
        (0.5, THANKS),
    ]
    return " ".join(text for chance, text in parts if rng.random() < chance)
