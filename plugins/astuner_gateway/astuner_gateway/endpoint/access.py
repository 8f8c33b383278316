"""What an agent needs to reach its model: a base URL and a key.

Invariant: the key is in the tuple, in `environment` and nowhere else; printing an `Access` does not show it.
"""

from __future__ import annotations

import os
from typing import NamedTuple
from urllib.parse import urlsplit

DEFAULT_MODEL = "astuner"


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
        others = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy")).split(",")
        direct = ",".join(dict.fromkeys(entry.strip() for entry in (*others, host) if entry.strip()))
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
