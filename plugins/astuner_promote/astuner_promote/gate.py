"""Promotion gate: compare a candidate with the serving model, and decide whether to promote it.

Both models run the validation tasks of an experiment, with the same tasks and seeds, one model after the other. All of
these rules must pass:

- **better**: the lower bound of the 95 % interval of the mean paired difference is above ``margin``, and the paired
  test gives p <= 0.05;
- **success**: if rewards are compared, success on the same tasks is not lower by more than ``tolerance``, unless this
  is allowed;
- **no regression**: on each other experiment, the lower bound of the interval is above ``-tolerance``;
- **checks**: each check fails at most its allowed share of the candidate's episodes;
- **failures**: on no experiment do more episodes of the candidate fail than of the serving model;
- **held out**: the part ``task_check`` finds no validation task among the training tasks, or the experiment allows it.
  This rule is checked before any episode runs.

`astuner_record.paired` chooses the measure and the test, as in the verdict of a run. A task is left out if either model
has no scored episode of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from astuner import (
    AgentRegistry,
    Config,
    Group,
    InferenceEngine,
    Models,
    PolicyModel,
    find_backbone,
    find_offer,
    find_optional_part,
    is_code,
    read_tasks,
    run_services,
)
from astuner.contracts.errors import ConfigError, PluginError, RunError, UnknownName
from astuner.contracts.output_check import Check, OutputView
from astuner.contracts.statistics import percent
from astuner.contracts.types import Episode, FinishReason, Generation, SamplingParams, Task, Turn
from astuner.contracts.validation import TaskResult
from astuner_models.serving import serve_policies, validate
from astuner_record.paired import (
    FEWEST,
    LEVEL,
    Choice,
    Measure,
    PairedDifference,
    choose_measure,
    reward_test,
    success_test,
)
from astuner_record.replay.verdicts import Rejudge, Rejudged
from astuner_record.statistics import Interval

_ROUNDING = 1e-9
OVERLAP = "train_validation_overlap"
"""Rule of the part ``task_check`` for tasks that are not held out."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a candidate and the serving model on the tasks of one experiment."""

    experiment: str
    tasks: int
    """Compared tasks."""
    left_out: int
    """Tasks without a scored episode of one of the models."""
    serving: float
    """Mean over tasks."""
    candidate: float
    interval: Interval
    """95 % interval of the mean difference."""
    p: float
    failed_serving: int
    """Episodes without a score."""
    failed_candidate: int
    by: Measure = "success"
    """Measure that is compared."""
    note: str = ""
    """Why the reward was chosen automatically; empty otherwise."""
    success: PairedDifference | None = None
    """Success on the same tasks, if rewards are compared."""
    reason: str = ""
    """Why the comparison rejects the candidate; empty if it passes."""

    @property
    def difference(self) -> float:
        return self.candidate - self.serving

    @property
    def success_fell(self) -> bool:
        """Whether success is lower, if rewards are compared."""
        return self.success is not None and self.success.mean < 0

    def __str__(self) -> str:
        low, high = self.interval.low, self.interval.high
        return (
            f"{'reward ' if self.by == 'reward' else ''}{self.serving:.3f} -> {self.candidate:.3f}, "
            f"difference {self.difference:+.3f} [{low:+.3f}, {high:+.3f}], "
            f"p = {self.p:.2g}, {self.tasks} tasks"
            + (f" ({self.left_out} left out)" if self.left_out else "")
            + (f"; {_success(self.success)}" if self.success else "")
        )


def _success(found: PairedDifference) -> str:
    verb = "fell from" if found.mean < 0 else "went from"
    before, after = percent(found.before, 1), percent(found.after, 1)
    return f"success on the same tasks {verb} {before} to {after} (p = {found.p:.2g})"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Result of one check or judge on the candidate's episodes."""

    check: str
    most: float
    """Allowed share of failed episodes."""
    complaints: int
    episodes: int
    first: str
    """First failure; empty without failures."""

    @property
    def share(self) -> float:
        return self.complaints / self.episodes if self.episodes else 0.0

    @property
    def reason(self) -> str:
        """Why the check rejects the candidate; empty if it passes."""
        if self.share <= self.most:
            return ""
        allowed = f"{self.most:g} of the episodes" if self.most else "0"
        return f"--check {self.check}: {self}, allowed: {allowed}. First failure: {self.first}"

    def __str__(self) -> str:
        return f"failed {self.complaints} of {self.episodes} episodes"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """Result of the gate."""

    held_out: Comparison
    also: Sequence[Comparison]
    checks: Sequence[Checked]
    trained_on: str = ""
    """Overlap of validation and training tasks that the experiment allows; empty if there is none."""

    @property
    def tasks(self) -> str:
        """Kind of the tasks of the first comparison."""
        return "validation" if self.trained_on else "held out"

    @property
    def reasons(self) -> list[str]:
        """Why the candidate is rejected; empty if it is promoted."""
        found = (self.held_out.reason, *(one.reason for one in self.also), *(one.reason for one in self.checks))
        return [reason for reason in found if reason]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """Experiment with the requirements for a candidate.

    :param others: Experiments on which the candidate must not be worse.
    :param checks: Name of an output check or judge -> allowed share of failed episodes.
    :param tasks: Maximum number of tasks per experiment.
    :param by: Measure to compare. None: success, or the reward if success is constant.
    :param allow_lower_success: Accept a success that is lower by more than ``tolerance`` if rewards are compared.
    :param repeat: Episodes per task. None: as in a validation.
    """

    config: Config
    others: Sequence[Config] = ()
    margin: float = 0.0
    tolerance: float = 0.05
    by: Measure | None = None
    allow_lower_success: bool = False
    checks: Mapping[str, float]
    tasks: int | None = None
    repeat: int | None = None
    services: Sequence[str] = ()
    progress: Callable[[str], None] = lambda text: None

    def judge(self, serving: Path | None, candidate: Path) -> Judgement:
        """Measure and compare both models.

        :param serving: Serving model. None: the base model.
        :raises ConfigError: Too few tasks, tasks are not held out, a check is missing, or experiments use other models.
        :raises RunError: The experiment fails, so there is nothing to compare.
        """
        experiments = [self.config, *self.others]
        _same_model(self.config, self.others)
        found = [read_tasks(config) for config in experiments]
        tasks = [self._enough(config, of.validation) for config, of in zip(experiments, found, strict=True)]
        trained_on = self._trained_on(found[0].train, tasks[0])
        checks = {name: find_check(self.config, name) for name in self.checks}
        plays = list(zip(experiments, tasks, strict=True))
        before, after = ([self._play(*play, folder) for play in plays] for folder in (serving, candidate))
        held_out, *also = (
            compare(
                _name(config),
                a,
                b,
                by=self.by,
                bound=-self.tolerance if i else self.margin,
                proven=not i,
                may_fall=1.0 if self.allow_lower_success else self.tolerance,
            )
            for i, (config, a, b) in enumerate(zip(experiments, before, after, strict=True))
        )
        episodes = [e for groups in after for group in groups for e in group.scored]
        checked = [checked_by(name, check, episodes, self.checks[name]) for name, check in checks.items()]
        return Judgement(held_out=held_out, also=also, checks=checked, trained_on=trained_on)

    def _trained_on(self, train: Sequence[Task], tasks: Sequence[Task]) -> str:
        """Return which ``tasks`` are also trained on, if the experiment allows this. Empty: none."""
        part = find_optional_part(self.config.plugins, "task_check")
        found = part().look(self.config, train, tasks) if part else {}
        alarm = next((alarm for alarm in found.get("alarms", ()) if alarm["rule"] == OVERLAP), None)
        if alarm and found.get("leakage") != "allow":
            raise ConfigError(
                f"{self.config.path}: {alarm['message']}. {alarm['advice']}, or set astuner.data.leakage=allow"
            )
        return alarm["message"] if alarm else ""

    def _enough(self, config: Config, validation: Sequence[Task]) -> Sequence[Task]:
        """Return the tasks for the comparison."""
        tasks = validation[: self.tasks]
        if not tasks:
            raise ConfigError(
                f"{config.path}: the task reader returns no validation tasks, so the models cannot be compared. "
                "Configure some, e.g. astuner.task_reader.jsonl.validation.file_path"
            )
        if len(tasks) < FEWEST:
            raise ConfigError(
                f"{config.path}: {len(tasks)} validation tasks are too few; a paired test needs {FEWEST} or more, "
                "usually hundreds. Add tasks, or remove --tasks."
            )
        return tasks

    def _play(self, config: Config, tasks: Sequence[Task], folder: Path | None) -> list[Group]:
        """Run one model's episodes on the tasks of one experiment."""
        repeat = self.repeat or config.astuner.rollout.val_kwargs.num_repeat
        what, total, done = f"{_name(config)}, {folder.name if folder else 'base'}", len(tasks) * repeat, 0

        def ended(episode: Episode) -> None:
            nonlocal done
            done += 1
            if done % max(1, total // 4) == 0:
                self.progress(f"{what}: {done} of {total} episodes")

        with ExitStack() as stack:
            stack.enter_context(run_services(config, self.services))
            models = stack.enter_context(_models(config, folder))
            groups = validate(config, models, tasks, repeat=repeat, on_episode=ended)
        if not any(group.scored for group in groups):
            first = next(e for group in groups for e in group.episodes)
            raise RunError(
                f"{what}: none of {total} episodes has a score, so there is nothing to compare. First failure: "
                f"{first.stop_reason.value}: {first.error}. Test the experiment with: astuner eval {config.path}"
            )
        return groups


@contextmanager
def _models(config: Config, folder: Path | None) -> Iterator[Models]:
    backbone, _ = find_backbone(config)
    with serve_policies(backbone, config, folder) as (_, models):
        seed = config.astuner.seed
        yield {name: PolicyModel(Seeded(model.engine, seed), model.codec) for name, model in models.items()}


class Seeded(InferenceEngine):
    """Engine that samples the n-th answer of an episode's agent with a fixed seed, independent of other requests."""

    def __init__(self, engine: InferenceEngine, seed: int) -> None:
        self._engine, self._seed = engine, seed
        self._asked: dict[str, int] = {}
        self.max_model_len = engine.max_model_len

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        number = self._asked[session] = self._asked.get(session, 0) + 1
        digest = hashlib.sha256(f"{self._seed}/{session}/{number}".encode()).digest()
        seeded = replace(sampling, seed=int.from_bytes(digest[:4], "big") >> 1)
        return await self._engine.generate(prompt_ids, seeded, session=session)


def compare(
    experiment: str,
    serving: Sequence[Group],
    candidate: Sequence[Group],
    *,
    by: Measure | None,
    bound: float,
    proven: bool,
    may_fall: float = 0.05,
) -> Comparison:
    """Compare two models on one experiment.

    :param serving: One group per task. ``candidate`` has the same tasks.
    :param by: As in `Gate`.
    :param bound: Lower bound that the interval of the difference must exceed.
    :param proven: Whether the paired test must be significant too.
    :param may_fall: Allowed decrease of success if rewards are compared.
    """
    results = [(TaskResult.of(a.episodes), TaskResult.of(b.episodes)) for a, b in zip(serving, candidate, strict=True)]
    pairs = [(a, b) for a, b in results if a is not None and b is not None]
    choice = choose_measure(pairs) if pairs else Choice("success")
    measure = by or choice.measure
    success = success_test(pairs)
    tested = success if measure == "success" else reward_test(pairs)
    found = Comparison(
        experiment=experiment,
        tasks=len(pairs),
        left_out=len(results) - len(pairs),
        serving=tested.before,
        candidate=tested.after,
        interval=tested.interval,
        p=tested.p,
        failed_serving=sum(e.reward is None for group in serving for e in group.episodes),
        failed_candidate=sum(e.reward is None for group in candidate for e in group.episodes),
        by=measure,
        note=choice.reason if by is None else "",
        success=success if measure == "reward" else None,
    )
    reason = _reason(found, bound, proven, may_fall)
    if reason and by == "success" and choice.measure == "reward":
        reason += f"; {choice.reason}, or use --by reward"
    return replace(found, reason=reason)


def _reason(found: Comparison, bound: float, proven: bool, may_fall: float) -> str:
    what = f"{found.experiment}: {found}"
    if found.tasks < FEWEST:
        return f"{what}: only {found.tasks} tasks have scored episodes of both models; {FEWEST} are required"
    if found.failed_candidate > found.failed_serving:
        return (
            f"{what}: more episodes failed with the candidate ({found.failed_candidate}) than with the serving model "
            f"({found.failed_serving})"
        )
    if found.note and proven and bound:
        return f"{what}: {found.note}; --margin {bound:g} was meant for success: pass --by reward and a reward margin"
    if found.success is not None and -found.success.mean > may_fall + _ROUNDING:
        return (
            f"{what}: success fell by more than {may_fall:g} (--tolerance); to accept this, add --allow-lower-success"
        )
    if found.interval.low <= bound:
        if proven:
            why = f"the interval must be above {bound:g} (--margin)"
        else:
            why = f"the interval must be above {bound:g} (--tolerance {-bound:g})"
        return f"{what}: {why}{_more(found, bound)}"
    if proven and found.p > LEVEL:
        return f"{what}: p must be at most {LEVEL}{_more(found, bound)}"
    return ""


def _more(found: Comparison, bound: float) -> str:
    """Return a hint on how many tasks would be enough if the difference stayed the same."""
    ahead, width = found.difference - bound, found.difference - found.interval.low
    if ahead <= 0 or not width:
        return ""
    needed = max(found.tasks + 1, math.ceil(found.tasks * (width / ahead) ** 2))
    return f"; with this difference, about {needed:,} tasks would be enough"


# ---- checks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AskedJudge:
    """Judge used as a check: an episode fails if the judge does not rate it a success."""

    rejudge: Rejudge


def find_check(config: Config, name: str) -> Check | AskedJudge:
    """Return the output check or the judge called ``name``.

    :raises ConfigError: Neither exists.
    """
    try:
        if is_code(name):
            found = config.resolve("output check", name)
            if not isinstance(found, type):
                return found  # type: ignore[no-any-return]
        else:
            offers = config.plugins.offers("output check")
            if any(name in (known, f"{plugin.name}/{known}") for plugin, known, _ in offers):
                return config.resolve("output check", name)  # type: ignore[no-any-return]
            find_offer(config.plugins, "judge", name)
    except UnknownName as e:
        raise ConfigError(
            f"--check {name} is neither an output check nor a judge ({e}). To list both, run `astuner plugins`, or "
            "pass your own code: --check checks.py->function"
        ) from e
    judge = config.astuner.task_judge.model_copy(update={"judge": name})
    return AskedJudge(Rejudge(replace(config, astuner=config.astuner.model_copy(update={"task_judge": judge}))))


def checked_by(name: str, check: Check | AskedJudge, episodes: Sequence[Episode], most: float) -> Checked:
    """Check every episode.

    :raises PluginError: The check raised an exception.
    """
    if isinstance(check, AskedJudge):
        said = [_unjudged(one) for one in _ask(check.rejudge, episodes)]
    else:
        said = [_complaint(name, check, episode) for episode in episodes]
    complaints = [text for text in said if text]
    first = complaints[0] if complaints else ""
    return Checked(check=name, most=most, complaints=len(complaints), episodes=len(said), first=first)


def _ask(rejudge: Rejudge, episodes: Sequence[Episode]) -> list[Rejudged]:
    async def ask() -> list[Rejudged]:
        return await rejudge.ask_all(iter(episodes), max_parallel=8, on_verdict=lambda one: None)

    return asyncio.run(ask())


def _unjudged(one: Rejudged) -> str:
    judged, episode = one.judged, one.episode.workflow_task.episode_id
    if judged is None:
        return f"{episode}: no verdict: {one.why}"
    return "" if judged.is_success else f"{episode}: reward {judged.reward:g}"


def _complaint(name: str, check: Check, episode: Episode) -> str:
    turns: Mapping[int, Turn] = {turn.index: turn for turn in episode.turns}
    for turn in episode.turns:
        at = turn
        while not at.tools and at.continues is not None:  # a turn records its tools only if they changed
            at = turns[at.continues]
        cut_off = turn.generation.finish_reason is FinishReason.LENGTH
        try:
            complaint = check(OutputView(turn.message, at.tools, cut_off))
        except Exception as e:  # third-party checks may raise anything
            raise PluginError(f"--check {name} raised {type(e).__name__} on a reply of the candidate: {e}") from e
        if complaint:
            return f"{episode.workflow_task.episode_id}, turn {turn.index}: {complaint}"
    return ""


# ---- models ----------------------------------------------------------------------------------------------------------


def _same_model(config: Config, others: Sequence[Config]) -> None:
    """Check that all experiments use the same models.

    :raises ConfigError: Another experiment has a different model or different policies.
    """
    mine = AgentRegistry.of(config.astuner).policies
    for other in others:
        theirs = AgentRegistry.of(other.astuner).policies
        if theirs != mine:
            raise ConfigError(
                f"--also {other.path}: its policies are {', '.join(theirs)}, but {config.path} has {', '.join(mine)}. "
                "Use the same names in its astuner.agents."
            )
        for policy in mine:
            path, wanted = other.locate_model(policy=policy), config.locate_model(policy=policy)
            if path != wanted:
                raise ConfigError(
                    f"--also {other.path}: its model is {other.model_of(policy).path}, but the candidate was trained "
                    f"from {config.model_of(policy).path}. Set astuner.model.path: {wanted} in it."
                )


def _name(config: Config) -> str:
    return config.path.name
