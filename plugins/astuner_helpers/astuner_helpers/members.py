"""Judges that other judges ask: the members of a combination, and stand-ins.

A member is found, made and asked as the judge of an experiment is, except that its section may stand inside of the
other judge's.  Invariant: a member's mistakes show when it is made, and what it says about many attempts is one
verdict or one failure for each.
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
    """A judge that another judge asks."""

    def __init__(self, name: str, judge: Any) -> None:
        """:param name: what messages call it."""
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
        """Find and make it; it asks the helper models of the judge that asks it, so that both keep to one limit.

        :param context: of that judge.
        :param reference: as of `astuner.task_judge.judge`.
        :param options: its section; None: the one below `astuner.task_judge`, or the defaults.
        :param where: the key that names it; ``options`` are those of ``where.config``.
        :raises ConfigError: its section is wrong, or it asks itself.
        :raises PluginError: it cannot be found, imported or made.
        """
        making = _MAKING.get()
        if options is None and reference in making:
            raise ConfigError(f"{where}: the judge {reference!r} would ask itself; name another one")
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
        """Whether it compares attempts."""
        return isinstance(self._judge, GroupJudge)

    @property
    def wants_evaluation(self) -> bool:
        """As `Judge.wants_evaluation`."""
        return bool(getattr(self._judge, "wants_evaluation", False))

    def close(self) -> None:
        """End whatever the judge keeps open."""
        if callable(getattr(self._judge, "close", None)):
            self._judge.close()

    async def judge(self, attempt: Attempt) -> JudgeOutput:
        """Its verdict on one attempt, which is a group of one where it compares attempts.

        :raises JudgeFailed: there is none.
        :raises ConfigError: as the judge raises it.
        """
        if self.by_group:
            (verdict,) = await self.judge_group([attempt])
            if isinstance(verdict, JudgeFailed):
                raise verdict
            return verdict
        about = f"judge {self.name} {attempt.workflow_task.episode_id}"
        return await ask_judge(self._judge, attempt.workflow_task, attempt.output, about, who=self._who)

    async def judge_group(self, attempts: Sequence[Attempt]) -> list[JudgeOutput | JudgeFailed]:
        """Its verdict on each, or why there is none; raises `ConfigError` as the judge does."""
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
    """All answers, or the first exception; then the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


MOST_FAILED = 0.1
"""The share of questions without an answer after which a helper is of no use; it may fail once or twice anyway."""
DOWN_AFTER = 3
"""Questions in a row that fail and not for what they ask (each was tried several times): the helper is down."""


async def all_answered(
    asked: Sequence[Coroutine[Any, Any, T]],
    stopped: Callable[[HelperFailed, int, int], str],
    *,
    fewest: int = 3,
    settled: Callable[[int, int], None] = lambda answered, failed: None,
) -> list[T | HelperFailed]:
    """The result of each that asks a helper model, or in its place why there is none.

    :param stopped: what to say where the helper is of no use, of the last error, and how many were answered and failed.
    :param fewest: failures that it takes at least.
    :param settled: is told how many were answered and failed, each time.
    :raises HelperFailed: `DOWN_AFTER` in a row fail, or more than `MOST_FAILED` of all.
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
    """The checked section of a registered judge.

    :raises ConfigError: it has other keys than the judge's, or the judge takes none.
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
        raise ConfigError(f"{where}: the judge {reference!r} takes no options")
    key = tuple(where.split("."))
    tree, report = Tree(), Report(str(config.path))
    tree.put(key, dict(options))
    section = check_section(import_target(provider.config), tree, key, report)
    report.raise_problems()
    return section
