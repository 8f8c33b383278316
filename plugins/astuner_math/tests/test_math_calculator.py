"""Arithmetic without `eval`: right where Python is right, and bounded whatever is asked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner_math.calculator import MAX_EXPRESSION, CalculatorError, calculate
from tests.table import table


@table(
    ("expression", "value"),
    [
        ("1+2*3", 7),
        ("(1+2)*3", 9),
        ("7/2", 3.5),
        ("6/3", 2),
        ("7//2", 3),
        ("-7 % 3", 2),
        ("2**10", 1024),
        ("2^10", 1024),
        ("-2**2", -4),
        ("2**-1", 0.5),
        ("--3", 3),
        ("+3", 3),
        ("1,234 + 1", 1235),
        ("007 + 1", 8),
        (".5 + 1.", 1.5),
        ("1e3", 1000),
        ("3 × 4 ÷ 2 − 1", 5),
        ("  ( 2 )\n", 2),
        ("10**20 + 1", 10**20 + 1),
    ],
)
def test_value(expression, value):
    assert calculate(expression) == value
    assert type(calculate(expression)) is type(value)


@table(
    ("expression", "says"),
    [
        ("", "cannot read"),
        ("1 +", "cannot read"),
        ("1 2", "cannot read"),
        ("()", "only numbers"),
        ("5(3)", "only numbers"),
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("x + 1", "'x' is not arithmetic"),
        ("1 if 1 else 2", "not arithmetic"),
        ("1_000", "not arithmetic"),
        ("0x10", "not arithmetic"),
        ("1 == 1", "not arithmetic"),
        ("1, 2", "not arithmetic"),
        ("'a' * 9", "not arithmetic"),
        ("2j", "not arithmetic"),
        ("(-8) ** 0.5", "no real root"),
        ("9**9**9", "too large"),
        ("9**9**9**9", "too large"),
        ("10**-99999999999", "too large"),
        ("1e308 * 10", "too large"),
        ("2**8000 * 2**8000", "too large"),
        ("1e999", "too large"),
        ("10**2000 / 1.5", "too large"),
        ("(" * 300 + "1" + ")" * 199, "cannot read"),
        ("1" * (MAX_EXPRESSION + 1), "longer than"),
        ("__import__('os').system('true')", "not arithmetic"),
        ("().__class__", "not arithmetic"),
        ("\0", "not arithmetic"),
    ],
)
def test_what_is_refused_says_why(expression, says):
    with pytest.raises(CalculatorError) as refusal:
        calculate(expression)
    assert says in str(refusal.value)


@given(st.text(alphabet="0123456789.+-*/%()^, e", max_size=60))
def test_any_expression_has_a_finite_value_or_an_error(expression):
    try:
        value = calculate(expression)
    except CalculatorError:
        return
    assert math.isfinite(value) if isinstance(value, float) else len(str(value)) < 4300


@given(
    st.recursive(
        st.integers(0, 99).map(str), lambda e: st.tuples(e, st.sampled_from("+-*"), e).map(" ".join), max_leaves=12
    )
)
def test_integer_arithmetic_is_pythons(expression):
    assert calculate(expression) == eval(expression)
