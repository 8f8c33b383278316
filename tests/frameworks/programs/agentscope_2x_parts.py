"""What the programs with agents of AgentScope 2.x share: a tool, a structure, and the fields of a summary."""

from __future__ import annotations

from pydantic import BaseModel

SUMMARY = (
    '{"task_overview": "t", "current_state": "c", "important_discoveries": "i", "next_steps": "n", '
    '"context_to_preserve": "p"}'
)


class Answer(BaseModel):
    result: int


async def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a (int): one
        b (int): the other
    """
    return str(a * b)
