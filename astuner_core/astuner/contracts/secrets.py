"""Secrets stay out of everything that is printed or written.

A key is taken for a secret by its name, and so is the user part of any URL (``https://user:password@host``).  Written
as ``${oc.env:NAME}`` it is shown as that, which gives nothing away and can be read again; written in clear it is
shown as `REMOVED`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "(removed: a secret)"

_SECRET = re.compile(
    r"(^|_)(api_?keys?|access_?keys?|private_?keys?|secret_?keys?|secrets?|passwords?|passwd|credentials?|authorization|bearer)$"
    r"|(^|_)(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!stop_)(?<!end_)(?<!start_)(?<!image_)token$",
    re.IGNORECASE,
)
_USER_OF_URL = re.compile(r"(?<=://)[^\s/?#]+(?=@)")
_written: set[str] = set()
"""Those that this process has removed from experiments, and of variables that they name."""
_ONLY_EXPRESSIONS = re.compile(r"(\$\{[^{}]*\}|:)*")


def is_secret(name: str) -> bool:
    """Whether a key of this name holds a secret (``api_key``, ``+hf_token``; not ``api_key_env``, ``eos_token``)."""
    return _SECRET.search(re.sub(r"(?<=[a-z])(?=[A-Z])|[-+]", "_", name)) is not None


def without_user(text: str) -> str:
    """``text`` with the user part of every URL in it replaced (RFC 3986, 3.2.1: before the ``@`` of the authority)."""
    return _USER_OF_URL.sub(REMOVED, text)


def without_secrets(text: str) -> str:
    """``text`` without users of URLs, what variables that are named like secrets hold, and secrets of experiments."""
    named = {value for name, value in os.environ.items() if is_secret(name) or name.upper().endswith("_KEY")}
    for value in sorted(named | _written, key=len, reverse=True):
        text = text.replace(value, REMOVED) if len(value) >= 8 else text  # a shorter one may mean something else
    return without_user(text)


def is_removed(value: Any) -> bool:
    """Whether a secret was removed from ``value`` (a list may hold one) when it was written out."""
    if isinstance(value, (list, tuple)):
        return any(map(is_removed, value))
    return isinstance(value, str) and REMOVED in value


def redact(value: Any, expressions: Mapping[tuple[str, ...], str], key: tuple[str, ...] = ()) -> Any:
    """``value`` with every secret in it replaced.

    :param expressions: the interpolations that values were written as, by key.
    """
    if isinstance(value, Mapping):
        return {name: redact(below, expressions, (*key, str(name))) for name, below in value.items()}
    if key and value not in (None, "") and is_secret(key[-1]) and not isinstance(value, bool):
        _written.add(str(value))
        return expressions.get(key, REMOVED)
    if isinstance(value, (list, tuple)):
        return [redact(item, expressions, (*key, str(index))) for index, item in enumerate(value)]
    if key and key[-1].endswith("_env"):
        _written.add(os.environ.get(str(value), ""))
    if isinstance(value, str) and (clean := without_user(value)) != value:
        _written.update(user.rpartition(":")[2] for user in _USER_OF_URL.findall(value))
        expression = expressions.get(key, "")
        users = _USER_OF_URL.findall(expression)
        return expression if expression and all(map(_ONLY_EXPRESSIONS.fullmatch, users)) else clean
    return value
