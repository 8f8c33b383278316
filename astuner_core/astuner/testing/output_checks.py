"""`check_output_check`: does a check on the model's output keep to its contract?"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from astuner.contracts.output_check import OutputView

ORDINARY = (
    "",
    "The answer is 7, since 2x = 14.",
    "café, für, ¿cómo?, naïve, €5, π ≈ 3.14, x ≤ 3, a → b",
    "Привет, как дела? 你好，世界。こんにちは 안녕하세요 مرحبا שלום नमस्ते สวัสดีชาวโลก",
    "😀" * 20 + " ha ha ha ha ha!",
    "| a | b |\n|---|---|\n" + "| 0 | 1 |\n" * 20 + "-" * 80,
    '```python\ndef f(x):\n    return {"a": [0, 0, 0, 0], "b": None}\n```',
    "\\[ \\frac{n(n+1)}{2} \\] and 0x" + "00" * 32,
)
"""What no check may fire on, unless it is there to demand a form that these do not have."""

ODD: tuple[Mapping[str, Any], ...] = (
    {},
    {"role": "assistant", "content": None},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]},
    {"role": "assistant", "content": "", "unparsed_tool_calls": ["<tool_call>{"]},
)
"""Messages that a model can come to; a check answers for them too, whatever it says."""


def check_output_check(
    check: Callable[[OutputView], str | None],
    wrong: Sequence[str | Mapping[str, Any]],
    *,
    ordinary: Sequence[str | Mapping[str, Any]] = ORDINARY,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Check one check, and return what it says about each of ``wrong``.

    - it is a plain function of one `OutputView`, and returns a text or None;
    - it fires on each of ``wrong`` and on none of ``ordinary``, and says the same twice;
    - it changes no message, and raises for none, also where one has no text.

    :param wrong: texts, or whole assistant messages, on which it must fire; at least one.
    :param ordinary: those on which it must not; by default a few texts in many languages, code and tables.
    :param tools: the OpenAI-style descriptions of the tools that were offered.
    """
    assert callable(check), f"pass the check itself, not {check!r}"
    name = getattr(check, "__name__", type(check).__name__)
    assert not isinstance(check, type), f"{name} is a class; a check is a plain function"
    assert not inspect.iscoroutinefunction(check), f"{name} is async; a check is a plain function and returns at once"
    assert wrong, f"pass at least one text on which {name} must fire; a check that never fires is of no use"
    said: list[str] = []
    for message in map(_message, wrong):
        complaint = _ask(check, name, message, tools)
        assert complaint, f"{name} has nothing to say about {_shown(message)}"
        assert "\n" not in complaint, f"{name} said {complaint!r}; say it in one line"
        said.append(complaint)
    for message in map(_message, ordinary):
        complaint = _ask(check, name, message, tools)
        assert complaint is None, (
            f"{name} said {complaint!r} about {_shown(message)}; a check that fires on ordinary text punishes good "
            "behaviour (where it is there to demand a form, pass ordinary=[…])"
        )
    for message in ODD:
        _ask(check, name, message, tools)
        _ask(check, name, message, None)
    return said


def _ask(check: Any, name: str, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> str | None:
    before = copy.deepcopy((message, tools))
    try:
        first, again = check(OutputView(message, tools)), check(OutputView(message, tools))
    except Exception as e:
        raise AssertionError(f"{name} raised {type(e).__name__}: {e} for {_shown(message)}") from e
    assert first is None or isinstance(first, str), f"{name} returned {first!r}; return a text, or None"
    assert first == again, f"{name} said {first!r} and then {again!r} about the same reply; keep no state"
    assert (message, tools) == before, f"{name} changed what it was shown; copy what you want to change"
    return first


def _message(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"role": "assistant", "content": given} if isinstance(given, str) else given


def _shown(message: Mapping[str, Any]) -> str:
    text = repr(dict(message))
    return text if len(text) <= 200 else f"{text[:200]}…"
