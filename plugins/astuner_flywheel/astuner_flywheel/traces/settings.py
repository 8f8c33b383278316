"""Keys of ``astuner.task_reader.tracing``, in a separate module because configs are checked with them.

AgentJet's spellings are accepted if they have the same meaning; others are rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from astuner.contracts.section import Section


def todays(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with older spellings replaced.

    :raises ValueError: An older key has no equivalent. The message has the key to use.
    """
    new = dict(data)
    if "base_url" in new:
        url = str(new.pop("base_url"))
        if "sources" in new:
            raise ValueError("base_url is the older name of sources, which is also set; keep one of them")
        if url.startswith(("http://", "https://")):
            raise ValueError("base_url is a server, but sources are files; collect them with: astuner data collect DB")
        new["sources"] = url.removeprefix("sqlite:///")
    for name in ("sources", "feedback"):
        if isinstance(new.get(name), str):
            new[name] = [new[name]]
    if isinstance(new.get("filters"), list):
        on = [f for f in new["filters"] if not isinstance(f, Mapping) or f.get("enabled", True) is not False]
        new["filters"] = dict(map(_filter, on))
    return new


def _filter(spec: Any) -> tuple[str, dict[str, Any]]:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    params = dict(spec.get("params") or {}) if isinstance(spec, Mapping) else {}
    if kind == "deduplication":
        return "near_duplicates", {name: params[name] for name in ("threshold",) if name in params}
    if kind == "llm_evaluate":
        raise ValueError(
            "the filter llm_evaluate needs a helper model: use filters: {llm_evaluate: {helper_model: NAME, "
            "rubric: TEXT}} and a section astuner.helper_models.NAME"
        )
    raise ValueError(f"unknown filter {kind!r}; available: filters: {{length, near_duplicates, llm_evaluate}}")


RUBRIC = (
    "The question must be understandable from what is shown, and answerable without knowledge that only the user has. "
    "It must ask for something, rather than greet, thank or test."
)


class Length(Section):
    """Limits of the length of a user's message."""

    min: int = Field(1, ge=0)
    """Minimum characters."""
    max: int | None = Field(None, ge=1)
    """Maximum characters. Default: no limit."""


class NearDuplicatesFilter(Section):
    """Filter for near-duplicate questions."""

    threshold: float = Field(0.8, gt=0, le=1)
    """Similarity at which two questions are near-duplicates: the share of common words and pairs of words."""
    numbers_tell_apart: bool = False
    """Treat questions with different numbers as different. Use it for calculations, not for order numbers or dates."""


class LlmEvaluate(Section):
    """Filter that asks a helper model."""

    helper_model: str = Field(min_length=1)
    """Name of the model in `astuner.helper_models` that decides: GOOD tasks are kept, BAD ones dropped."""
    rubric: str = Field(RUBRIC, min_length=1)
    """Description of a good task."""


class Filters(Section):
    """Filters, applied in this order. Null turns a filter off."""

    length: Length | None = Length()
    """Filter by the length of the user's message."""
    near_duplicates: NearDuplicatesFilter | None = None
    """Keep one of each set of near-duplicate questions, preferring corrected ones, then rated ones."""
    llm_evaluate: LlmEvaluate | None = None
    """Drop tasks that a helper model finds bad."""


class ImplicitFeedback(Section):
    """Ratings inferred from users' next messages."""

    helper_model: str = Field(min_length=1)
    """Name of the model in `astuner.helper_models` that infers the user's opinion on an answer."""


class TracingConfig(Section):
    """Options of the task reader `tracing`."""

    sources: list[str] = Field(min_length=1, validation_alias=AliasChoices("sources", "base_url"))
    """Databases of AgentScope Studio or of `astuner data collect`, OTLP or chats as JSON lines, exports of Phoenix,
    Langfuse and logfire. Relative paths start at the experiment file."""
    feedback: list[str] = Field([])
    """JSON Lines files with user feedback. Each line has the fields of `POST /feedback`."""
    keep: Literal["all", "rated", "liked", "disliked", "corrected"] = "all"
    """Questions to keep, by the rating of their answers (above 0: liked, below 0: disliked) or by correction."""
    turns: Literal["last", "every"] = "last"
    """Use the last question of a conversation, or every question with the messages before it."""
    liked_as_answer: bool = False
    """Use liked answers as reference answers. Corrections are always used."""
    require_answer: bool = False
    """Drop tasks without a reference answer, for judges that need one (`math_answer`)."""
    implicit_feedback: ImplicitFeedback | None = None
    """Infer missing ratings from users' next messages. Default: use explicit ratings only."""
    filters: Filters = Filters()
    """Additional filters."""
    validation_share: float = Field(0.0, ge=0, lt=1)
    """Share of held-out tasks. Conversations and near-duplicates are never split."""
    pii: Literal["redact", "keep"] = "redact"
    """Replace e-mail addresses, phone numbers and keys before any other processing."""
    seed: int = 0
    """Seed of the validation split."""
    on_bad_trace: Literal["skip", "stop"] = "skip"
    """Handling of unreadable data: skip and count it, or stop."""
    max_line_bytes: int = Field(16 << 20, ge=2)
    """Maximum bytes of a line. Longer lines are treated as unreadable."""

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, data: Any) -> Any:
        return todays(data) if isinstance(data, Mapping) else data
