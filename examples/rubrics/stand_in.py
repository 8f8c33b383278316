"""A stand-in for a real language model as helper: scripted, so that the example runs anywhere and costs nothing.

It gets the requests that a real one would get, over HTTP, and it knows the hidden rubric (`people.WANTED`), by design:
it stands for a model that understands people, and what is tested is the way from comparisons to a trained model, not a
model's insight.  Where it is asked for criteria, it names those of the hidden rubric that explain the verdict which it
was shown, with the hidden weights; where it is asked for grades, it goes by the words of each criterion and nothing
else.  It errs: a proposal in ten is beside the point, and every single grade is the opposite with probability `NOISE`.
Errors are a hash of the request, so the same question gets the same answer.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from typing import Any

from people import WANTED, does

from astuner_rubrics.fence import fences_in, without_fences

NOISE = 0.1
WORDS = {
    "answers": ("asked", ("says what the customer asked for", "gives the answer to what was asked")),
    "sells nothing": ("sell|advertis", ("does not try to sell anything", "keeps advertising out")),
    "sorry when due": ("sorry|apolog", ("says sorry where something went wrong, and only there",
                                        "apologises when the shop is at fault and not otherwise")),
    "says where": ("terms", ("names the section of the terms that it goes by", "says where in the terms this stands")),
    "greets": ("greet|by name", ("greets the customer by name",)),
    "thanks": ("thank", ("thanks the customer",)),
}  # fmt: skip
"""What tells that a criterion is about a thing, and how the stand-in would write one that is."""
JUNK = ("is good", "has the right length", "would be liked")


def reply(body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to the body of a chat request."""
    content: str = body["messages"][-1]["content"]
    blocks = {fence.label: fence.text for fence in fences_in(content)}
    answers = [text for label, text in blocks.items() if label.startswith("ANSWER")]
    outside = without_fences(content)
    rng = random.Random(hashlib.sha256(content.encode()).digest())
    if verdict := re.search(r"Their verdict: (.*)", outside):
        return {"criteria": _propose(blocks["QUESTION"], answers, verdict[1], rng)}
    scale = re.search(r"from (\S+) \(.*to (\S+) \(", outside)
    if scale is None:
        raise ValueError(f"the stand-in knows how to propose criteria and how to grade, and not: {outside[:200]}")
    criteria = [(int(number), text) for number, text in re.findall(r"^(\d+)\. (.*)$", blocks["CRITERIA"], re.MULTILINE)]
    low, high = map(float, scale.groups())
    return {
        "grades": [
            {
                "criterion": number,
                "reason": "as it says",
                "grades": [grade(text, blocks["QUESTION"], answer, low, high, rng) for answer in answers],
            }
            for number, text in criteria
        ]
    }


def _propose(question: str, answers: Sequence[str], verdict: str, rng: random.Random) -> list[dict[str, Any]]:
    if rng.random() < 0.1:
        beside = rng.choice([*JUNK, *WORDS["greets"][1], *WORDS["thanks"][1]])
        return [{"criterion": f"The answer {beside}.", "weight": 1}]
    order = [int(number) - 1 for number in re.findall(r"ANSWER (\d+)", verdict)]
    best, worst = does(question, answers[order[0]]), does(question, answers[order[-1]])
    names = [name for name in WANTED if best[name] and not worst[name]] or [rng.choice(list(WORDS))]
    return [
        {"criterion": f"The answer {rng.choice(WORDS[name][1])}.", "weight": max(1, WANTED.get(name, 1))}
        for name in names[:3]
    ]


def grade(
    criterion: str, question: str, answer: str, low: float, high: float, rng: random.Random | None = None
) -> float:
    """Best or worst, or the middle for a criterion that names nothing that can be seen; without ``rng``, no errors."""
    done = does(question, answer)
    met = [done[name] for name, (words, _) in WORDS.items() if re.search(words, criterion, re.IGNORECASE)]
    if not met:
        return (low + high) / 2
    share = sum(met) / len(met)
    if rng is not None and rng.random() < NOISE:
        share = 1 - share
    return low + (high - low) * share
