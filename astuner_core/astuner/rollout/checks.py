"""Checks on what the model wrote (the seeds' "madness"), by name.

A check looks at one reply and says in words what is wrong with it, or nothing.  It must not fire on ordinary text
of any language, on symbols, code, JSON, tables or rules made of dashes: a check that does punishes good behaviour.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from astuner.errors import ConfigError

Check = Callable[[Mapping[str, Any]], "str | None"]

_REPEATS = 12
_CONTROL_TOKEN = re.compile(r"<\|(im_start|im_end|endoftext|start_header_id|eot_id)\|>")
_WORD_CYCLE = re.compile(rf"((?:\b[^\W\d_]{{2,}}\b[^\w]{{0,6}}){{1,16}}?)\1{{{_REPEATS - 1},}}")
_CHARACTER_CYCLE = re.compile(r"(?=[^\W\d_])([^\W\d_]{1,4}?)\1{39,}")


def nonsense(message: Mapping[str, Any]) -> str | None:
    """Control tokens written as text, or the same words or letters over and over.

    Only cycles of letters count: a rule of dashes, a row of zeros or an indented block is not nonsense.
    """
    text = message.get("content") or ""
    if not isinstance(text, str):
        return None
    if found := _CONTROL_TOKEN.search(text):
        return f"nonsense: the control token {found[0]} written as text"
    if found := _WORD_CYCLE.search(text) or _CHARACTER_CYCLE.search(text):
        return f"nonsense: {found[1].strip()!r} repeated {len(found[0]) // max(len(found[1]), 1)} times"
    return None


def wrong_toolcall(message: Mapping[str, Any]) -> str | None:
    """A tool call that was begun but cannot be read: broken JSON, no name, arguments that are not an object."""
    broken = message.get("unparsed_tool_calls")
    return f"wrong_toolcall: cannot read {str(broken[0])[:120]!r} as a tool call" if broken else None


CHECKS: dict[str, Check] = {"nonsense": nonsense, "wrong_toolcall": wrong_toolcall}


class OutputChecks:
    """The checks an experiment asks for, in order."""

    def __init__(self, names: Sequence[str]) -> None:
        unknown = [n for n in names if n not in CHECKS]
        if unknown:
            raise ConfigError(
                f"astuner.rollout.compute_madness_checklist: no check is called {unknown[0]!r}; "
                f"there are {', '.join(sorted(CHECKS))}"
            )
        self._checks = [CHECKS[n] for n in names]

    def check(self, message: Mapping[str, Any]) -> str | None:
        """The first complaint about ``message`` (an OpenAI-style assistant message), or None."""
        return next((complaint for check in self._checks if (complaint := check(message))), None)
