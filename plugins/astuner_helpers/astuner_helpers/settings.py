"""The section ``astuner.helper_models.NAME``: a helper model, which supports a run and is not trained.

Judges, task generators and simulated users refer to it by name. Invariant: a section that passes these checks can be
used for requests, unless the key is missing in the environment or the server rejects the request.
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
    """Prices of a helper model's tokens."""

    input: float = Field(0.0, ge=0)
    """Price of a million prompt tokens, in the currency of `budget`."""
    output: float = Field(0.0, ge=0)
    """Price of a million answer tokens, including reasoning tokens."""


class HelperModel(Section):
    """A helper model: its server, its request options and its budget."""

    base_url: str | None = None
    """URL of an OpenAI-compatible server, up to and including `/v1`, e.g. `http://127.0.0.1:8000/v1`."""
    model: str = Field(min_length=1)
    """Name of the model on the server."""
    api_key_env: str | None = None
    """Environment variable that contains the server's API key. Default: none, for servers without a key."""
    agentscope: str | None = None
    """Class of `agentscope.model` to use instead of `base_url`, e.g. `DashScopeChatModel`."""
    agentscope_kwargs: dict[str, Any] = Field({})
    """Options of that class except model name and key. On AgentScope 2.x also its `Parameters` and `base_url`."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of requests that do not set one."""
    max_tokens: int = Field(1024, ge=1)
    """Maximum answer tokens of requests that do not set a limit. Budgets reserve this many tokens per request."""
    timeout: float = Field(60.0, gt=0)
    """Timeout of a request in seconds."""
    max_retries: int = Field(4, ge=0)
    """Number of retries after a failed request or an answer in the wrong form."""
    embed_batch: int = Field(64, ge=1)
    """Number of texts in one embeddings request."""
    concurrency: int = Field(8, ge=1)
    """Maximum number of concurrent requests of one process."""
    rpm: int | None = Field(None, ge=1)
    """Maximum requests in any 60 seconds, over all processes on this machine that use this model on this server."""
    tpm: int | None = Field(None, ge=1)
    """Maximum tokens (prompts and answers) in any 60 seconds, counted like `rpm`."""
    price: Price | None = None
    """Token prices. Default: costs are not counted."""
    budget: float | None = Field(None, gt=0)
    """Maximum cost for a run or for a command's output folder. Requires `price`."""
    budget_tokens: int | None = Field(None, ge=1)
    """Maximum tokens for a run or for a command's output folder."""
    cache: bool = True
    """Cache answers on this machine and reuse them for identical requests."""
    structured: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How to request structured answers: a schema that the server enforces, JSON mode, or the prompt only."""
    extra: dict[str, Any] = Field({})
    """Additional fields of the request body, e.g. `{top_p: 0.9, reasoning_effort: low}`."""

    @field_validator("base_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urllib.parse.urlsplit(url)
        if "@" in url:  # checked first, because other errors may print the URL
            raise ValueError("remove user and password from the URL; use api_key_env for a key")
        if parts.scheme not in ("http", "https") or not parts.hostname or re.search(r"[\s?#]", url):
            raise ValueError("use a URL such as http://127.0.0.1:8000/v1, without ? and #")
        _ = parts.port  # raises ValueError if the port is not a number
        return url.rstrip("/")

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable(cls, name: str | None) -> str | None:
        if name is not None and not _VARIABLE.fullmatch(name):  # probably the key itself
            raise ValueError("use the name of an environment variable, not the key itself")
        return name

    @field_validator("extra", "agentscope_kwargs")
    @classmethod
    def _has_no_secret(cls, fields: dict[str, Any]) -> dict[str, Any]:
        for name in fields:
            if is_secret(str(name)):
                raise ValueError(f"{name} looks like a secret; store it in a variable and name that in api_key_env")
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
            raise ValueError("set either base_url (an OpenAI-compatible server) or agentscope (a model class)")
        if self.agentscope is None and self.agentscope_kwargs:
            raise ValueError("agentscope_kwargs requires agentscope")
        if self.agentscope is not None and self.extra:
            raise ValueError("extra requires base_url; with agentscope use agentscope_kwargs: {generate_kwargs: {…}}")
        if self.budget is not None and (self.price is None or not (self.price.input or self.price.output)):
            raise ValueError(
                "budget requires a price: set price: {input: …, output: …} per million tokens, "
                "or limit tokens with budget_tokens"
            )
        return self


class HelperModelKeys(Section):
    """The key `astuner.helper_models`."""

    helper_models: dict[str, HelperModel] = Field({})
    """Models by name that support the run and are not trained, for judges, task generators and simulated users."""
