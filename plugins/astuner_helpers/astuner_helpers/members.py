"""Judges that other judges call: the members of a combination, and fallback judges.

A member is resolved, created and called like the judge of an experiment. Its section may be nested in the other judge's
section. Invariant: configuration errors of a member are raised when it is created, and a batch of attempts yields one
verdict or one failure per attempt.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from astuner import ask_group_judge, ask_judge, check_section, find_provider, import_target, is_code, make_judge
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, JudgeFailed, UnknownName
from astuner.contracts.judge import Attempt, GroupJudge
from astuner.contracts.places import Report, Tree
from astuner.contracts.types import JudgeOutput
from astuner_helpers.reply import HelperFailed

if TYPE_CHECKING:
    from astuner import Config

T = TypeVar("T")

_MAKING: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("astuner_judges_being_made", default=())


class Member:
    """A judge that another judge calls."""

    def __init__(self, name: str, judge: Any) -> None:
        """Wrap a judge.

        :param name: Name of the judge in messages.
        """
        self.name = name
        self._judge = judge
        self._who = f"the judge {name}"

    @classmethod
    def build(
        cls,
        context: BuildContext,
        reference: str,
        options: Mapping[str, Any] | None,
        *,
        where: str,
    ) -> Member:
        """Create a member. It uses the helper models of the calling judge, so that both share one limit.

        :param context: Build context of the calling judge.
        :param reference: Reference of the judge, as in `astuner.task_judge.judge`.
        :param options: Its section. None: the section under `astuner.task_judge`, or the defaults.
        :param where: The key that names it; ``options`` belong to ``where.config``.
        :raises ConfigError: Its section is invalid, or it would call itself.
        :raises PluginError: It cannot be found, imported or created.
        """
        making = _MAKING.get()
        if options is None and reference in making:
            raise ConfigError(f"{where}: the judge {reference!r} would call itself; use another judge")
        config = context.config
        section = config.section("judge", reference)
        if options is not None:
            section = _section(config, reference, options, f"{where}.config")
        token = _MAKING.set((*making, reference))
        try:
            return cls(reference, make_judge(reference, section, context))
        finally:
            _MAKING.reset(token)

    @property
    def by_group(self) -> bool:
        """Whether the judge compares attempts."""
        return isinstance(self._judge, GroupJudge)

    @property
    def wants_evaluation(self) -> bool:
        """See `Judge.wants_evaluation`."""
        return bool(getattr(self._judge, "wants_evaluation", False))

    def close(self) -> None:
        """Close the judge's resources."""
        if callable(getattr(self._judge, "close", None)):
            self._judge.close()

    async def judge(self, attempt: Attempt) -> JudgeOutput:
        """Return the verdict on one attempt. A judge that compares attempts receives a group of one.

        :raises JudgeFailed: There is no verdict.
        :raises ConfigError: Raised by the judge.
        """
        if self.by_group:
            (verdict,) = await self.judge_group([attempt])
            if isinstance(verdict, JudgeFailed):
                raise verdict
            return verdict
        about = f"judge {self.name} {attempt.workflow_task.episode_id}"
        return await ask_judge(self._judge, attempt.workflow_task, attempt.output, about, who=self._who)

    async def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        """Return a verdict or a failure per attempt. A `ConfigError` of the judge is raised."""
        if not self.by_group:
            return await together([self._one(attempt) for attempt in attempts])
        about = f"judge {self.name} {attempts[0].workflow_task.group_id}"
        try:
            return await ask_group_judge(self._judge, attempts, about, who=self._who)
        except JudgeFailed as e:
            return [e] * len(attempts)

    async def _one(self, attempt: Attempt) -> JudgeOutput | JudgeFailed:
        try:
            return await self.judge(attempt)
        except JudgeFailed as e:
            return e


async def together(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, or raise the first exception and cancel the remaining coroutines."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MOST_FAILED = 0.1
"""Largest share of unanswered questions before a helper model counts as unusable. Few failures are always allowed."""
DOWN_AFTER = 3
"""Consecutive failures, not caused by the question itself, after which a helper model counts as down."""


async def all_answered(
    asked: Sequence[Coroutine[Any, Any, T]],
    stopped: Callable[[HelperFailed, int, int], str],
    *,
    fewest: int = 3,
    settled: Callable[[int, int], None] = lambda answered, failed: None,
) -> list[T | HelperFailed]:
    """Return the result of each coroutine that calls a helper model, or its failure.

    :param stopped: Return the message for an unusable helper model, from the last error and the numbers of answers and
        failures.
    :param fewest: Minimum number of failures before the share of failures counts.
    :param settled: Called after each result with the numbers of answers and failures.
    :raises HelperFailed: `DOWN_AFTER` consecutive questions fail, or more than `MOST_FAILED` of all.
    """
    answered = failed = in_a_row = 0

    async def one(job: Coroutine[Any, Any, T]) -> T | HelperFailed:
        nonlocal answered, failed, in_a_row
        found: T | HelperFailed
        try:
            found = await job
        except HelperFailed as e:
            found, failed, in_a_row = e, failed + 1, 0 if e.about_question else in_a_row + 1
            if in_a_row >= DOWN_AFTER or (failed >= fewest and failed > MOST_FAILED * len(asked)):
                raise HelperFailed(stopped(e, answered, failed), about_question=e.about_question) from e
        else:
            answered, in_a_row = answered + 1, 0
        settled(answered, failed)
        return found

    return await together([one(job) for job in asked])


def _section(config: Config, reference: str, options: Mapping[str, Any], where: str) -> Any:
    """Return the checked section of a registered judge.

    :raises ConfigError: The section has unknown keys, or the judge has no options.
    """
    try:
        provider = find_provider(config.plugins, "judge", reference)
    except UnknownName:
        if not is_code(reference):
            raise
        provider = None
    if provider is None or provider.config is None:
        if not options:
            return None
        raise ConfigError(f"{where}: the judge {reference!r} has no options")
    key = tuple(where.split("."))
    tree, report = Tree(), Report(str(config.path))
    tree.put(key, dict(options))
    section = check_section(import_target(provider.config), tree, key, report)
    report.raise_problems()
    return section
