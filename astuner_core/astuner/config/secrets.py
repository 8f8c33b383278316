"""Secrets stay out of everything that is printed or written.

A key is taken for a secret by its name.  Written as ``${oc.env:NAME}`` it is shown as that, which gives nothing away
and can be read again; written in clear it is shown as `REMOVED`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

REMOVED = "(removed: a secret)"

_SECRET = re.compile(
    r"(^|_)(api_?keys?|access_?keys?|private_?keys?|secret_?keys?|secrets?|passwords?|passwd|credentials?|authorization|bearer)$"
    r"|(^|_)(?<!bos_)(?<!eos_)(?<!pad_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)(?<!stop_)(?<!end_)(?<!start_)(?<!image_)token$",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Whether a key of this name holds a secret (``api_key``, ``hf_token``; not ``api_key_env``, ``eos_token``)."""
    return _SECRET.search(re.sub(r"(?<=[a-z])(?=[A-Z])|-", "_", name)) is not None


def redact(value: Any, expressions: Mapping[tuple[str, ...], str], key: tuple[str, ...] = ()) -> Any:
    """``value`` with every secret in it replaced.

    :param expressions: the interpolations that secrets were written as, by key.
    """
    if isinstance(value, Mapping):
        return {name: redact(below, expressions, (*key, str(name))) for name, below in value.items()}
    if key and value not in (None, "") and is_secret(key[-1]) and not isinstance(value, bool):
        return expressions.get(key, REMOVED)
    if isinstance(value, (list, tuple)):
        return [redact(item, expressions, (*key, str(index))) for index, item in enumerate(value)]
    return value
