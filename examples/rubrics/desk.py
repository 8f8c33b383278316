"""The help desk of a shop: what customers write, and the sentences that replies are made of.

A question has a wording, a name and a thing.  About one question in four is held out, chosen by a hash that is the same
everywhere: no transcript, no label and no training task has it.
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
"""What it is about, and how it is said."""

FACTS = {"late": "They come on Monday.", "broken": "We send you new ones.", "price": "They cost 9 euros."}
"""What there is to be said about it."""
GREETING, SORRY, SOURCE = "Dear {name},", "We are sorry.", "This is section {number} of our terms."
SALE, THANKS = "Buy our new {things} now!", "Thank you for writing."


@dataclass(frozen=True)
class Question:
    """What a customer writes."""

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
    """All of one side of the split, in an order that says nothing."""
    every = [Question(w, n, t) for w, n, t in itertools.product(range(len(WORDINGS)), NAMES, THINGS)]
    random.Random(0).shuffle(every)
    return [question for question in every if question.is_held_out == held_out]


def about(question: str) -> str | None:
    """Return the topic of a question, or None for a question from another shop."""
    for topic, wording in WORDINGS:
        first, last = (re.escape(part) for part in wording.split("{things}"))
        if re.search(rf"{first}\w+{last}", question):
            return topic
    return None


def anyhow(question: Question, rng: random.Random) -> str:
    """Return a well-written reply without thought: its parts are present at random, and its fact is random too."""
    parts = [
        (0.5, GREETING.format(name=question.name)),
        (0.5, SORRY),
        (1.0, rng.choice(list(FACTS.values()))),
        (0.4, SOURCE.format(number=rng.randint(1, 9))),
        (0.5, SALE.format(things=rng.choice(THINGS))),
        (0.5, THANKS),
    ]
    return " ".join(text for chance, text in parts if rng.random() < chance)
