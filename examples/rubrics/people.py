"""The hidden rubric: what the customers of the shop like.

It is used by the simulated people who compare replies, by the final measurement, and by the stand-in for a language
model (`stand_in.py`). ASTuner does not use it: `astuner judge learn`, the rubrics judge and the training only see the
comparisons and the stand-in's answers. The example tests the process and not a model's insight.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from desk import FACTS, Question, about

WANTED = {"answers": 4.0, "sells nothing": 2.0, "sorry when due": 2.0, "says where": 1.0}
"""Desired properties of a reply and their weights."""
MISTAKEN = 0.05
"""Share of people who click on the wrong reply."""


def does(question: str, reply: str) -> dict[str, bool]:
    """Return the properties of a reply. The last two have no weight."""
    topic = about(question)
    facts = {key for key, fact in FACTS.items() if fact in reply}
    return {
        "answers": facts == {topic},
        "sells nothing": "Buy" not in reply,
        "sorry when due": ("sorry" in reply) == (topic in ("late", "broken")),
        "says where": re.search(r"section \d of our terms", reply) is not None,
        "greets": reply.startswith("Dear "),
        "thanks": "Thank you" in reply,
    }


def worth(question: str, reply: str) -> float:
    """Return how much people like a reply: the weighted share of desired properties, from 0 to 1."""
    done = does(question, reply)
    return sum(weight for name, weight in WANTED.items() if done[name]) / sum(WANTED.values())


def compared(asked: Sequence[tuple[Question, str, str]], rng: random.Random) -> list[dict[str, Any]]:
    """Return labels for `astuner judge learn`, without pairs of equal value."""
    labels = []
    for question, one, other in asked:
        first, second = worth(question.text, one), worth(question.text, other)
        if first == second:
            continue
        preferred = int(second > first)
        if rng.random() < MISTAKEN:
            preferred = 1 - preferred
        labels.append({"question": question.text, "answers": [one, other], "preferred": preferred})
    return labels
