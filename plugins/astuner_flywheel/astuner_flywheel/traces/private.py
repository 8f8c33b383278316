"""Taking out what is nobody's business: e-mail addresses, telephone numbers, keys.

Patterns, and no more than that: names, addresses and anything that no pattern tells from other text stay.  They prefer
to leave a number in place to spoiling a sum, so a telephone number needs a plus sign or its usual separators.
Invariant: the same text always becomes the same text, and a replaced one is not replaced again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("key", re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.{0,20000}?-----END [A-Z ]{0,40}KEY-----", re.S)),
    ("key", re.compile(r"\beyJ[\w-]{8,2000}\.eyJ[\w-]{8,8000}\.[\w-]{8,2000}")),  # JSON web tokens
    ("key", re.compile(r"\b(?:sk|pk|rk)[-_](?:[a-z]{2,12}[-_]){0,3}[A-Za-z0-9_-]{16,200}")),
    ("key", re.compile(r"\b(?:gh[pousr]_|github_pat_|glpat-|xox[abprs]-|hf_|AIza)[A-Za-z0-9_-]{16,200}")),
    ("key", re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b")),
    ("key", re.compile(r"(?i)(?<=\bbearer )[A-Za-z0-9._~+/-]{16,2000}=*")),
    ("email", re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@(?:[\w-]{1,63}\.){1,8}[A-Za-z]{2,24}\b")),
    ("phone", re.compile(r"(?<![\w+])\+[1-9]\d{0,3}[ .-]?(?:\(\d{1,4}\)[ .-]?)?\d{1,4}(?:[ .-]?\d{2,4}){2,4}(?!\w)")),
    ("phone", re.compile(r"(?<![\w(])(?:\(\d{3}\) ?|\d{3}[.-])\d{3}[.-]\d{4}(?![\w.-])")),
)
NAMES = ("email", "phone", "key")


def redacted(text: str, counts: Counter[str]) -> str:
    """``text`` with ``[email]``, ``[phone]`` and ``[key]`` in the places of such; ``counts`` gets how many of each."""
    for name, pattern in _PATTERNS:
        text, n = pattern.subn(f"[{name}]", text)
        if n:
            counts[name] += n
    return text


def redacted_message(message: Mapping[str, Any], counts: Counter[str]) -> dict[str, Any]:
    """A message of ours (text content, tool calls with text arguments) without such."""
    found = {**message, "content": redacted(str(message.get("content") or ""), counts)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": redacted(call["function"]["arguments"], counts)}}
            for call in calls
        ]
    return found
