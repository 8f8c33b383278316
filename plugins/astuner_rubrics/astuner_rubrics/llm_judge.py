"""The judge `llm_judge`: grade answers by plain-text criteria with a helper model.

The answer was written by a model that is rewarded for a good verdict. It is fenced (`astuner_rubrics.fence`). The
verdict is structured and starts with its reason. A missing verdict means no reward (`JudgeFailed`), never a low one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from astuner import Judge, JudgeOutput, WorkflowOutput, WorkflowTask
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import JudgeFailed
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.types import counts_as_success
from astuner_helpers import HelperModels
from astuner_helpers.members import together
from astuner_rubrics.asking import AskingConfig, answer_of, ask, conversation_of, labelled, limit_of, user_message

TASK = "You judge an answer to a question, strictly and evenly, by the criteria below and by nothing else."
"""First sentence of the instructions, unless `system_prompt` replaces it."""
_REFERENCE = "REFERENCE is a reference answer that is right; an answer may say the same in other words."
_CONVERSATION = "The answer is a conversation: judge what the assistant did in it."


class LlmJudgeConfig(AskingConfig):
    """Options of the judge `llm_judge`."""

    scale: Literal["binary"] | tuple[float, float] = "binary"
    """`binary` (1 if the criteria are met, else 0), or `[lowest, highest]` for a grade."""
    normalise: bool = True
    """Scale a grade to a reward from 0 to 1. With false, the grade is the reward."""
    success_at: float | None = None
    """Minimum grade of a successful attempt. Default: the highest grade."""
    samples: int = Field(1, ge=1, le=25)
    """Number of verdicts. On a binary scale, it must be odd and the majority counts. Otherwise, the mean counts."""

    @field_validator("criteria")
    @classmethod
    def _says_something(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("criteria are empty; describe a good answer")
        return text

    @model_validator(mode="after")
    def _fits(self) -> LlmJudgeConfig:
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"scale: the lowest grade must be below the highest, not [{low:g}, {high:g}]")
        if self.scale == "binary" and self.samples % 2 == 0:
            raise ValueError(f"samples: {self.samples} verdicts may be split evenly; use an odd number")
        if self.success_at is not None and not low <= self.success_at <= high:
            raise ValueError(f"success_at: {self.success_at:g} is outside of the scale {low:g} to {high:g}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the lowest and the highest grade."""
        return (0.0, 1.0) if self.scale == "binary" else self.scale


@lru_cache(maxsize=64)
def verdict_form(scale: Literal["binary"] | tuple[float, float], explain: bool) -> type[BaseModel]:
    """Return the form of a verdict: the reason first, then a score within the scale."""
    score: Any = Annotated[Literal[0, 1], Field(description="1 if the criteria are met, else 0")]
    if scale != "binary":
        about = f"the grade, from {scale[0]:g} (worst) to {scale[1]:g} (best)"
        score = Annotated[float, Field(ge=scale[0], le=scale[1], allow_inf_nan=False, description=about)]
    fields: dict[str, Any] = {"reason": (Annotated[str, Field(description="why, in at most 60 words")], ...)}
    fields = {**(fields if explain else {}), "score": (score, ...)}
    return create_model("Verdict", __config__=ConfigDict(extra="forbid"), **fields)


class _Asking(Judge):
    """Request verdicts on what is shown, and combine them."""

    config: LlmJudgeConfig

    def __init__(self, config: LlmJudgeConfig, helper_models: HelperModels) -> None:
        super().__init__(config)
        self._helper = helper_models.get(config.helper_model, where="astuner.task_judge.llm_judge.helper_model")
        self._form = verdict_form(config.scale, config.explain)
        self._system = config.system_message(TASK, conversation=_CONVERSATION, reference=_REFERENCE, form=self._shape())

    def _messages(self, workflow_task: WorkflowTask, shown: dict[str, str]) -> list[dict[str, str]]:
        question = "Does the answer meet the criteria?" if self.config.scale == "binary" else "How good is the answer?"
        limit = limit_of(shown, self.config.max_chars)
        return [self._system, user_message({**self.config.asked(workflow_task), **shown}, question, limit=limit)]

    async def _verdict(self, workflow_task: WorkflowTask, shown: dict[str, str]) -> JudgeOutput:
        """Return the combined verdict.

        :raises JudgeFailed: There is no verdict.
        """
        config, (low, high) = self.config, self.config.bounds
        try:
            messages = self._messages(workflow_task, shown)
            how = {"purpose": "llm_judge", "temperature": config.temperature}
            said = await together(
                [ask(self._helper, messages, self._form, **how, sample=sample) for sample in range(config.samples)]
            )
        except JudgeFailed as e:
            raise JudgeFailed(f"{workflow_task.episode_id} (task {workflow_task.task.task_id!r}): {e}") from e
        scores = [float(one.score) for one in said]
        score = Counter(scores).most_common(1)[0][0] if config.scale == "binary" else math.fsum(scores) / len(scores)
        metrics = {"asked": float(len(said)), "score": score}
        if len(scores) > 1:
            metrics["agreement"] = (
                scores.count(score) / len(scores)
                if config.scale == "binary"
                else 1 - (max(scores) - min(scores)) / (high - low)
            )
        success_at = high if config.success_at is None else config.success_at
        reward = (score - low) / (high - low) if config.normalise else score
        return JudgeOutput(reward=reward, is_success=counts_as_success(score, at=success_at), metrics=metrics)

    def _shape(self) -> str:
        low, high = self.config.bounds
        score = "0 or 1" if self.config.scale == "binary" else f"a number from {low:g} to {high:g}"
        meaning = "1 if the criteria are met, else 0" if self.config.scale == "binary" else f"{high:g} is the best"
        reason = '"reason": "why, in at most 60 words", ' if self.config.explain else ""
        return f'Answer with one JSON object and nothing else: {{{reason}"score": {score}}}; {meaning}.'


class LlmJudge(_Asking):
    """Show the answer to the helper model. Metrics: ``asked``, ``score`` and, with several samples, ``agreement``."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Judge:
        """Return the judge. For ``show: conversation`` it is a group judge, because only those receive turns.

        :raises ConfigError: The helper model does not exist.
        """
        made = LlmConversationJudge if section.show == "conversation" else cls
        return made(section, context.helper_models)

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        return await self._verdict(workflow_task, {"answer": answer_of(output, self.config.answer_field)})


class LlmConversationJudge(_Asking, GroupJudge):
    """Show the full conversation of an attempt to the helper model. Each attempt is judged separately."""

    async def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        return await together([self._one(attempt) for attempt in attempts])

    async def _one(self, attempt: Attempt) -> JudgeOutput | JudgeFailed:
        try:
            return await self._verdict(attempt.workflow_task, labelled(conversation_of(attempt.turns)))
        except JudgeFailed as e:
            return e
