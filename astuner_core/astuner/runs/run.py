"""One run: the object that a backbone drives (`astuner.contracts.run.Run`), with its files and events.

`TrainingRun.state` is the complete state of the run. A backbone saves it with the weights, so a resumed run draws,
counts and logs exactly as if it had never stopped. If the run folder's own files cannot be written, the run ends.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.errors import Interrupted
from astuner.contracts.events import (
    EpisodeEnded,
    Event,
    GroupsEnded,
    Measured,
    Note,
    Progressed,
    RolledOut,
    RunContext,
    RunEnded,
    RunResumed,
    RunStarted,
    SamplesCredited,
    Subscriber,
    Summary,
    ValidationEnded,
)
from astuner.contracts.interrupt import Interrupt, let_the_person_stop
from astuner.contracts.types import Episode, Sample, Split, StopReason
from astuner.contracts.validation import TaskResult, task_keys
from astuner.rollout.credit import Comparison, Penalties, Scored, assign_credit, estimator_of
from astuner.rollout.metrics import (
    Evaluation,
    Metrics,
    check_failures,
    derived,
    evaluate_groups,
    rollout_metrics,
    sample_metrics,
)
from astuner.rollout.models import AgentRegistry, EpisodesHere, sampling_for
from astuner.rollout.pool import Draw, Ending, Group, RolloutPool, RunningGroups, StepGroups, StepRollout
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.threads import end_loop, watching
from astuner.rollout.turns import SampleSet, build_samples
from astuner.runs.bus import Bus
from astuner.runs.clock import RunClock, Schedule
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import TaskSampler, TaskSet, planned_steps
from astuner.support.json_lines import append_jsonl, read_jsonl

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.rollout.models import EpisodeHost, Models


class FailureLedger:
    """Count how each episode of a run ended and which data was dropped, and record failures.

    Invariant: an infrastructure failure never becomes a reward; it becomes an entry here. Counts survive a resume.
    Entries are appended to ``failures.jsonl`` in the run folder as they occur.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.counts: Counter[str] = Counter()
        """Stop reason -> episodes (with the prefix ``validation/`` for validation), and ``retries``,
        ``dropped_groups``, ``dropped_paths`` and ``skipped_data``."""

    def episode(self, step: int, episode: Episode) -> None:
        """Count how an episode ended, and record it if it is not scored."""
        of = "validation/" if episode.workflow_task.split is Split.VALIDATION else ""
        self.counts[of + episode.stop_reason.value] += 1
        self.counts["retries"] += episode.retries
        if not episode.stop_reason.is_scored:
            self._write(
                {
                    "step": step,
                    "episode_id": episode.workflow_task.episode_id,
                    "task_id": episode.workflow_task.task.task_id,
                    "stop_reason": episode.stop_reason.value,
                    "error": episode.error,
                    "turns": len(episode.turns),
                    "seconds": round(episode.seconds, 3),
                }
            )

    def dropped_group(self, step: int, group_id: str, reason: str) -> None:
        """Count a group that cannot be trained on."""
        self.counts["dropped_groups"] += 1
        self._write({"step": step, "group_id": group_id, "dropped": reason})

    def skipped_data(self, skipped: Mapping[str, str]) -> None:
        """Count and record the lines of the data that could not be read (place -> reason)."""
        self.counts["skipped_data"] = len(skipped)
        for place, reason in skipped.items():
            self._write({"skipped": place, "error": reason})

    def _write(self, entry: Mapping[str, Any]) -> None:
        if self._path is not None:
            append_jsonl(self._path, entry)

    def state(self) -> dict[str, int]:
        return dict(self.counts)

    def restore(self, state: Mapping[str, int]) -> None:
        self.counts = Counter(state)


T = TypeVar("T")


class RunWriter:
    """Files and events of a run, independent of what drives it."""

    def __init__(
        self,
        config: Config,
        run_dir: RunDir,
        sinks: Sequence[Subscriber] = (),
        *,
        total_steps: int,
        policies: Sequence[str] = (),
        resume_command: str = "",
        trains: bool = True,
        clock: RunClock | None = None,
    ) -> None:
        """Create the files' objects and publish the start of the run.

        :param sinks: Subscribers in addition to those of plugins.
        :param policies: Trained policies, if the run distinguishes several.
        :param resume_command: Command that resumes the run, for messages.
        :param clock: Estimates the remaining time.
        """
        self.config = config
        self.run_dir = run_dir
        self.total_steps = total_steps
        self._clock = clock or RunClock(Schedule.of(config, steps=total_steps, validation_tasks=0))
        self.ledger = FailureLedger(run_dir.failures)
        self.bus = Bus()
        context = RunContext(
            config=config,
            run_dir=run_dir.path,
            policies=policies,
            trains=trains,
            publish=self.bus.publish,
            stop=self.bus.stop,
            resume_command=resume_command,
        )
        self.bus.subscribe(sinks)
        for kind in subscribers(config):
            self.bus.subscribe(kind.for_run(context))
        self.publish(RunStarted(run_dir=run_dir.path, name=config.experiment_name, settings=config.as_dict()))
        self.progress(0, "starting")

    def publish(self, event: Event) -> None:
        """See `astuner.contracts.run.Run.publish`."""
        if phase := self._clock.observe(event):
            self.progress(getattr(event, "step", 0), phase)
        if isinstance(event, Progressed):
            event = self._clock.progress(event)
        elif isinstance(event, Measured):
            metrics = {**event.metrics, **derived(event.metrics), **self.bus.numbers()}
            event = replace(event, metrics=metrics, remaining=self._clock.remaining())
        elif isinstance(event, EpisodeEnded):
            self.ledger.episode(event.step, event.episode)
        self.bus.publish(event)

    def note(self, text: str) -> None:
        """Publish a note for the user."""
        self.publish(Note(text=text))

    def progress(self, step: int, phase: str, done: int = 0, total: int = 0) -> None:
        self.publish(Progressed(step=step, total_steps=self.total_steps, done=done, total=total, what=phase))

    def listener(self, step: int, phase: str, total: Callable[[], int]) -> Callable[[Episode], None]:
        """Publish the start of a phase of ``total`` episodes, and return a callback for each of them."""
        done = itertools.count(1)
        self.progress(step, phase, 0, total())

        def ended(episode: Episode) -> None:
            self.publish(EpisodeEnded(step=step, episode=episode))
            self.progress(step, phase, next(done), total())

        return ended

    def ended(self, error: BaseException | None = None) -> list[Summary]:
        """Publish that training ended, and return the subscribers' summaries unless ``error`` ended the run."""
        self.publish(RunEnded(endings=dict(self.ledger.counts), error=error))
        return [] if error is not None else self.bus.summaries()

    def close(self) -> None:
        """Write everything that is pending, except events that a tracker did not accept in time.

        :raises OSError: A file could not be written, and this was not raised before.
        """
        self.bus.close()


class TrainingRun(RunWriter):
    """One run of one config; `astuner.contracts.run.Run` documents the interface for backbones."""

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
        resume_command: str = "",
        trains: bool = True,
        clock: RunClock | None = None,
    ) -> None:
        """Prepare the run.

        :param sinks: Subscribers in addition to those of plugins.
        :param resume_command: Command that resumes the run, for messages.
        :param trains: False for a run that only tries out episodes.
        :param clock: Estimates the remaining time, if the run trains.
        """
        self.interrupt = interrupt or Interrupt()
        self.resume_from = resume_from
        self.runner = runner or EpisodeRunner(config)
        self.runner.prepare()
        self.sampler = TaskSampler(tasks.train, seed=config.astuner.seed, shuffle=config.astuner.data.shuffle)
        self.validation_tasks = tasks.validation
        self._validation_keys = task_keys(tasks.validation)
        agents = AgentRegistry.of(config.astuner)
        self._told_apart = agents.trained_policies if len(agents.policies) > 1 else ()
        """Policies that have separate metrics."""
        super().__init__(
            config,
            run_dir,
            sinks,
            total_steps=planned_steps(config, len(tasks.train)) if trains else 0,
            policies=self._told_apart,
            resume_command=resume_command,
            trains=trains,
            clock=clock,
        )
        if tasks.skipped:
            self.ledger.skipped_data(tasks.skipped)
            place, reason = next(iter(tasks.skipped.items()))
            self.note(
                f"skipped {len(tasks.skipped)} unreadable lines of the data (data.on_bad_line: skip); all are listed "
                f"in {run_dir.failures}. First: {place}: {reason}"
            )
        self._loop = asyncio.new_event_loop()
        self._ahead: RunningGroups | None = None
        """Groups started by `prefetch`; None if it was never called."""
        self._steps: dict[int, StepGroups] = {}
        """Steps whose groups run elsewhere, until they are taken."""
        self._validations: dict[int, StepGroups] = {}
        """Validations whose groups run elsewhere."""
        self._step_ahead = 1
        """Step that prefetched episodes count for: the next one to be taken."""

    # ------------------------------------------------------------------ steps

    def check_stop(self) -> None:
        if self.interrupt.requested:
            raise Interrupted("stopped on request")
        self.bus.check_stop()

    def is_due(self, what: str, step: int) -> bool:
        every: int = getattr(self.config.astuner.trainer_common, f"{what}_freq")
        if step % every and step != self.total_steps:
            return False
        return what != "test" or (bool(self.validation_tasks) and not self._was_validated(step))

    def _was_validated(self, step: int) -> bool:
        """Return whether the folder already has a validation of ``step``, from before a resume."""
        return any(row["step"] == step and "val/success" in row for row in self.run_dir.read_metrics())

    def _drive(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the run's own event loop.

        :raises Interrupted: The user stopped the run; ``work`` was cancelled.
        """
        task = self._loop.create_task(work)

        def cancel() -> None:
            self._loop.call_soon_threadsafe(task.cancel)

        limit = self.config.astuner.rollout.episode_timeout
        with self.interrupt.cancels(cancel), watching(self._loop, limit, self.note):
            while True:
                try:
                    return self._loop.run_until_complete(task)
                except asyncio.CancelledError:
                    self.check_stop()
                    raise
                except (SystemExit, KeyboardInterrupt) as e:
                    # For a task started by user code, asyncio raises in the awaiting code and also stops the loop.
                    let_the_person_stop(e)
                    if task.done():
                        raise

    # --------------------------------------------------------------- episodes

    def rollout(self, models: Models | EpisodeHost, step: int) -> StepRollout:
        a = self.config.astuner
        of = self._step_groups(step)
        if self._ahead is not None:
            self._step_ahead = step
            self.progress(step, "groups", 0, of.size)
            of.most, of.made = of.size * a.trainer_common.algorithm.max_draws, of.size
            self._drive(self._collect(of, self._ahead))
            self._step_ahead = step + 1
            return self._made(of, of.ended, list(of.useful.values()))
        draws = self._first_draws(of)
        ended = self.listener(step, "rollout", lambda: of.made * a.rollout.num_repeat)
        running = self._running(models, ended)
        cut = self._drive(self._collect(of, running, draws))
        self.sampler.give_back(g.group_id for g in cut if not g.complete)
        kept = [of.useful[name] for name in sorted(of.useful)]  # in drawing order
        return self._made(of, [*of.ended, *cut], kept[: of.size])

    async def _collect(
        self, of: StepGroups, running: RunningGroups, draws: Sequence[Draw] | None = None
    ) -> list[Group]:
        """Run the groups of a step until the batch is complete, and replace groups that cannot be trained on.

        :param draws: Draws to start with; those left when the batch is complete are cancelled. None: use prefetched
            groups, which keep running for later steps.
        :returns: Groups that were cancelled, or ended too late.
        """
        running.begin(draws or ())
        cut: list[Group] = []
        try:
            while not of.is_whole and (running.under_way if draws else len(of.ended) < of.made):
                if not running.under_way:
                    running.begin(self.sampler.draw(1))
                ending = self._ended(of, await running.next_group())
                if ending.instead is not None:
                    self._check_not_broken(of)
                    running.begin([ending.instead])
                if draws is None and ending.kept:
                    self.progress(of.step, "groups", len(of.useful), of.size)
        finally:
            if draws is not None:
                cut = await running.stop()
        return cut

    def prefetch(self, host: EpisodeHost, groups: int) -> None:
        if not groups:
            if self._ahead is not None:
                self.sampler.give_back(self._ahead.under_way)
                self._loop.run_until_complete(self._ahead.stop())
            return
        if self._ahead is None:
            self._ahead = self._running(host, self._ended_ahead)
        if (more := groups - len(self._ahead.under_way)) > 0:
            self._ahead.begin(self.sampler.draw(more))

    def draw(self, step: int, split: Split = Split.TRAIN) -> list[Draw]:
        if split is Split.VALIDATION:
            draws = self._validation_draws(step)
            self._validations[step] = StepGroups(step=step, size=len(draws), most=len(draws))
            self._validations[step].drawn(draws)
            self.progress(step, "validation", 0, len(draws))
            return draws
        of = self._steps[step] = self._step_groups(step)
        self.progress(step, "groups", 0, of.size)
        return self._first_draws(of)

    def end(self, step: int, group: Group) -> Ending:
        validates = step in self._validations and group.group_id in self._validations[step].out
        of = self._validations[step] if validates else self._steps.get(step)
        if of is None or group.group_id not in of.out:
            raise LookupError(f"group {group.group_id} of step {step}")
        if not validates:
            ending = self._ended(of, group)
            self._check_not_broken(of)
            self.progress(step, "groups", min(len(of.useful), of.size), of.size)
            return ending
        ending = of.end(group, is_useful=True, draw=lambda: self.sampler.draw(1)[0])
        self.progress(step, "validation", len(of.ended), of.size)
        if not of.out:
            del self._validations[step]
            by_id = {g.group_id: g for g in of.ended}
            self._validated(step, [by_id[name] for name in sorted(by_id)], of.began)
        return ending

    def take(self, step: int, group_ids: Collection[str]) -> StepRollout:
        of = self._steps.pop(step)
        kept = [of.useful[i] for i in group_ids if i in of.useful]
        late = {*of.out, *of.useful} - {g.group_id for g in kept}
        self.sampler.give_back(sorted(late))
        return self._made(of, [g for g in of.ended if g.group_id not in late], kept)

    def _step_groups(self, step: int) -> StepGroups:
        """Return a step without draws."""
        a = self.config.astuner
        algorithm = a.trainer_common.algorithm
        first = math.ceil(a.data.train_batch_size * a.rollout.oversample)
        most = first * (algorithm.max_draws if algorithm.dynamic_sampling else 1)
        return StepGroups(step=step, size=a.data.train_batch_size, most=most)

    def _first_draws(self, of: StepGroups) -> list[Draw]:
        draws = self.sampler.draw(math.ceil(of.size * self.config.astuner.rollout.oversample))
        of.drawn(draws)
        return draws

    def _ended(self, of: StepGroups, group: Group) -> Ending:
        useful = group.complete and self._is_useful(group)
        return of.end(group, is_useful=useful, draw=lambda: self.sampler.draw(1)[0])

    def _check_not_broken(self, of: StepGroups) -> None:
        """Check for failures as soon as one batch of groups is useless, so a broken environment ends the run."""
        if len(of.ended) - len(of.useful) >= of.size:
            self._check_failures(of.step, of.ended)

    def _is_useful(self, group: Group) -> bool:
        """Return whether a complete group can be trained on; with dynamic sampling its rewards must differ (DAPO)."""
        if len(group.scored) < self.config.astuner.rollout.min_group_size:
            return False
        return group.has_spread or not self.config.astuner.trainer_common.algorithm.dynamic_sampling

    def _made(self, of: StepGroups, drawn: Sequence[Group], kept: Sequence[Group]) -> StepRollout:
        """Publish a step's batch and return it.

        :param drawn: All groups that ended, including cancelled ones.
        :param kept: The groups to train on.
        """
        step = of.step
        groups = sorted((g for g in drawn if g.complete), key=lambda g: g.group_id)  # in drawing order
        self._groups_ended(step, Split.TRAIN, groups)
        for group in groups:
            if len(group.scored) < self.config.astuner.rollout.min_group_size:
                reason = f"{len(group.scored)} of {len(group.episodes)} episodes were scored"
                self.ledger.dropped_group(step, group.group_id, reason)
        self._check_failures(step, groups)
        samples = {e.workflow_task.episode_id: self._cut(e).samples for g in kept for e in g.scored}
        self.publish(RolledOut(step=step, episodes=[e for g in drawn for e in g.episodes], samples=samples))
        return StepRollout(
            step=step,
            groups=tuple(kept),
            scored=tuple(
                Scored.of(e, samples[e.workflow_task.episode_id], agents_named=g.comparison.agents_named)
                for g in kept
                for e in g.scored
            ),
            metrics=rollout_metrics(groups, self.config.astuner),
            seconds=time.perf_counter() - of.began,
        )

    def _groups_ended(self, step: int, split: Split, groups: Sequence[Group]) -> None:
        self.publish(GroupsEnded(step=step, split=split, episodes=[e for g in groups for e in g.episodes]))

    def _cut(self, episode: Episode) -> SampleSet:
        built = build_samples(episode, max_samples=self.config.astuner.rollout.multi_turn.max_sample_per_task)
        self.ledger.counts["dropped_paths"] += built.dropped_paths
        return built

    def _check_failures(self, step: int, groups: Sequence[Group]) -> None:
        """Check the share of failed episodes.

        :raises RunError: More episodes failed than `rollout.max_failed_share` allows, or none called the model.
        """
        check_failures(step, groups, self.config.astuner.rollout.max_failed_share, self.run_dir.failures)

    def credit(
        self, rollout: StepRollout, *, policy_version: int, penalties: Penalties | None = None
    ) -> tuple[list[Sample], Metrics]:
        a = self.config.astuner
        samples = assign_credit(
            rollout.scored,
            a.trainer_common.algorithm,
            constant_length=a.data.max_response_length or a.rollout.max_response_length_in_one_turn,
            penalties=penalties,
            estimator=estimator_of(self.config),
        )
        self.publish(SamplesCredited(step=rollout.step, samples=samples))
        return samples, sample_metrics(samples, len(rollout.scored), policy_version, self._told_apart)

    def validate(self, models: Models | EpisodeHost, step: int) -> Evaluation | None:
        if not self.validation_tasks:
            return None
        started = time.perf_counter()
        repeat = self.config.astuner.rollout.val_kwargs.num_repeat
        ended = self.listener(step, "validation", lambda: len(self.validation_tasks) * repeat)
        pool = self._pool(models, Split.VALIDATION, ended)
        draws = self._validation_draws(step)
        groups = self._drive(pool.run_groups(draws, repeat=repeat, split=Split.VALIDATION))
        return self._validated(step, groups, started)

    def _validation_draws(self, step: int) -> list[Draw]:
        return [(f"v{step:06d}-{i:05d}", task) for i, task in enumerate(self.validation_tasks)]

    def _validated(self, step: int, groups: Sequence[Group], started: float) -> Evaluation:
        """Publish the result of a validation.

        :param groups: One per task, in the order of the tasks.
        :param started: Start of the first group, from `time.perf_counter`.
        :raises RunError: More episodes failed than `rollout.max_failed_share` allows.
        """
        rollout = self.config.astuner.rollout
        self._groups_ended(step, Split.VALIDATION, groups)
        evaluation = evaluate_groups(
            groups,
            repeat=rollout.val_kwargs.num_repeat,
            max_failed_share=rollout.max_failed_share,
            failures=self.run_dir.failures,
        )
        found = zip(self._validation_keys, (TaskResult.of(group.episodes) for group in groups), strict=True)
        self.run_dir.write_task_results(step, {key: result for key, result in found if result is not None})
        measured = {**evaluation.metrics(), "time/validation": time.perf_counter() - started}
        validated = {k: n for k, n in self.ledger.counts.items() if k.startswith("validation/")}
        append_jsonl(self.run_dir.validated, {"step": step, "ledger": validated})  # the saved state may be older
        self.publish(ValidationEnded(step=step, metrics=measured))
        return evaluation

    def try_out(self, models: Models, *, tasks: int, max_parallel: int) -> list[Episode]:
        draws = self.sampler.first(tasks)
        ended = self.listener(0, "rollout", lambda: len(draws))
        pool = self._pool(models, Split.TRAIN, ended, max_parallel)
        groups = self._drive(pool.run_groups(draws, repeat=1, split=Split.TRAIN))
        self._groups_ended(0, Split.TRAIN, groups)
        return [e for g in groups for e in g.episodes]

    def _ended_ahead(self, episode: Episode) -> None:
        if episode.stop_reason is not StopReason.CANCELLED:  # cancelled at the end of the run, and not part of a step
            self.publish(EpisodeEnded(step=self._step_ahead, episode=episode))

    def _running(self, models: Models | EpisodeHost, on_episode: Callable[[Episode], None]) -> RunningGroups:
        """Return training groups that start when they are added."""
        pool, repeat = self._pool(models, Split.TRAIN, on_episode), self.config.astuner.rollout.num_repeat
        return RunningGroups(pool, repeat=repeat, split=Split.TRAIN, loop=self._loop)

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

    # ------------------------------------------------------- state and its end

    def state(self) -> dict[str, Any]:
        under_way = [*(self._ahead.under_way if self._ahead else ())]
        for of in self._steps.values():
            under_way += sorted({*of.out, *of.useful})
        return {"draws": self.sampler.state(under_way), "ledger": self.ledger.state(), **self.bus.state()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self.sampler.restore(state["draws"])
        self.ledger.restore(state["ledger"])
        self.run_dir.rewind(step)
        if self._was_validated(step):
            for row in read_jsonl(self.run_dir.validated):
                self.ledger.counts |= Counter(row["ledger"])  # the maximum of both: counts only grow
        self.bus.go_on()
        self.publish(RunResumed(step=step, state=state))

    def close(self) -> None:
        """Close the files as `RunWriter.close` does, then the runner and the event loop."""
        try:
            super().close()
            self._loop.run_until_complete(self.runner.close())
        finally:
            end_loop(self._loop, 2.0)  # tasks may remain if the run was stopped immediately


def subscribers(config: Config) -> list[type[Subscriber]]:
    """Return the subscribers that plugins add to every run."""
    offers = config.plugins.offers("subscriber")
    return [config.resolve("subscriber", f"{plugin.name}/{name}") for plugin, name, _ in offers]
