"""Answers in a given structure: one more tool, whose arguments are the answer.

Sampling is never constrained to the structure: the log-probabilities would no longer be the policy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STRUCTURED_TOOL = "generate_structured_output"


def structured_tool(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The tool that takes an answer of this JSON schema (an object's)."""
    return {
        "type": "function",
        "function": {
            "name": STRUCTURED_TOOL,
            "description": "Give the answer in the required structure.",
            "parameters": dict(schema),
        },
    }
