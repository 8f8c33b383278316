"""What the gate measures, and when it lets a candidate through.

Both models play the validation tasks of an experiment, the same tasks with the same seeds, one model after the other.
The rules, all of which must hold:

- **better**: the low end of the 95 % interval of the mean paired difference is above ``margin``, and the paired test
  gives p <= 0.05;
- **success**: where rewards are compared, success on the same tasks is not lower by more than ``tolerance``, unless
  that is allowed;
- **no regression**: on each other experiment the low end of that interval is above ``-tolerance``;
- **checks**: each complains of no more than its share of the candidate's episodes;
- **failures**: nowhere do more of the candidate's episodes fail than of what serves;
- **held out**: the experiment trains on none of its tasks, as far as the part ``task_check`` finds, or it allows that;
  this is looked at before anything is played.

`astuner_record.paired` decides which measure is compared, and how, as in the verdict on a run.  A task that one of the
two has no scored episode of is in neither.
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
"""What the part ``task_check`` calls tasks that are not held out."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A candidate beside what serves, on the tasks of one experiment."""

    experiment: str
    tasks: int
    """Compared."""
    left_out: int
    """Tasks without a scored episode of one of the two."""
    serving: float
    """The mean over tasks."""
    candidate: float
    interval: Interval
    """95 %, of the mean difference."""
    p: float
    failed_serving: int
    """Episodes that were not scored."""
    failed_candidate: int
    by: Measure = "success"
    """What is compared."""
    note: str = ""
    """Why that is the reward although nobody asked for it; empty otherwise."""
    success: PairedDifference | None = None
    """Success on the same tasks, where rewards are compared."""
    reason: str = ""
    """Why this refuses the candidate; empty when it does not."""

    @property
    def difference(self) -> float:
        return self.candidate - self.serving

    @property
    def success_fell(self) -> bool:
        """Whether success is lower, where rewards are compared."""
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
    return f"success on the same tasks {verb} {found.before:.1%} to {found.after:.1%} (p = {found.p:.2g})"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What one check or judge has to say of the candidate."""

    check: str
    most: float
    """The share of episodes that it may complain of."""
    complaints: int
    episodes: int
    first: str
    """Its first complaint; empty if it has none."""

    @property
    def share(self) -> float:
        return self.complaints / self.episodes if self.episodes else 0.0

    @property
    def reason(self) -> str:
        """Why this refuses the candidate; empty when it does not."""
        if self.share <= self.most:
            return ""
        allowed = f"{self.most:g} of them" if self.most else "none"
        return f"--check {self.check}: {self}, and {allowed} may be; the first: {self.first}"

    def __str__(self) -> str:
        return f"complains of {self.complaints} of {self.episodes} episodes"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the gate says."""

    held_out: Comparison
    also: Sequence[Comparison]
    checks: Sequence[Checked]
    trained_on: str = ""
    """Which of the tasks are trained on, too, as the experiment allows; empty: none was found."""

    @property
    def tasks(self) -> str:
        """What the tasks of the first comparison are."""
        return "validation" if self.trained_on else "held out"

    @property
    def reasons(self) -> list[str]:
        """Why the candidate is refused; none: it is let through."""
        found = (self.held_out.reason, *(one.reason for one in self.also), *(one.reason for one in self.checks))
        return [reason for reason in found if reason]


@dataclass(frozen=True, kw_only=True)
class Gate:
    """The experiment, and what a candidate must be.

    :param others: experiments on whose tasks it must be no worse.
    :param checks: name of an output check or a judge -> the share of episodes that it may complain of.
    :param tasks: only the first so many of each.
    :param by: what is compared; None: success, or the reward if success is constant.
    :param allow_lower_success: whether rewards may rise while success falls by more than ``tolerance``.
    :param repeat: episodes of a task; None: as in a validation.
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
        """Measure both.

        :param serving: what serves now; None: the model before training.
        :raises ConfigError: tasks are too few, or not held out; a check is missing; an experiment is of another model.
        :raises RunError: the experiment itself fails, so there is nothing to compare.
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
        """Which of ``tasks`` are trained on, too, where that is allowed; empty: none was found."""
        part = find_optional_part(self.config.plugins, "task_check")
        found = part().look(self.config, train, tasks) if part else {}
        alarm = next((alarm for alarm in found.get("alarms", ()) if alarm["rule"] == OVERLAP), None)
        if alarm and found.get("leakage") != "allow":
            raise ConfigError(
                f"{self.config.path}: {alarm['message']}; {alarm['advice']}, or write astuner.data.leakage=allow"
            )
        return alarm["message"] if alarm else ""

    def _enough(self, config: Config, validation: Sequence[Task]) -> Sequence[Task]:
        """Those that are compared on."""
        tasks = validation[: self.tasks]
        if not tasks:
            raise ConfigError(
                f"{config.path}: the task reader yields no validation tasks, so there is nothing held out to compare "
                "the models on; name some (of a jsonl file: astuner.task_reader.jsonl.validation.file_path)"
            )
        if len(tasks) < FEWEST:
            raise ConfigError(
                f"{config.path}: there are {len(tasks)} validation tasks to compare on, and a paired test can say "
                f"nothing with fewer than {FEWEST}: have more, or leave out --tasks (most comparisons take hundreds)"
            )
        return tasks

    def _play(self, config: Config, tasks: Sequence[Task], folder: Path | None) -> list[Group]:
        """One model's episodes on one experiment's tasks."""
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
                f"{what}: none of {total} episodes could be scored, so there is nothing to compare; the first one: "
                f"{first.stop_reason.value}: {first.error}; try the experiment: astuner eval {config.path}"
            )
        return groups


@contextmanager
def _models(config: Config, folder: Path | None) -> Iterator[Models]:
    backbone, _ = find_backbone(config)
    with serve_policies(backbone, config, folder) as (_, models):
        seed = config.astuner.seed
        yield {name: PolicyModel(Seeded(model.engine, seed), model.codec) for name, model in models.items()}


class Seeded(InferenceEngine):
    """An engine that draws the n-th answer of an episode's agent with a seed of its own, whatever else runs."""

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
    """
    :param serving: a group for each task; ``candidate`` has the same tasks.
    :param by: as of `Gate`.
    :param bound: what the interval of the difference must be above.
    :param proven: the paired test must say so, too.
    :param may_fall: by how much success may be lower where rewards are compared.
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
        reason += f"; {choice.reason}, or write --by reward"
    return replace(found, reason=reason)


def _reason(found: Comparison, bound: float, proven: bool, may_fall: float) -> str:
    what = f"{found.experiment}: {found}"
    if found.tasks < FEWEST:
        return f"{what}: only {found.tasks} tasks have scored episodes of both models, and {FEWEST} are needed"
    if found.failed_candidate > found.failed_serving:
        return (
            f"{what}: {found.failed_candidate} episodes of the candidate failed, and {found.failed_serving} of what "
            "serves"
        )
    if found.note and proven and bound:
        return f"{what}: {found.note}; --margin {bound:g} is one of success: write --by reward with one of the reward"
    if found.success is not None and -found.success.mean > may_fall + _ROUNDING:
        return (
            f"{what}: success fell by more than {may_fall:g} (--tolerance); if that is meant, add --allow-lower-success"
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
    """How many tasks would tell, if the difference stayed what it is."""
    ahead, width = found.difference - bound, found.difference - found.interval.low
    if ahead <= 0 or not width:
        return ""
    needed = max(found.tasks + 1, math.ceil(found.tasks * (width / ahead) ** 2))
    return f"; if it stays like this, about {needed:,} tasks would tell"


# ---- checks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AskedJudge:
    """A judge that complains of an episode which is no success to it."""

    rejudge: Rejudge


def find_check(config: Config, name: str) -> Check | AskedJudge:
    """The output check, or else the judge, that ``name`` stands for.

    :raises ConfigError: there is neither.
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
            f"--check {name}: there is no such output check and no such judge ({e}); `astuner plugins` lists both, or "
            "name code of yours: --check checks.py->function"
        ) from e
    judge = config.astuner.task_judge.model_copy(update={"judge": name})
    return AskedJudge(Rejudge(replace(config, astuner=config.astuner.model_copy(update={"task_judge": judge}))))


def checked_by(name: str, check: Check | AskedJudge, episodes: Sequence[Episode], most: float) -> Checked:
    """Ask about every episode.

    :raises PluginError: a check raised.
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
        while not at.tools and at.continues is not None:  # they stand where they changed
            at = turns[at.continues]
        cut_off = turn.generation.finish_reason is FinishReason.LENGTH
        try:
            complaint = check(OutputView(turn.message, at.tools, cut_off))
        except Exception as e:  # a stranger's check may raise anything
            raise PluginError(f"--check {name} raised on a reply of the candidate: {type(e).__name__}: {e}") from e
        if complaint:
            return f"{episode.workflow_task.episode_id}, turn {turn.index}: {complaint}"
    return ""


# ---- models ----------------------------------------------------------------------------------------------------------


def _same_model(config: Config, others: Sequence[Config]) -> None:
    """:raises ConfigError: another experiment is of another model, or of other policies."""
    mine = AgentRegistry.of(config.astuner).policies
    for other in others:
        theirs = AgentRegistry.of(other.astuner).policies
        if theirs != mine:
            raise ConfigError(
                f"--also {other.path}: its policies are {', '.join(theirs)}, and those of {config.path} are "
                f"{', '.join(mine)}; give its astuner.agents the same"
            )
        for policy in mine:
            path, wanted = other.locate_model(policy=policy), config.locate_model(policy=policy)
            if path != wanted:
                raise ConfigError(
                    f"--also {other.path}: its model is {other.model_of(policy).path}, and the candidate comes from "
                    f"{config.model_of(policy).path}; write astuner.model.path: {wanted} there"
                )


def _name(config: Config) -> str:
    return config.path.name
