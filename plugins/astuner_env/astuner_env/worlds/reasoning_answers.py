"""What one of reasoning-gym's scorers is shown of an answer: the answer, or nothing.

Some scorers run what they are shown, as Python or as a formula of sympy's, which does the same; others take nonsense
for right.  Invariant: a scorer that runs text is shown text that this module wrote, from values or sums that it read
by itself, or the reference answer.  Where there is no such form, the data set is refused (`REFUSED`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

_RUNS_FORMULAS = "it is scored by running the answer as code, in sympy"
REFUSED: Mapping[str, str] = {
    "composite": "it cannot be made from a name and a seed",
    "simple_integration": _RUNS_FORMULAS,
    "intermediate_integration": _RUNS_FORMULAS,
    "polynomial_multiplication": _RUNS_FORMULAS,
    "game_of_life_halting": "its scorer takes any text for right",
    "coin_flip": "its scorer takes 0 for nearly any probability",
}
"""Data set -> why it is not offered."""
READ_AS_PYTHON = frozenset({"string_insertion", "spiral_matrix", "binary_matrix", "n_queens"})
"""``eval`` reads the answer, which should be a list, unless it is the very reference."""
READ_AS_ARITHMETIC = frozenset({"countdown", "puzzle24"})
"""Sympy reads the answer, which should be a sum of the question's numbers."""
MOST_CHARACTERS = 20_000
"""Of an answer."""
LONGEST_SUM = 500
"""Characters of an arithmetic answer; without powers its value has about as many digits."""
MOST_NESTED = 50
"""Lists in lists, or operations in operations."""

_NAN = re.compile(r"(?<![a-z])s?nan\d*[ij]?(?![a-z])", re.IGNORECASE)
_OPERATIONS: Mapping[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGNS: Mapping[type, int] = {ast.UAdd: 1, ast.USub: -1}


class NotShown(ValueError):
    """The scorer must not see the answer; says why."""


def shown(dataset: str, answer: str, entry: Mapping[str, Any]) -> str:
    """What the scorer may see.

    :param entry: the task, as reasoning-gym made it.
    :raises NotShown: nothing of the answer; it is wrong.
    """
    if len(answer) > MOST_CHARACTERS:
        raise NotShown(f"it has more than {MOST_CHARACTERS} characters")
    if answer in _references(entry):
        return answer
    if _NAN.search(answer) and not _NAN.search(str(entry["answer"])):
        raise NotShown("a number that is none equals nothing, but to some scorers everything")
    if dataset in READ_AS_PYTHON:
        return rewritten_list(answer)
    if dataset in READ_AS_ARITHMETIC:
        total = rewritten_sum(answer)
        if dataset == "puzzle24" and Counter(total.numbers) != Counter(entry["metadata"]["numbers"]):
            raise NotShown("it does not use the question's numbers, which the scorer does not look at")
        if dataset == "puzzle24" and total.value.denominator != 1:
            raise NotShown("it is no whole number, and the scorer cuts off what is behind the point")
        return total.text
    return answer


def rewritten_list(answer: str) -> str:
    """A list of whole numbers, texts and further lists, written anew.

    :raises NotShown: it is anything else.
    """
    try:
        value = ast.literal_eval(answer)
        _check_value(value, MOST_NESTED)
        return repr(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as e:
        raise NotShown(f"it is no list of numbers or texts ({type(e).__name__})") from None


@dataclass(frozen=True)
class Sum:
    """An arithmetic answer."""

    text: str
    numbers: tuple[int, ...]
    """As they occur in it."""
    value: Fraction


def rewritten_sum(answer: str) -> Sum:
    """A sum of whole numbers with ``+ - * /`` and parentheses, written anew.

    :raises NotShown: it is anything else, or divides by 0.
    """
    try:
        # plain numbers only: 1_0, 1e1 and 0x1 would hide from a scorer which numbers are used, and 1.2 splits in two
        if len(answer) > LONGEST_SUM or not re.fullmatch(r"[0-9\s+\-*/()]+", answer, re.ASCII):
            raise ValueError("other characters")
        tree = ast.parse(answer.strip(), mode="eval").body
        value = _value(tree, MOST_NESTED)
    except (ValueError, SyntaxError, ZeroDivisionError, MemoryError, RecursionError) as e:
        reason = f"{type(e).__name__}: {e}"[:100]
        raise NotShown(f"it is no sum of whole numbers with + - * / and parentheses ({reason})") from None
    numbers = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return Sum(ast.unparse(tree), tuple(number for number in numbers if isinstance(number, int)), value)


def _references(entry: Mapping[str, Any]) -> set[str]:
    """Texts that the scorer compares the answer with before it does anything else."""
    metadata = entry.get("metadata") or {}
    return {str(right).strip() for right in (entry["answer"], *metadata.get("valid_answers", ()))}


def _check_value(value: Any, depth: int) -> None:
    if depth == 0:
        raise ValueError("nested too deep")
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_value(item, depth - 1)
    elif not isinstance(value, (int, str)):
        raise ValueError(f"it holds a {type(value).__name__}")


def _value(tree: ast.expr, depth: int) -> Fraction:
    if depth == 0:
        raise ValueError("nested too deep")
    if isinstance(tree, ast.BinOp) and type(tree.op) in _OPERATIONS:
        return _OPERATIONS[type(tree.op)](_value(tree.left, depth - 1), _value(tree.right, depth - 1))
    if isinstance(tree, ast.UnaryOp) and type(tree.op) in _SIGNS:
        return _SIGNS[type(tree.op)] * _value(tree.operand, depth - 1)
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return Fraction(tree.value)
    raise ValueError("another operation")
