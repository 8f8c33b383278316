"""Evaluate arithmetic expressions for an agent, without `eval`.

An expression is split into numbers, operators and parentheses, so nothing else can reach Python's parser; the syntax
tree is then evaluated node by node. Inputs, powers and results are limited in size, so an expression takes at most a
few milliseconds.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

Number = int | float

MAX_EXPRESSION = 500
"""Maximum characters of an expression."""
MAX_BITS = 8192
"""Maximum bits of an integer result: about 2,400 decimal digits, below Python's limit for printing."""

_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?![\d,])")
_TOKEN = re.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<operator>\*\*|//|[-+*/%()]))")
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})

_BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorError(ValueError):
    """Raised if an expression is not arithmetic or too large; the model receives the message."""


def calculate(expression: str) -> Number:
    """Return the value of ``expression``: + - * / // % ** (or ^), parentheses, integers and decimals.

    >>> calculate("(1,200 + 3) * 2")
    2406

    :returns: An int if the result is an integer below 2**53, else a float (or an exact large int).
    :raises CalculatorError: The expression is not arithmetic, divides by zero, or is too large.
    """
    if len(expression) > MAX_EXPRESSION:
        raise CalculatorError(f"the expression is longer than {MAX_EXPRESSION} characters")
    try:
        tree = ast.parse(_tokens(expression), mode="eval")
        value = _bounded(_value(tree.body))
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except OverflowError:
        raise CalculatorError("the result is too large") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise CalculatorError(f"cannot read {expression.strip()!r} as arithmetic") from None
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def _tokens(expression: str) -> str:
    """Return the tokens of an expression separated by spaces; raise an error for other text."""
    text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), expression.translate(_SPELLINGS)).strip()
    out, at = [], 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise CalculatorError(
                f"{text[at:].split()[0][:20]!r} is not arithmetic; use numbers, + - * / // % ** and ( )"
            )
        token = match[match.lastgroup or 0]
        out.append((token.lstrip("0") or "0") if token.isdigit() else token)
        at = match.end()
    return " ".join(out)


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _bounded(_power(left, right))
        return _bounded(_BINARY[type(node.op)](left, right))
    raise CalculatorError("only numbers, + - * / // % ** and ( ) are arithmetic")


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise CalculatorError("a negative number has no real root of that kind")
    return value


def _bounded(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise OverflowError
    elif not math.isfinite(value):
        raise OverflowError
    return value
