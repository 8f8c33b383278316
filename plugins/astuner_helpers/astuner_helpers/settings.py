"""The section ``astuner.helper_models.NAME``: a model that helps and is not trained (`astuner.helper_models`).

Judges, generators of tasks and simulated users name it.  Invariant: what is accepted here can be asked, but for the key
in the environment and what the server says.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from astuner.contracts.secrets import is_secret
from astuner.contracts.section import Section

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN = frozenset({"model", "messages", "temperature", "max_tokens", "response_format", "stream", "n", "tools", "input"})


class Price(Section):
    input: float = Field(0.0, ge=0)
    """For a million tokens of prompts, in the same money as `budget`."""
    output: float = Field(0.0, ge=0)
    """For a million tokens of answers, reasoning included."""


class HelperModel(Section):
    """One helper model: where it is, how it is asked, and what it may cost."""

    base_url: str | None = None
    """Its OpenAI-compatible server, up to and including `/v1`, e.g. `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """The model's name on that server."""
    api_key_env: str | None = None
    """The environment variable that holds the server's key; null for a server without one."""
    agentscope: str | None = None
    """A class of `agentscope.model` that asks it instead of `base_url`, e.g. `DashScopeChatModel`."""
    agentscope_kwargs: dict[str, Any] = Field({})
    """Options of that class, except model name and key. On AgentScope 2.x also its `Parameters` and `base_url`."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature, where who asks sets none."""
    max_tokens: int = Field(1024, ge=1)
    """Longest answer in tokens, where who asks sets none; a budget reserves that much for each request."""
    timeout: float = Field(60.0, gt=0)
    """Seconds one request may take."""
    max_retries: int = Field(4, ge=0)
    """How often a request that failed, or an answer that is not in the wanted form, is asked again."""
    embed_batch: int = Field(64, ge=1)
    """Texts in one request for embeddings."""
    concurrency: int = Field(8, ge=1)
    """Requests of one process on their way at once."""
    rpm: int | None = Field(None, ge=1)
    """Most requests in any 60 seconds, over all processes of this machine that ask this model of this server."""
    tpm: int | None = Field(None, ge=1)
    """Most tokens (prompts and answers) in any 60 seconds, counted likewise."""
    price: Price | None = None
    """What tokens cost; null counts no money."""
    budget: float | None = Field(None, gt=0)
    """Most money that a run, or a command's output folder, may spend on it; needs `price`."""
    budget_tokens: int | None = Field(None, ge=1)
    """Most tokens likewise."""
    cache: bool = True
    """Keep answers on this machine and take them from there when exactly the same is asked again."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How a structured answer is asked for: by a schema the server enforces, as JSON, or by the prompt alone."""
    extra: dict[str, Any] = Field({})
    """Further fields of a request's body, e.g. `{top_p: 0.9, reasoning_effort: low}`."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urllib.parse.urlsplit(url)
        if "@" in url:  # before anything prints it
            raise ValueError("leave user and password out of the URL; a key goes into api_key_env")
        if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s?#]", url):
            raise ValueError("write a URL like http://127.0.0.1:8000/v1, without ? and #")
        _ = parts.port  # raises ValueError where it is no number
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):  # somebody wrote the key itself
            raise ValueError("write the name of an environment variable, not the key itself")
        return name

    @field_validator("extra", "agentscope_kwargs")
    @classmethod
    def _has_no_secret(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in fields:
            if is_secret(str(name)):
                raise ValueError(f"{name} looks like a secret; name the variable that holds the key in api_key_env")
        return fields

    @field_validator("extra")
    @classmethod
    def _is_not_ours(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if own := sorted(_OWN & fields.keys()):
            raise ValueError(f"{', '.join(own)} cannot be set here: ASTuner sets it for each request")
        return fields

    @model_validator(mode="after")
    def _fits(self) -> HelperModel:
        if (self.base_url is None) == (self.agentscope is None):
            raise ValueError("one of base_url (an OpenAI-compatible server) and agentscope (a model class) is required")
        if self.agentscope is None and self.agentscope_kwargs:
            raise ValueError("agentscope_kwargs is for a model given by agentscope")
        if self.agentscope is not None and self.extra:
            raise ValueError("extra is for a model given by base_url; write agentscope_kwargs: {generate_kwargs: {…}}")
        if self.budget is not None and (self.price is None or not (self.price.input or self.price.output)):
            raise ValueError(
                "budget counts money, and there is no price: write price: {input: …, output: …} per million tokens, "
                "or limit the tokens by budget_tokens"
            )
        return self


class HelperModelKeys(Section):
    helper_models: dict[str, HelperModel] = Field({})
    """Models by name that help and are not trained: judges, writers of tasks and simulated users ask them."""
