"""What the Python clients share: the system prompt and the tool, in plain Python."""

import operator
import re

SYSTEM = "You solve math problems with a calculator. Answer with \\boxed{}."
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "×": operator.mul, "/": operator.truediv}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Two numbers and a sign, such as 2 * 3.
    """
    parts = re.fullmatch(r"\s*([\d.]+)\s*([-+*×/])\s*([\d.]+)\s*", expression)
    try:
        return f"{SIGNS[parts[2]](float(parts[1]), float(parts[3])):g}"
    except (TypeError, ValueError, ZeroDivisionError) as error:
        return f"error: {error}"
