"""Warm-up transcripts between the example's agent and a model that writes well-formed text without understanding.

Messages and tools are exactly those of the AgentScope agent of ``examples/math_agent`` (a test runs that agent and
compares), and the operands are the problem's own; operator and operand order are random.  A model that imitates the
transcripts therefore learns the format, but not the meaning of the words.
"""

from __future__ import annotations

import random
from typing import Any

from astuner_local.tiny.problems import OPERATORS, Problem, evaluate

SYSTEM_PROMPT = "You solve math problems with a calculator. Answer with \\boxed{}."
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an arithmetic expression.",
            "parameters": {
                "type": "object",
                "properties": {
                    "expression": {"type": "string", "description": "Numbers, + - * / and parentheses."},
                },
                "required": ["expression"],
            },
        },
    }
]


def first_messages(question: str) -> list[dict[str, Any]]:
    """Return the messages of an episode's first model call."""
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def tool_turn(expression: str, result: str) -> list[dict[str, Any]]:
    """Return the model's tool call and the calculator's reply."""
    call = {"function": {"name": "calculator", "arguments": {"expression": expression}}, "type": "function"}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": result},
    ]


def transcript(problem: Problem, rng: random.Random) -> list[dict[str, Any]]:
    """Return a complete episode in the right format with a random operator and operand order."""
    operator = rng.choice(OPERATORS)
    left, right = (problem.left, problem.right) if rng.random() < 0.5 else (problem.right, problem.left)
    result = evaluate(left, operator, right)
    return [
        *first_messages(problem.question),
        *tool_turn(f"{left} {operator} {right}", result),
        {"role": "assistant", "content": f"\\boxed{{{result}}}"},
    ]
