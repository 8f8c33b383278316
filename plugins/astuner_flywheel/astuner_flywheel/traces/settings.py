"""The keys of ``astuner.task_reader.tracing``; nothing else, since configs are checked with them.

AgentJet's spellings are taken over where they mean the same, else refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import AliasChoices, Field, model_validator

from astuner.contracts.section import Section


def todays(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section with older spellings replaced.

    :raises ValueError: an older key that has no equal here; says what to write.
    """
    new = dict(data)
    if "base_url" in new:
        url = str(new.pop("base_url"))
        if "sources" in new:
            raise ValueError("base_url is the older name of sources, which is set too; keep one of them")
        if url.startswith(("http://", "https://")):
            raise ValueError("base_url names a server, and sources are files; collect with: astuner data collect DB")
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
            "the filter llm_evaluate needs a helper model here: write filters: {llm_evaluate: {helper_model: NAME, "
            "rubric: TEXT}} and a section astuner.helper_models.NAME"
        )
    raise ValueError(f"there is no filter {kind!r}; there are filters: {{length, near_duplicates, llm_evaluate}}")


RUBRIC = (
    "The question must be understandable from what is shown, and answerable without knowledge that only the user has. "
    "It must ask for something, rather than greet, thank or test."
)


class Length(Section):
    min: int = Field(1, ge=0)
    """Fewest characters of the user's message."""
    max: int | None = Field(None, ge=1)
    """Most characters of the user's message; null: no limit."""


class NearDuplicatesFilter(Section):
    threshold: float = Field(0.8, gt=0, le=1)
    """Similarity from which on two questions count as one: the share of words and pairs of words that they share."""
    numbers_tell_apart: bool = False
    """Whether questions that differ in a number are different ones, as sums are; order numbers and dates are not."""


class LlmEvaluate(Section):
    helper_model: str = Field(min_length=1)
    """The model of `astuner.helper_models` that decides: GOOD stays, BAD goes."""
    rubric: str = Field(RUBRIC, min_length=1)
    """What a good task is, in words."""


class Filters(Section):
    """What is left out, in this order: by length, as near-duplicates, by a helper model. Null switches one off."""

    length: Length | None = Length()
    """By the length of the user's message."""
    near_duplicates: NearDuplicatesFilter | None = None
    """All but one of the questions that are nearly the same; a corrected one stays first, then a rated one."""
    llm_evaluate: LlmEvaluate | None = None
    """What a helper model finds bad."""


class ImplicitFeedback(Section):
    helper_model: str = Field(min_length=1)
    """The model of `astuner.helper_models` that reads from a user's next message what they thought of the answer."""


class TracingConfig(Section):
    sources: list[str] = Field(min_length=1, validation_alias=AliasChoices("sources", "base_url"))
    """Databases of AgentScope Studio or of `astuner data collect`, OTLP or chats as JSON lines, exports of Phoenix,
    Langfuse and logfire; relative paths start at the experiment file's folder."""
    feedback: list[str] = Field([])
    """JSON Lines files with users' feedback, each line with the fields of `POST /feedback`."""
    keep: Literal["all", "rated", "liked", "disliked", "corrected"] = "all"
    """Which answers' questions become tasks: by the user's rating (above 0: liked, below: disliked) or correction."""
    turns: Literal["last", "every"] = "last"
    """Of a conversation with several answers: its last question only, or every one with what came before."""
    liked_as_answer: bool = False
    """Whether an answer that was liked is the reference answer of its task; a correction always is."""
    require_answer: bool = False
    """Leave out tasks without a reference answer, for a judge that compares with one (`math_answer`)."""
    implicit_feedback: ImplicitFeedback | None = None
    """Read ratings from what users said next, where they gave none; null: only what they gave counts."""
    filters: Filters = Filters()
    """What else is left out."""
    validation_share: float = Field(0.0, ge=0, lt=1)
    """Share of the tasks that is held out for validation; a conversation, or near-duplicates, never on both sides."""
    pii: Literal["redact", "keep"] = "redact"
    """Whether e-mail addresses, telephone numbers and keys are replaced, before anything else sees them."""
    seed: int = 0
    """Decides which tasks are held out."""
    on_bad_trace: Literal["skip", "stop"] = "skip"
    """What cannot be read: leave it out and count it, or stop."""
    max_line_bytes: int = Field(16 << 20, ge=2)
    """A longer line of a file is no chat and no request, but a broken file."""

    @model_validator(mode="before")
    @classmethod
    def _older_spellings(cls, data: Any) -> Any:
        return todays(data) if isinstance(data, Mapping) else data
