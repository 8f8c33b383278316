"""The one tool of these examples, as a plain function; every framework makes its own description of it."""

from astuner_math.calculator import CalculatorError, calculate

SYSTEM_PROMPT = "You solve math problems with a calculator. Answer with \\boxed{}."


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses.
    """
    try:
        return str(round(calculate(expression), 4))
    except CalculatorError as error:
        return f"error: {error}"


PARAMETERS = {
    "type": "object",
    "properties": {"expression": {"type": "string", "description": "Numbers, + - * / and parentheses."}},
    "required": ["expression"],
}
"""For those who speak to the API without a framework."""
