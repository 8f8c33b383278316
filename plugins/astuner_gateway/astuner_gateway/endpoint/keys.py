"""One key per episode and agent, valid while the episode lives.

Keys are unguessable and found by their digest, so how long a look-up takes says nothing about them.  A key that was
never issued and one that is no longer valid are the same to a caller: unknown.  Usable from any thread.  Invariant: the
keys that open the endpoint are those of episodes that were issued some and not yet revoked.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from astuner_gateway.listening import keys_in

if TYPE_CHECKING:
    from astuner import ModelTuner

PREFIX = "sk-astuner-"


@dataclass(frozen=True, eq=False)
class Pass:
    """Whose key it is."""

    tuner: ModelTuner
    agent_name: str
    role: str | None
    digest: bytes


class KeyRing:
    """The keys that are valid now.

    :param token: what every key ends with; required where others can reach the endpoint.
    """

    def __init__(self, token: str = "") -> None:
        self._suffix = f"-{token}" if token else ""
        self._lock = threading.Lock()
        self._passes: dict[bytes, Pass] = {}
        self._issued: dict[int, dict[tuple[str, str | None], str]] = {}

    def issue(self, tuner: ModelTuner, agent_name: str, role: str | None) -> str:
        """The key of this agent in the tuner's episode; the same one each time."""
        with self._lock:
            keys = self._issued.setdefault(id(tuner), {})
            key = keys.get((agent_name, role))
            if key is None:
                key = keys[agent_name, role] = PREFIX + secrets.token_urlsafe(32) + self._suffix
                digest = _digest(key)
                self._passes[digest] = Pass(tuner, agent_name, role, digest)
            return key

    def revoke(self, tuner: ModelTuner) -> frozenset[bytes]:
        """Forget the episode's keys; a second time does nothing.

        :returns: their digests.
        """
        with self._lock:
            digests = frozenset(_digest(key) for key in self._issued.pop(id(tuner), {}).values())
            for digest in digests:
                del self._passes[digest]
            return digests

    def find(self, headers: Mapping[str, str]) -> Pass | None:
        """Who asks, by ``Authorization: Bearer`` or ``x-api-key``; None when neither is a valid key."""
        for key in keys_in(headers):
            if found := self._passes.get(_digest(key)):
                return found
        return None

    def __len__(self) -> int:
        return len(self._passes)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
