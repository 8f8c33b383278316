"""Format commands for copying into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import yaml

from astuner.contracts.secrets import redact, without_user


def shell_text(words: Sequence[str]) -> str:
    """Return the command as one line, quoted for a shell, without the values of keys that hold secrets."""
    return shlex.join(map(_without_secret, words))


def _without_secret(word: str) -> str:
    key, equals, text = word.partition("=")
    if not equals:
        return word
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text  # the config loader reports the error
    clean = redact(value, {}, tuple(key.split(".")))
    if clean == value:
        return without_user(word)
    plain = clean if isinstance(clean, str) else yaml.safe_dump(clean, default_flow_style=True, width=10**6).strip()
    return f"{key}={plain}"
