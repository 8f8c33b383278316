"""Server-sent events (WHATWG HTML, section 9.2), as bytes.

The engine returns whole replies, so the deltas of a stream are cut from a finished one and sent at once; until then
comments keep the connection busy.  Invariant: the pieces of a text, joined, are the text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

KEEP_ALIVE = b": the model is at work\n\n"
"""A comment, which every client skips."""

_PIECE = 200
"""Characters per delta: several per answer, and not so many that parsing them takes the client's time."""


def pieces(text: str) -> Iterator[str]:
    """``text`` in deltas; none for an empty one."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def encode(events: Iterable[tuple[str, Mapping[str, Any]]]) -> bytes:
    """Events of (name, data), a name may be empty, as they go over the wire."""
    lines = []
    for name, data in events:
        if name:
            lines.append(f"event: {name}\n")
        lines.append(f"data: {json.dumps(data, separators=(',', ':'))}\n\n")
    return "".join(lines).encode("ascii")
