"""Issue and check the base URLs and keys with which agents reach their models.

There is one key per episode and agent, valid until the episode ends. Keys are unguessable and looked up by digest, so
the duration of a lookup reveals nothing about them. Callers cannot distinguish a revoked key from a key that was never
issued. Invariants: a key occurs only in the tuple and in `Access.environment`, and printing an `Access` does not show
it; the endpoint accepts exactly the keys that were issued to episodes and not yet revoked.
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
    """Base URL and key of an agent's model: ``base_url, api_key = access`` for an OpenAI client.

    The endpoint serves one model per key, so it accepts any model name in a request; `model` is the name that it lists.
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
        """Base URL without ``/v1``, which Anthropic's clients append themselves."""
        return self.base_url.removesuffix("/v1")

    def environment(self) -> dict[str, str]:
        """Return environment variables that connect a program without knowledge of ASTuner to this model.

        They also disable uploads from this machine (openai-agents sends its traces to OpenAI) and bypass HTTP proxies.
        """
        host = urlsplit(self.base_url).hostname or ""
        direct = without_proxy(host)
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,  # openai before 1.0 and LangChain
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_DEFAULT_MODEL": self.model,  # openai-agents; for its default model it would send settings of GPT-5
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "ANTHROPIC_BASE_URL": self.anthropic_base_url,
            "ANTHROPIC_API_KEY": self.api_key,
            "NO_PROXY": direct,
            "no_proxy": direct,
        }


@dataclass(frozen=True, eq=False)
class Pass(Holder):
    """The agent that owns a key."""

    tuner: ModelTuner
    digest: bytes = b""
    told: Told = field(default_factory=Told)


class KeyRing:
    """The set of valid keys. Thread-safe.

    :param token: Suffix of every key; required if other machines can reach the endpoint.
    """

    def __init__(self, token: str = "") -> None:
        self._suffix = f"-{token}" if token else ""
        self._lock = threading.Lock()
        self._passes: dict[bytes, Pass] = {}
        self._issued: dict[int, dict[tuple[str, str | None], str]] = {}

    def issue(self, tuner: ModelTuner, agent_name: str, role: str | None) -> str:
        """Return the key of this agent in the tuner's episode, the same one on each call."""
        with self._lock:
            keys = self._issued.setdefault(id(tuner), {})
            key = keys.get((agent_name, role))
            if key is None:
                key = keys[agent_name, role] = PREFIX + secrets.token_urlsafe(32) + self._suffix
                digest = _digest(key)
                self._passes[digest] = Pass(tuner, agent_name, role, digest)
            return key

    def revoke(self, tuner: ModelTuner) -> frozenset[bytes]:
        """Forget the keys of an episode. Further calls have no effect.

        :returns: Digests of the forgotten keys.
        """
        with self._lock:
            digests = frozenset(_digest(key) for key in self._issued.pop(id(tuner), {}).values())
            for digest in digests:
                del self._passes[digest]
            return digests

    def find(self, headers: Mapping[str, str]) -> Pass | None:
        """Return the owner of the key in ``Authorization: Bearer`` or ``x-api-key``; None if neither is valid."""
        for key in keys_in(headers):
            if found := self._passes.get(_digest(key)):
                return found
        return None

    def __len__(self) -> int:
        return len(self._passes)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
