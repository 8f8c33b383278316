"""Remove secrets from all output.

Secrets are values of keys with a secret's name, the user part of URLs (``https://user:password@host``) and secret URL
parameters (``?api_key=...``). A secret written as ``${oc.env:NAME}`` is shown in this form, which can be loaded again.
A secret written in plain text is replaced by `REMOVED`.
"""

from __future__ import annotations

import base64
import functools
import html
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, unquote

REMOVED = "(removed: a secret)"
SHORTEST = 8
"""Minimum length of values to remove from texts; shorter values could match unrelated text."""

_BORDER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_QUALIFIER = re.compile(r"(_(\d+|prod|production|dev|test|staging|live|old|new|backup|base|b64|base64|value))+$|\d+$")
"""Suffixes of a secret's name: ``API_KEY_2``, ``SECRET_KEY_BASE``."""
_KINDS_OF_KEY = (
    "api|app|access|account|auth|client|consumer|deploy|encryption|license|master|private|secret|service|session|shared"
    "|signing|ssh|subscription"
)
_SECRET = re.compile(
    rf"(^|_)({_KINDS_OF_KEY})_?(key_id|keys?)$"
    r"|(secrets?|passwords?|passwd|passphrases?|passcodes?|credentials?)$"
    r"|(^|_)(authorization|bearer|jwt|pat|pats|cookies?|dsn|creds|webhooks?|webhook_ur[il])$"
    r"|(^|_)(database_ur[il]|db_ur[il]|connection_string|conn_str)$"
    r"|(access|api|auth|refresh|bearer|session|id|oauth|personal)_?tokens$"
    r"|(access|api|auth|refresh|bearer|session)token$"
    r"|(^|_)(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!stop_)(?<!end_)(?<!start_)(?<!image_)token$"
)
_SECRET_VARIABLE = re.compile(r"_(key|keys|pass|pwd|auth|pin|sas)$")
"""Endings of secret environment variables. Experiment keys such as ``id_key`` or ``first_pass`` are not secrets."""
_PARAMETERS = frozenset(
    ("key", "auth", "code", "passwd", "pass", "pwd", "pw", "sig", "signature", "sas", "session", "sid", "ticket")
)
"""Secret URL parameters, in addition to parameters with a secret's name."""

_USER_OF_URL = re.compile(
    r"(?<=://)(?:[^\s/?#]+(?=@)"
    r"|[^\s/?#:@'\"]*:(?!\d+[/?#])[^\s'\"<>]+(?=@))"  # a password with unquoted / ? or #
)
_PARAMETER = re.compile(r"(?<=[?&;#])([\w.%\[\]-]+)=([^\s&;#'\"<>]+)")
_HEADER = re.compile(r"(?<=\b(?i:basic) )(?=\S*[\d=])[A-Za-z0-9+/_=-]{12,}|(?<=\b(?i:bearer) )(?=\S*\d)[\w.~+/=-]{12,}")
_ORDINARY = frozenset(
    (
        "password", "passwords", "changeme", "postgres", "username", "localhost", "development", "production",
        "undefined", "disabled", "anonymous",
    )
)  # fmt: skip
"""Common words that are never removed from texts."""
_written: set[str] = set()
"""Secrets that this process removed from experiments, and values of variables that experiments name."""
_ONLY_EXPRESSIONS = re.compile(r"(\$\{[^{}]*\}|:)*")


def is_secret(name: str) -> bool:
    """Return whether a key is secret by its name (``api_key``, ``+hf_token``; not ``api_key_env``, ``eos_token``)."""
    return _SECRET.search(_words(name)) is not None


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable is secret (``GITHUB_PAT``, ``OPENAI_KEY``; not ``PATH``)."""
    words = _words(name)
    return _SECRET.search(words) is not None or _SECRET_VARIABLE.search(words) is not None


@functools.lru_cache(maxsize=4096)
def _words(name: str) -> str:
    """Return the words of a name in lower case, joined by ``_``, without a qualifier at its end."""
    return _QUALIFIER.sub("", _BORDER.sub("_", name).lower().strip("_"))


def without_user(text: str) -> str:
    """Return ``text`` without users and secret parameters of the URLs in it (RFC 3986, 3.2.1 and 3.4)."""
    text = _USER_OF_URL.sub(REMOVED, text) if "@" in text and "://" in text else text
    return _PARAMETER.sub(_clean_parameter, text) if "=" in text else text


def _clean_parameter(match: re.Match[str]) -> str:
    return f"{match[1]}={REMOVED}" if _is_secret_parameter(match[1]) else match[0]


def _is_secret_parameter(name: str) -> bool:
    words = _words(unquote(name))
    return words in _PARAMETERS or words.rpartition("_")[2] in ("signature", "credential") or is_secret(words)


def without_secrets(text: str) -> str:
    """Return ``text`` without secrets of URLs, secret variables and experiments."""
    text = without_values(text, {*_of_variables(), *_written})
    return _HEADER.sub(REMOVED, without_user(text))


def without_values(text: str, values: Iterable[str], removed: str = REMOVED) -> str:
    """Return ``text`` without ``values``, also if they are encoded or quoted for a URL, JSON, HTML or a shell."""
    for value in sorted(set(values), key=len, reverse=True):
        if len(value) >= SHORTEST and value.lower() not in _ORDINARY:
            for form in _forms(value):
                text = text.replace(form, removed)
    return text


def _of_variables() -> Iterator[str]:
    """Yield the secrets in this process's environment variables, except paths of existing files."""
    for name, value in os.environ.items():
        if is_secret_variable(name) and not (os.path.isabs(value) and os.path.exists(value)):
            yield value
        if "://" in value:
            yield from _of_urls(value)


def _of_urls(text: str) -> Iterator[str]:
    """Yield the passwords and secret parameters in URLs, as written and unquoted."""
    found = [user.partition(":")[2] or user for user in _USER_OF_URL.findall(text)]
    found += [value for name, value in _PARAMETER.findall(text) if _is_secret_parameter(name)]
    yield from found
    yield from map(unquote, found)


@functools.lru_cache(maxsize=1024)
def _forms(value: str) -> tuple[str, ...]:
    """Return the forms of a value in texts, the longest first."""
    quoted = {quote(value), quote(value, safe=""), quote_plus(value)}
    data = value.encode("utf-8", "surrogateescape")
    forms = {
        value,
        *quoted,
        *(re.sub(r"%[0-9A-F]{2}", lambda match: match[0].lower(), text) for text in quoted),
        json.dumps(value)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        json.dumps(json.dumps(value)[1:-1])[1:-1],
        repr(value)[1:-1],
        html.escape(value),
        shlex.quote(value),
        data.hex(),
        *_in_base64(data),
        *(line for line in value.splitlines() if len(line) >= 2 * SHORTEST and not line.startswith("-----")),
    }
    return tuple(sorted((form for form in forms if len(form) >= SHORTEST), key=len, reverse=True))


def _in_base64(data: bytes) -> Iterator[str]:
    """Yield the Base64 characters that depend on ``data`` only, for each possible offset in the encoded bytes."""
    for before in range(3):
        encoded = base64.b64encode(b"\0" * before + data).decode()
        end = len(encoded.rstrip("=")) - (1 if (before + len(data)) % 3 else 0)
        known = encoded[(before * 8 + 5) // 6 : end]
        if len(known) >= SHORTEST:
            yield known
            yield known.translate(str.maketrans("+/", "-_"))


def is_removed(value: Any) -> bool:
    """Return whether a secret was removed from ``value`` (or from an entry of a list) when it was written out."""
    if isinstance(value, (list, tuple)):
        return any(map(is_removed, value))
    return isinstance(value, str) and REMOVED in value


def redact(value: Any, expressions: Mapping[tuple[str, ...], str], key: tuple[str, ...] = ()) -> Any:
    """Return ``value`` with all secrets replaced.

    :param expressions: Key -> the interpolation that its value was written as.
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
        _written.update(_of_urls(value))
        expression = expressions.get(key, "")
        users = _USER_OF_URL.findall(expression)
        return expression if expression and all(map(_ONLY_EXPRESSIONS.fullmatch, users)) else clean
    return value
