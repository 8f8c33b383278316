"""What a backbone drives: the tasks, the episodes, the credit and the books of one run.

A backbone's loop reads: draw and roll out, assign credit, update, log, validate, save.  Everything here is the same
for all backbones; everything about weights is theirs.  Its whole state fits in `Experiment.state`, which a backbone
saves with its weights, so that a resumed run draws, counts and logs exactly as if it had never stopped.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.errors import Interrupted
from astuner.contracts.events import Measured, RolledOut, StalenessBounded, StepEnded, Subscriber, ValidationEnded
from astuner.contracts.interrupt import Interrupt
from astuner.contracts.metric_names import derived
from astuner.contracts.types import Episode, Sample, Split, StopReason, Task
from astuner.rollout.ahead import GroupsAhead
from astuner.rollout.credit import Comparison, Penalties, Scored, assign_credit
from astuner.rollout.elsewhere import StepsElsewhere
from astuner.rollout.evaluation import Evaluation, check_failures, evaluate_groups
from astuner.rollout.metrics import Metrics, rollout_metrics, sample_metrics
from astuner.rollout.models import EpisodesHere
from astuner.rollout.pool import Group, RolloutPool
from astuner.rollout.roster import Roster
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.sampler import TaskSampler
from astuner.rollout.samples import SampleSet, build_samples
from astuner.rollout.sampling import sampling_for
from astuner.rollout.watchdog import watching
from astuner.runs.books import Books
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import TaskSet, planned_steps

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.rollout.models import EpisodeHost, Models

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepRollout:
    """The groups of one step that can be trained on."""

    step: int
    groups: tuple[Group, ...]
    scored: tuple[Scored, ...]
    metrics: Metrics
    seconds: float


class Experiment:
    """One run of one config, as a backbone sees it."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        tasks: TaskSet,
        *,
        runner: EpisodeRunner | None = None,
        sinks: Sequence[Subscriber] = (),
        interrupt: Interrupt | None = None,
        resume_from: Path | None = None,
        trains: bool = True,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.interrupt = interrupt or Interrupt()
        self.resume_from = resume_from
        """The newest saved state, or None for a fresh start. A backbone loads weights from it, then calls `restore`."""
        self.runner = runner or EpisodeRunner(config)
        self.runner.prepare()
        self.sampler = TaskSampler(tasks.train, seed=config.astuner.seed, shuffle=config.astuner.data.shuffle)
        self.validation_tasks = tasks.validation
        self.total_steps = planned_steps(config, len(tasks.train))
        """Of the whole run; see `astuner.runs.tasks.planned_steps`."""
        roster = Roster.of(config.astuner)
        self._told_apart = roster.trained_policies if len(roster.policies) > 1 else ()
        """Policies with numbers of their own."""
        self.books = Books(
            config,
            run_dir,
            sinks,
            total_steps=self.total_steps,
            policies=self._told_apart,
            trains=trains,
        )
        self.books.skipped(tasks.skipped)
        self._loop = asyncio.new_event_loop()
        self._ahead: GroupsAhead | None = None
        self.elsewhere = StepsElsewhere(self)
        """Steps whose groups somebody else runs."""
        self._step_ahead = 1
        """The step that an episode of `begin` which ends now is counted for: the one that is taken next."""

    # ------------------------------------------------------------------ steps

    def steps(self, done: int) -> Iterator[int]:
        """The numbers of the steps still to do, 1-based; ends early, by raising, when the person asked to stop."""
        for step in range(done + 1, self.total_steps + 1):
            self.check_interrupt()
            yield step

    def check_interrupt(self) -> None:
        """:raises Interrupted: the person asked to stop.
        :raises AstunerError: a subscriber wants it to stop, e.g. for an alarm that `sentinel.stop_on` names.
        """
        if self.interrupt.requested:
            raise Interrupted("stopped on request; continue with --resume")
        self.books.bus.check_stop()

    def is_due(self, what: str, step: int) -> bool:
        """Whether ``save``, ``test`` or ``resume`` happens after ``step``; the last step always does all three."""
        every: int = getattr(self.config.astuner.trainer_common, f"{what}_freq")
        return step % every == 0 or step == self.total_steps

    def drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the run's own event loop.

        :raises Interrupted: the person asked to stop; ``work`` was cancelled.
        """
        task = self._loop.create_task(work)

        def cancel() -> None:
            self._loop.call_soon_threadsafe(task.cancel)

        limit = self.config.astuner.rollout.episode_timeout
        with self.interrupt.cancels(cancel), watching(self._loop, limit, self.note):
            try:
                return self._loop.run_until_complete(task)
            except asyncio.CancelledError:
                self.check_interrupt()
                raise

    def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """As `drive`, and to its end though the person asked to stop."""
        return self._loop.run_until_complete(work)

    # --------------------------------------------------------------- episodes

    def rollout(self, models: Models | EpisodeHost, step: int) -> StepRollout:
        """Run one step's episodes and cut them into samples.

        :param models: policy -> engine and codec (see `astuner.rollout.models.one_model`), or where episodes run.
        :raises RunError: more episodes failed than `rollout.max_failed_share` allows.
        """
        started = time.perf_counter()
        a = self.config.astuner
        useful: list[Group] = []
        drawn: list[Group] = []
        rounds = a.trainer_common.algorithm.max_draws if a.trainer_common.algorithm.dynamic_sampling else 1
        while rounds and len(useful) < a.data.train_batch_size:
            rounds -= 1
            wanted = a.data.train_batch_size - len(useful)
            draws = self.sampler.draw(math.ceil(wanted * a.rollout.oversample))
            pool = self._pool(
                models,
                Split.TRAIN,
                self.books.listener(step, len(draws) * a.rollout.num_repeat, "rollout"),
            )
            just_drawn = self.drive(
                pool.run_groups(
                    draws,
                    repeat=a.rollout.num_repeat,
                    split=Split.TRAIN,
                    needed=wanted if a.rollout.oversample > 1 else None,
                    is_useful=self.is_useful,
                )
            )
            self.sampler.give_back(g.group_id for g in just_drawn if not g.complete)
            drawn += just_drawn
            useful += [g for g in just_drawn if g.complete and self.is_useful(g)]
        return self.enter(step, drawn, useful[: a.data.train_batch_size], started)

    def begin(self, host: EpisodeHost, groups: int) -> None:
        """Begin ``groups`` more groups, for `take`; what ``host`` runs goes on while the caller does other things.

        :param host: the same in every call.
        """
        if self._ahead is None:
            pool = self._pool(host, Split.TRAIN, self._ended_ahead)
            self._ahead = GroupsAhead(pool, self._loop, repeat=self.config.astuner.rollout.num_repeat)
        self._ahead.begin(self.sampler.draw(groups))

    @property
    def groups_ahead(self) -> int:
        """Groups that were begun and not taken."""
        return len(self._ahead.under_way) if self._ahead else 0

    def stop_ahead(self) -> None:
        """End the groups that nobody took, while ``host`` can still be told so; a resumed run draws them again."""
        if self._ahead is not None:
            self._loop.run_until_complete(self._ahead.stop())

    def take(self, host: EpisodeHost, step: int) -> StepRollout:
        """The next `train_batch_size` groups that can be trained on, of those begun.

        For each group that cannot be trained on, another one is begun; with dynamic sampling at most
        `algorithm.max_draws` batches of them, and then there are fewer.

        :raises RunError: more episodes failed than `rollout.max_failed_share` allows.
        """
        started = time.perf_counter()
        self._step_ahead = step
        a = self.config.astuner
        drawn: list[Group] = []
        useful: list[Group] = []
        most = a.data.train_batch_size * a.trainer_common.algorithm.max_draws
        while len(useful) < a.data.train_batch_size and len(drawn) < most:
            group = self.drive(self._next_group(host))
            drawn.append(group)
            if self.is_useful(group):
                useful.append(group)
                self.books.progress(step, len(useful), a.data.train_batch_size, "groups")
                continue
            self.begin(host, 1)
            if len(drawn) - len(useful) >= a.data.train_batch_size:
                self.check_failures(step, drawn)  # or a broken world would be asked for ever
        self._step_ahead = step + 1
        return self.enter(step, drawn, useful, started)

    def is_useful(self, group: Group) -> bool:
        """Whether a complete group can be trained on; with dynamic sampling its rewards must differ (DAPO)."""
        if len(group.scored) < self.config.astuner.rollout.min_group_size:
            return False
        return group.has_spread or not self.config.astuner.trainer_common.algorithm.dynamic_sampling

    def enter(self, step: int, drawn: Sequence[Group], kept: Sequence[Group], started: float) -> StepRollout:
        """Enter a step's groups into the books.

        :param drawn: all that ended, those that were cut short too.
        :param kept: those of them to train on.
        """
        groups = [g for g in drawn if g.complete]
        self.books.conversations(f"step_{step:06d}.jsonl", [e for g in groups for e in g.episodes])
        for group in groups:
            if len(group.scored) < self.config.astuner.rollout.min_group_size:
                reason = f"{len(group.scored)} of {len(group.episodes)} episodes were scored"
                self.books.ledger.dropped_group(step, group.group_id, reason)
        self.check_failures(step, groups)
        samples = {e.workflow_task.episode_id: self._cut(e) for g in kept for e in g.scored}
        self.books.bus.publish(
            RolledOut(
                step=step,
                episodes=[e for g in drawn for e in g.episodes],
                samples={name: built.samples for name, built in samples.items()},
            )
        )
        return StepRollout(
            step=step,
            groups=tuple(kept),
            scored=tuple(
                Scored.of(e, samples[e.workflow_task.episode_id].samples, agents_named=g.comparison.agents_named)
                for g in kept
                for e in g.scored
            ),
            metrics=rollout_metrics(groups, self.config.astuner),
            seconds=time.perf_counter() - started,
        )

    def check_failures(self, step: int, groups: Sequence[Group]) -> None:
        """:raises RunError: more episodes failed than `rollout.max_failed_share` allows, or none asked the model."""
        check_failures(step, groups, self.config.astuner.rollout.max_failed_share, self.run_dir.failures)

    def credit(
        self, rollout: StepRollout, *, policy_version: int, penalties: Penalties | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Samples with advantages and token weights, and what they look like."""
        a = self.config.astuner
        samples = assign_credit(
            rollout.scored,
            a.trainer_common.algorithm,
            constant_length=a.data.max_response_length or a.rollout.max_response_length_in_one_turn,
            penalties=penalties,
        )
        self.books.credited(rollout.step, samples)
        return samples, sample_metrics(samples, len(rollout.scored), policy_version, self._told_apart)

    def validate(self, models: Models | EpisodeHost, step: int) -> Evaluation | None:
        """Measure the policy on all validation tasks; None when there are none. Raises as `rollout`."""
        if not self.validation_tasks:
            return None
        started = time.perf_counter()
        draws = self.validation_draws(step)
        pool = self._pool(models, Split.VALIDATION, self.validation_listener(step))
        repeat = self.config.astuner.rollout.val_kwargs.num_repeat
        groups = self.drive(pool.run_groups(draws, repeat=repeat, split=Split.VALIDATION))
        return self.validated(step, groups, started)

    def validation_draws(self, step: int) -> list[tuple[str, Task]]:
        """All validation tasks, as draws of a measurement after ``step``."""
        return [(f"v{step:06d}-{i:05d}", task) for i, task in enumerate(self.validation_tasks)]

    def validation_listener(self, step: int) -> Callable[[Episode], None]:
        """What each episode of a validation is told to."""
        total = len(self.validation_tasks) * self.config.astuner.rollout.val_kwargs.num_repeat
        return self.books.listener(step, total, "validation")

    def validated(self, step: int, groups: Sequence[Group], started: float) -> Evaluation:
        """Enter the groups of `validation_draws`, in their order.

        :param started: when the first of them began, by `time.perf_counter`.
        :raises RunError: more episodes failed than `rollout.max_failed_share` allows.
        """
        repeat = self.config.astuner.rollout.val_kwargs.num_repeat
        self.books.conversations(
            f"validation_{step:06d}.jsonl", [e for g in groups for e in g.episodes], all_of_them=True
        )
        limit, failures = self.config.astuner.rollout.max_failed_share, self.run_dir.failures
        evaluation = evaluate_groups(groups, repeat=repeat, max_failed_share=limit, failures=failures)
        measured = {**evaluation.metrics(), "time/validation": time.perf_counter() - started}
        self.log(step, measured, ValidationEnded)
        return evaluation

    def was_validated(self, step: int) -> bool:
        """Whether a validation of ``step`` is in the books already (of a run that is being resumed)."""
        return any(row["step"] == step and "val/success" in row for row in self.run_dir.read_metrics())

    def try_out(self, models: Models, *, tasks: int, max_parallel: int) -> list[Episode]:
        """One episode of each of the first training tasks, for looking at; nothing is trained or dropped."""
        draws = self.sampler.first(tasks)
        pool = self._pool(models, Split.TRAIN, self.books.listener(0, len(draws), "rollout"), max_parallel)
        groups = self.drive(pool.run_groups(draws, repeat=1, split=Split.TRAIN))
        episodes = [e for g in groups for e in g.episodes]
        self.books.conversations("debug.jsonl", episodes, all_of_them=True)
        return episodes

    # ------------------------------------------------------------------ books

    def log(self, step: int, metrics: Mapping[str, float], kind: type[Measured] = StepEnded) -> None:
        """Write down numbers of a step or a validation."""
        self.books.log(step, {**metrics, **derived(metrics)}, kind)

    def staleness_is_at_most(self, updates: int | None) -> None:
        """What a backbone knows of its weights, said before it restores anything.

        :param updates: that weights may be behind when they generate; None: not known.
        """
        self.books.bus.publish(StalenessBounded(most=updates))

    def note(self, text: str) -> None:
        """Tell the person something."""
        self.books.note(text)

    def state(self) -> dict[str, Any]:
        """Everything but weights that a resumed run needs; JSON-serialisable."""
        ahead = self._ahead.under_way if self._ahead else ()
        return {
            "draws": self.sampler.state([*ahead, *self.elsewhere.under_way()]),
            "ledger": self.books.ledger.state(),
            **self.books.bus.state(),
        }

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after ``step``: draws, ledger, what subscribers count, and the folder's books cut back to it."""
        self.sampler.restore(state["draws"])
        self.books.ledger.restore(state["ledger"])
        self.books.resumed(step, state)

    def close(self) -> None:
        """Close the books and the event loop."""
        try:
            self.books.close()
            self._loop.run_until_complete(self.runner.close())
        finally:
            if left := asyncio.all_tasks(self._loop):  # of a run that was stopped at once
                for task in left:
                    task.cancel()
                self._loop.run_until_complete(asyncio.wait(left, timeout=2.0))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    # ---------------------------------------------------------------- private

    def _pool(
        self,
        models: Models | EpisodeHost,
        split: Split,
        on_episode: Callable[[Episode], None],
        max_parallel: int | None = None,
    ) -> RolloutPool:
        host = EpisodesHere(self.runner, models) if isinstance(models, Mapping) else models
        return RolloutPool(
            partial(host.run, sampling=sampling_for(self.config, split)),
            max_parallel=max_parallel or self.config.astuner.rollout.max_env_worker,
            on_episode=on_episode,
            comparison=Comparison.of(self.config.astuner),
            judge_group=lambda episodes: host.judge_group(episodes),
        )

    def _ended_ahead(self, episode: Episode) -> None:
        if episode.stop_reason is not StopReason.CANCELLED:  # the run is over, and nobody asked for this one yet
            self.books.episode(self._step_ahead, episode)

    async def _next_group(self, host: EpisodeHost) -> Group:
        if self._ahead is None or not self._ahead.under_way:
            self.begin(host, 1)
        assert self._ahead is not None  # just begun
        return await self._ahead.next_group()

    def _cut(self, episode: Episode) -> SampleSet:
        built = build_samples(episode, max_samples=self.config.astuner.rollout.multi_turn.max_sample_per_task)
        self.books.ledger.counts["dropped_paths"] += built.dropped_paths
        return built
