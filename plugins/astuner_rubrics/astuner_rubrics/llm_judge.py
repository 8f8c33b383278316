"""A judge that asks a helper model how good an answer is, by criteria in plain words.

The answer is text of a model that is rewarded for a good verdict.  It is fenced (`astuner_rubrics.fence`), the verdict
is structured and has its reason first, and no verdict means no reward (`JudgeFailed`), never a low one.
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
"""What the helper is told first, unless `system_prompt` says otherwise."""
_REFERENCE = "REFERENCE is a reference answer that is right; an answer may say the same in other words."
_CONVERSATION = "The answer is a conversation: judge what the assistant did in it."


class LlmJudgeConfig(AskingConfig):
    scale: Literal["binary"] | tuple[float, float] = "binary"
    """`binary` (met or not: 1 or 0), or `[lowest, highest]` of a grade."""
    normalise: bool = True
    """Bring a grade to a reward of 0 to 1; false: the grade is the reward."""
    success_at: float | None = None
    """The grade from which on an attempt is a success; null: the highest."""
    samples: int = Field(1, ge=1, le=25)
    """How many verdicts are asked for: the majority of an odd number where the scale is binary, else their mean."""

    @field_validator("criteria")
    @classmethod
    def _says_something(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("say what a good answer is")
        return text

    @model_validator(mode="after")
    def _fits(self) -> LlmJudgeConfig:
        low, high = self.bounds
        if low >= high:
            raise ValueError(f"scale: the lowest grade must be below the highest, not [{low:g}, {high:g}]")
        if self.scale == "binary" and self.samples % 2 == 0:
            raise ValueError(f"samples: {self.samples} verdicts may split evenly; write an odd number")
        if self.success_at is not None and not low <= self.success_at <= high:
            raise ValueError(f"success_at: {self.success_at:g} is not on the scale of {low:g} to {high:g}")
        return self

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest grade."""
        return (0.0, 1.0) if self.scale == "binary" else self.scale


@lru_cache(maxsize=64)
def verdict_form(scale: Literal["binary"] | tuple[float, float], explain: bool) -> type[BaseModel]:
    """The form of one verdict: the reason first, then a score within the scale."""
    score: Any = Annotated[Literal[0, 1], Field(description="1 if the criteria are met, else 0")]
    if scale != "binary":
        about = f"the grade, from {scale[0]:g} (worst) to {scale[1]:g} (best)"
        score = Annotated[float, Field(ge=scale[0], le=scale[1], allow_inf_nan=False, description=about)]
    fields: dict[str, Any] = {"reason": (Annotated[str, Field(description="why, in at most 60 words")], ...)}
    fields = {**(fields if explain else {}), "score": (score, ...)}
    return create_model("Verdict", __config__=ConfigDict(extra="forbid"), **fields)


class _Asking(Judge):
    """Asks for the verdicts on what is shown, and makes one of them."""

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
        """:raises JudgeFailed: there is none."""
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
    """Shows the helper the answer. Metrics ``asked``, ``score`` and, of several samples, ``agreement``."""

    @classmethod
    def from_config(cls, section: Any, context: BuildContext) -> Judge:
        """For ``show: conversation`` a judge of groups, since only these are given turns.

        :raises ConfigError: there is no such helper model.
        """
        made = LlmConversationJudge if section.show == "conversation" else cls
        return made(section, context.helper_models)

    async def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        return await self._verdict(workflow_task, {"answer": answer_of(output, self.config.answer_field)})


class LlmConversationJudge(_Asking, GroupJudge):
    """Shows the helper all that was said in an attempt; each attempt is judged alone."""

    async def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        return await together([self._one(attempt) for attempt in attempts])

    async def _one(self, attempt: Attempt) -> JudgeOutput | JudgeFailed:
        try:
            return await self._verdict(attempt.workflow_task, labelled(conversation_of(attempt.turns)))
        except JudgeFailed as e:
            return e
