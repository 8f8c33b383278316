"""One question, as data: what is asked, the key under which its answer is kept, and what it may take.

Invariant: two questions have the same key exactly if a server would be sent the same, for the same sample.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FORMAT = 1
"""Part of every key; another number where answers are read or kept differently."""
CHAT, EMBEDDINGS = "/chat/completions", "/embeddings"
_PER_MESSAGE = 4
_BYTES_PER_TOKEN = 3.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a server is asked."""

    purpose: str
    """What for, in a word or two; on the call's record."""
    body: Mapping[str, Any]
    """The request's whole body."""
    asked_of: Mapping[str, Any]
    """Where the body goes, as far as the answer depends on it; no secrets."""
    route: str = CHAT
    sample: int = 0
    most_completion: int = 0
    """Most tokens that the answer may have."""
    key: str = field(init=False)
    prompt_estimate: int = field(init=False)
    """Tokens of the prompt, rather too many: a token for every three bytes, and a few for each message."""

    def __post_init__(self) -> None:
        everything = [FORMAT, self.route, self.asked_of, self.body, self.sample]
        raw = json.dumps(everything, sort_keys=True, default=str).encode()
        object.__setattr__(self, "key", hashlib.sha256(raw).hexdigest())
        object.__setattr__(self, "prompt_estimate", tokens_of(self.body.get("messages") or self.body.get("input")))


def tokens_of(said: Any) -> int:
    """About how many tokens messages or texts have, rather too many than too few."""
    parts: Sequence[Any] = said if isinstance(said, (list, tuple)) else [said]
    size = 0
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part, ensure_ascii=False, default=str)
        size += len(text.encode("utf-8", "replace"))
    return int(size / _BYTES_PER_TOKEN) + _PER_MESSAGE * len(parts)
