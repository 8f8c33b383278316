"""What the customers of the shop really want, which nobody has written down: the hidden rubric.

Three things use it: the people who say which of two replies they like better, the measurement at the very end, and the
stand-in for a language model (`stand_in.py`), which knows it by design, as it stands for a model that understands
people.  ASTuner itself never sees it: `astuner judge learn`, the rubrics' judge and the training get comparisons, and
what the stand-in says of them.  So what is tested is the way, and not a model's insight.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from desk import FACTS, Question, about

WANTED = {"answers": 4.0, "sells nothing": 2.0, "sorry when due": 2.0, "says where": 1.0}
"""What a reply should do, and how much it counts."""
MISTAKEN = 0.05
"""Share of people who click on the wrong reply."""


def does(question: str, reply: str) -> dict[str, bool]:
    """Which of the things that can be said about a reply are true of it; the last two count for nobody."""
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
    """How much people like a reply: the share of what they want, from 0 to 1."""
    done = does(question, reply)
    return sum(weight for name, weight in WANTED.items() if done[name]) / sum(WANTED.values())


def compared(asked: Sequence[tuple[Question, str, str]], rng: random.Random) -> list[dict[str, Any]]:
    """Labels, as `astuner judge learn` reads them; who sees no difference says nothing."""
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
