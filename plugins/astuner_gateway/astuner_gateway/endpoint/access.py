"""What an agent needs to reach its model, a base URL and a key; and the keys that are valid now.

There is one key per episode and agent, valid while the episode lives.  Keys are unguessable and found by their digest,
so how long a look-up takes says nothing about them.  A key that was never issued and one that is no longer valid are
the same to a caller: unknown.  Invariants: the key is in the tuple, in `Access.environment` and nowhere else, and
printing an `Access` does not show it; the keys that open the endpoint are those of episodes that were issued some and
not yet revoked.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from astuner.contracts.proxies import without_proxy
from astuner_gateway.endpoint.openai_responses import Told
from astuner_gateway.endpoint.request import Holder
from astuner_gateway.listening import keys_in

if TYPE_CHECKING:
    from astuner import ModelTuner

DEFAULT_MODEL = "astuner"
PREFIX = "sk-astuner-"


class _UrlAndKey(NamedTuple):
    base_url: str
    api_key: str


class Access(_UrlAndKey):
    """``base_url, api_key = access`` for an OpenAI client; the properties serve others.

    The endpoint serves one model per key, so it takes any model name in a request; `model` is the one it lists.
    """

    model: str

    def __new__(cls, base_url: str, api_key: str, model: str = DEFAULT_MODEL) -> Access:
        access = super().__new__(cls, base_url, api_key)
        access.model = model
        return access

    def __repr__(self) -> str:
        return f"Access(base_url={self.base_url!r}, api_key='***', model={self.model!r})"

    @property
    def anthropic_base_url(self) -> str:
        """Without ``/v1``, which Anthropic's clients add themselves."""
        return self.base_url.removesuffix("/v1")

    def environment(self) -> dict[str, str]:
        """Variables with which a program that knows nothing of ASTuner speaks to this model.

        They also turn off what would leave the machine (openai-agents uploads its traces to OpenAI) and what would
        come between (an HTTP proxy for the way out).
        """
        host = urlsplit(self.base_url).hostname or ""
        direct = without_proxy(host)
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # openai before 1.0, and LangChain
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_DEFAULT_MODEL": self.model,  # openai-agents; for its own default it sends settings of GPT-5
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }


@dataclass(frozen=True, eq=False)
class Pass(Holder):
    """Whose key it is."""

    tuner: ModelTuner
    digest: bytes = b""
    told: Told = field(default_factory=Told)


class KeyRing:
    """The keys that are valid now; usable from any thread.

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
