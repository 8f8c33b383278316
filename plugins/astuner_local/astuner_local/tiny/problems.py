"""Word problems with one arithmetic operation, and the held-out problems that must not be trained on.

A problem is a wording, two numbers, a name and a thing.  Train and held-out problems differ in the triple (wording, a,
b): about one triple in five is held out, selected by a hash that is the same on every machine, so no warm-up transcript
and no training task ever contains a held-out triple, regardless of the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

OPERATORS = "+-*/"
SMALLEST, LARGEST = 2, 12
"""Range of `a` and `b`; a dividend is their product."""

NAMES = ("Mia", "Tom", "Ana", "Ben", "Zoe", "Sam", "Eva", "Max")
THINGS = ("apples", "books", "coins", "cards", "eggs", "pens", "shells", "stars")

WORDINGS = (
    ("+", "{name} has {a} {things} and gets {b} more. How many now?"),
    ("-", "{name} has {a} {things} and gives away {b}. How many are left?"),
    ("*", "{name} has {a} boxes with {b} {things} in each. How many {things}?"),
    ("/", "{name} shares {a} {things} among {b} friends. How many for each?"),
    ("+", "{name} finds {b} {things} and already had {a}. How many in total?"),
    ("-", "{name} had {a} {things} and lost {b}. How many remain?"),
    ("*", "Each of {b} bags holds {a} {things}. How many does {name} carry?"),
    ("/", "{name} puts {a} {things} equally into {b} boxes. How many per box?"),
)
"""Operator and wording. Both operands appear as digits, not always in the order that the operation needs."""


@dataclass(frozen=True)
class Problem:
    """One word problem; ``left operator right`` is its solution."""

    question: str
    wording: int
    """Index into `WORDINGS`."""
    a: int
    b: int

    @property
    def operator(self) -> str:
        return WORDINGS[self.wording][0]

    @property
    def left(self) -> int:
        return self.a * self.b if self.operator == "/" else self.a

    @property
    def right(self) -> int:
        return self.b

    @property
    def answer(self) -> str:
        return evaluate(self.left, self.operator, self.right)

    def as_gsm8k(self) -> dict[str, str]:
        """Return the record in GSM8K's layout: the reference answer follows ``####``."""
        return {
            "question": self.question,
            "answer": f"{self.left} {self.operator} {self.right} = {self.answer}\n#### {self.answer}",
        }


def evaluate(left: int, operator: str, right: int) -> str:
    """Return the output of the example's calculator for ``left operator right``: exact, or rounded to 4 decimals."""
    if operator == "/":
        return str(left // right) if left % right == 0 else str(round(left / right, 4))
    return str({"+": left + right, "-": left - right, "*": left * right}[operator])


def is_held_out(wording: int, a: int, b: int) -> bool:
    """Return whether the triple is excluded from warm-up and training."""
    return hashlib.sha256(f"{wording}/{a}/{b}".encode()).digest()[0] % 5 == 0


def draw(rng: random.Random, *, held_out: bool) -> Problem:
    """Draw one problem of one side of the split; every allowed triple is equally likely."""
    while True:
        wording = rng.randrange(len(WORDINGS))
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        operator, text = WORDINGS[wording]
        if operator == "-" and a < b:
            a, b = b, a
        if is_held_out(wording, a, b) == held_out:
            break
    left = a * b if operator == "/" else a
    question = text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=left, b=b)
    return Problem(question, wording, a, b)


def distinct(count: int, seed: int, *, held_out: bool) -> Iterator[Problem]:
    """Draw ``count`` problems with different questions."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        problem = draw(rng, held_out=held_out)
        if problem.question not in seen:
            seen.add(problem.question)
            yield problem
