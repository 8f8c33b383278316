"""A judge under test: asked as a run would ask it, with what each verdict took.

A judge of single attempts is asked about each answer, a judge of groups about all of them together, in the order that
they are given.  Helper models are watched: repeats of a question are asked anew, and cost and cached answers are seen.

Invariant: a judge that fails gives no numbers, and is counted; a spent budget ends the whole check.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import BaseModel

from astuner import Task, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import Attempt
from astuner.contracts.types import JudgeOutput
from astuner.rollout.threads import OutOfTime, TimeLimits
from astuner_helpers import Helper, HelperAnswer, HelperModels, Usage
from astuner_helpers.members import Member
from astuner_rubrics.labels import Sample

_FAR = 1_000_000
"""Samples of a judge's own are below this; each repeat has as many of its own."""

_NOW: contextvars.ContextVar[_Watched | None] = contextvars.ContextVar("astuner_verdict", default=None)


@dataclass
class _Watched:
    """One verdict that is being made."""

    repeat: int
    answers: list[HelperAnswer] = field(default_factory=list)


@dataclass(frozen=True)
class Took:
    """What one question to the judge took."""

    seconds: float | None
    """None where a helper's answer came from the cache, which says nothing about how long a verdict takes."""
    cost: float
    requests: int
    cached: int


@dataclass(frozen=True)
class Verdict:
    """What a judge says about answers to one question."""

    rewards: tuple[float, ...]
    successes: tuple[bool, ...]


class JudgeUnderTest:
    """Asks one judge.

    :param answer_field: the key of the output's metadata in which answers stand, besides ``response``.
    :param at_once: questions on their way at once.
    :param timeout: seconds for one question.
    """

    def __init__(self, judge: Member, *, answer_field: str, at_once: int, timeout: float) -> None:
        self._judge, self._answer_field, self._timeout = judge, answer_field, timeout
        self.by_group = judge.by_group
        self.took: list[Took] = []
        self.failures: list[str] = []
        self.asked = 0
        self._known: dict[tuple[str, tuple[str, ...], int], asyncio.Task[Verdict | None]] = {}
        self._room, self._limits = asyncio.Semaphore(at_once), TimeLimits()

    async def verdict(self, sample: Sample, answers: Sequence[str], repeat: int = 0) -> Verdict | None:
        """The verdict on answers to a sample's question; None where the judge failed.  The same is asked once.

        :param repeat: 0, 1, 2, …: asked again on purpose.
        :raises ConfigError: the judge's settings are wrong, or a helper's budget is spent.
        """
        if self.by_group:
            return await self._once(sample, tuple(answers), repeat)
        each = await asyncio.gather(*(self._once(sample, (answer,), repeat) for answer in answers))
        if any(one is None for one in each):
            return None
        whole = [one for one in each if one is not None]
        return Verdict(tuple(o.rewards[0] for o in whole), tuple(o.successes[0] for o in whole))

    async def close(self) -> None:
        """End whatever is still being asked."""
        for task in self._known.values():
            task.cancel()
        await asyncio.gather(*self._known.values(), return_exceptions=True)

    async def _once(self, sample: Sample, answers: tuple[str, ...], repeat: int) -> Verdict | None:
        key = (sample.place, answers, repeat)
        if key not in self._known:
            self._known[key] = asyncio.ensure_future(self._ask(sample, answers, repeat))
        return await self._known[key]

    async def _ask(self, sample: Sample, answers: tuple[str, ...], repeat: int) -> Verdict | None:
        async with self._room:
            watched = _Watched(repeat)
            _NOW.set(watched)  # this task's own
            began = time.perf_counter()
            self.asked += 1
            try:
                outputs = await self._limits.run(self._outputs(sample, answers), self._timeout)
            except ConfigError:
                raise
            except OutOfTime:
                self.failures.append(f"no verdict within {self._timeout:g} s")
                return None
            except Exception as e:  # whatever a judge raises is a verdict that is missing, as in a run
                self.failures.append(str(e) if isinstance(e, JudgeFailed) else f"{type(e).__name__}: {e}")
                return None
            seconds = time.perf_counter() - began
            cached = sum(a.cached for a in watched.answers)
            cost = sum(a.cost for a in watched.answers)
            self.took.append(Took(None if cached else seconds, cost, len(watched.answers), cached))
            successes = (o.reward >= 1 if o.is_success is None else o.is_success for o in outputs)
            return Verdict(tuple(o.reward for o in outputs), tuple(successes))

    async def _outputs(self, sample: Sample, answers: tuple[str, ...]) -> list[JudgeOutput]:
        attempts = [self._attempt(sample, answer, number) for number, answer in enumerate(answers)]
        if not self.by_group:
            (one,) = attempts
            return [await self._judge.judge(one)]
        found = await self._judge.judge_group(attempts)
        for verdict in found:
            if isinstance(verdict, JudgeFailed):
                raise verdict
        return [verdict for verdict in found if isinstance(verdict, JudgeOutput)]

    def _attempt(self, sample: Sample, answer: str, number: int) -> Attempt:
        metadata: dict[str, Any] = dict(sample.metadata)
        if sample.reference is not None:
            metadata["answer"] = sample.reference
        task = Task(task_id=sample.place, main_query=sample.question, metadata=metadata)
        workflow_task = WorkflowTask(
            task=task, episode_id=f"{sample.place}#{number}", group_id=sample.place, attempt=number
        )
        output = WorkflowOutput(response=answer, metadata={self._answer_field: answer})
        return Attempt(workflow_task=workflow_task, output=output)


class WatchedHelpers(HelperModels):
    """Helper models whose answers are counted for the verdict that asked for them."""

    def get(self, name: str, *, where: str) -> Helper:
        return cast(Helper, _WatchedHelper(super().get(name, where=where)))


class _WatchedHelper:
    """Stands for a helper."""

    def __init__(self, helper: Helper) -> None:
        self._helper = helper
        self.name, self.model = helper.name, helper.model

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, purpose: str, answer: type[BaseModel] | None = None,
        temperature: float | None = None, max_tokens: int | None = None, sample: int = 0,
    ) -> HelperAnswer:  # fmt: skip
        watched = _NOW.get()
        repeat = watched.repeat if watched is not None else 0
        found = await self._helper.ask(
            messages, purpose=purpose, answer=answer, temperature=temperature, max_tokens=max_tokens,
            sample=sample + _FAR * repeat,
        )  # fmt: skip
        if watched is not None:
            watched.answers.append(found)
        return found

    async def embed(self, texts: Sequence[str], *, purpose: str) -> list[list[float]]:
        return await self._helper.embed(texts, purpose=purpose)

    def usage(self) -> Usage:
        return self._helper.usage()
