"""What a backbone drives: the tasks, the episodes, the credit and the books of one run.

A backbone's loop reads: draw and roll out, assign credit, update, log, validate, save.  Everything here is the same
for all backbones; everything about weights is theirs.  Its whole state fits in `Experiment.state`, which a backbone
saves with its weights, so that a resumed run draws, counts and logs exactly as if it had never stopped.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.errors import DataError, Interrupted, RunError
from astuner.interrupt import Interrupt
from astuner.log_sink import LogSink
from astuner.rollout.credit import Scored, assign_credit
from astuner.rollout.evaluation import Evaluation, evaluate_groups
from astuner.rollout.ledger import FailureLedger
from astuner.rollout.metrics import Metrics, rollout_metrics, sample_metrics
from astuner.rollout.parts import build_task_reader
from astuner.rollout.pool import Group, RolloutPool
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.sampler import TaskSampler
from astuner.rollout.samples import build_samples
from astuner.rollout.transcript import transcript
from astuner.run_dir import RunDir
from astuner.types import Episode, Sample, SamplingParams, Split, Task, WorkflowTask

if TYPE_CHECKING:
    from astuner.backbone import InferenceEngine
    from astuner.chat.codec import ChatCodec
    from astuner.config import Config

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
        *,
        sinks: Sequence[LogSink] = (),
        interrupt: Interrupt | None = None,
        disabled_plugins: Sequence[str] = (),
        resume_from: Path | None = None,
    ) -> None:
        self.config = config
        self.run_dir = run_dir
        self.interrupt = interrupt or Interrupt()
        self.resume_from = resume_from
        """The newest saved state, or None for a fresh start. A backbone loads weights from it, then calls `restore`."""
        self.runner = EpisodeRunner(config, disabled_plugins=disabled_plugins)
        self.runner.prepare()
        self.reader = build_task_reader(config, disabled_plugins)
        self.ledger = FailureLedger(run_dir.failures)
        self.sampler = TaskSampler(
            self._read(Split.TRAIN), seed=config.astuner.seed, shuffle=config.astuner.data.shuffle
        )
        self.validation_tasks = self._read(Split.VALIDATION)[: config.astuner.data.max_validation_tasks]
        self.ledger.counts["skipped_data"] = len(getattr(self.reader, "skipped", ()))
        self._sinks = list(sinks)
        self._loop = asyncio.new_event_loop()
        self._barren_steps = 0

    # ------------------------------------------------------------------ steps

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: `total_epochs` over the tasks, or fewer if `total_steps` says so."""
        common, data = self.config.astuner.trainer_common, self.config.astuner.data
        steps = math.ceil(common.total_epochs * self.sampler.tasks / data.train_batch_size)
        return min(steps, common.total_steps or steps)

    def steps(self, done: int) -> Iterator[int]:
        """The numbers of the steps still to do, 1-based; ends early, by raising, when the person asked to stop."""
        for step in range(done + 1, self.total_steps + 1):
            self.check_interrupt()
            yield step

    def check_interrupt(self) -> None:
        """:raises Interrupted: the person asked to stop."""
        if self.interrupt.requested:
            raise Interrupted("stopped on request; continue with --resume")

    def is_due(self, what: str, step: int) -> bool:
        """Whether ``save``, ``test`` or ``resume`` happens after ``step``; the last step always does all three."""
        every: int = getattr(self.config.astuner.trainer_common, f"{what}_freq")
        return step % every == 0 or step == self.total_steps

    # --------------------------------------------------------------- episodes

    def rollout(self, engine: InferenceEngine, codec: ChatCodec, step: int) -> StepRollout:
        """Run one step's episodes and cut them into samples.

        :raises RunError: more episodes failed than `rollout.max_failed_share` allows.
        """
        started = time.perf_counter()
        a = self.config.astuner
        groups: list[Group] = []
        useful: list[Group] = []
        for _ in range(a.trainer_common.algorithm.max_draws if a.trainer_common.algorithm.dynamic_sampling else 1):
            wanted = a.data.train_batch_size - len(useful)
            draws = self.sampler.draw(math.ceil(wanted * a.rollout.oversample))
            groups += self._run(
                self._pool(
                    engine, codec, step, self.train_sampling(codec), len(draws) * a.rollout.num_repeat
                ).run_groups(
                    draws,
                    repeat=a.rollout.num_repeat,
                    split=Split.TRAIN,
                    needed=wanted if a.rollout.oversample > 1 else None,
                    min_scored=a.rollout.min_group_size,
                )
            )
            useful = self._trainable(groups)
            if len(useful) >= a.data.train_batch_size:
                break
        for group in groups:
            if group not in useful and len(group.scored) < a.rollout.min_group_size:
                reason = f"{len(group.scored)} of {len(group.episodes)} episodes were scored"
                self.ledger.dropped_group(step, group.group_id, reason)
        self._check_failures(step, groups)
        kept = useful[: a.data.train_batch_size]
        scored = [self._cut(e) for g in kept for e in g.scored]
        self._write_episodes(f"step_{step:06d}.jsonl", [e for g in groups for e in g.episodes])
        return StepRollout(
            step=step,
            groups=tuple(kept),
            scored=tuple(scored),
            metrics=rollout_metrics(groups),
            seconds=time.perf_counter() - started,
        )

    def credit(
        self, rollout: StepRollout, *, policy_version: int, penalties: Mapping[str, float] | None = None
    ) -> tuple[list[Sample], Metrics]:
        """Samples with advantages and token weights, and what they look like."""
        a = self.config.astuner
        samples = assign_credit(
            rollout.scored,
            a.trainer_common.algorithm,
            constant_length=a.data.max_response_length or a.rollout.max_response_length_in_one_turn,
            penalties=penalties,
        )
        return samples, sample_metrics(samples, len(rollout.scored), policy_version)

    def validate(self, engine: InferenceEngine, codec: ChatCodec, step: int) -> Evaluation | None:
        """Measure the policy on all validation tasks; None when there are none."""
        if not self.validation_tasks:
            return None
        started = time.perf_counter()
        repeat = self.config.astuner.rollout.val_kwargs.num_repeat
        draws = [(f"v{step:06d}-{i:05d}", task) for i, task in enumerate(self.validation_tasks)]
        pool = self._pool(engine, codec, step, self.validation_sampling(codec), len(draws) * repeat, "validation")
        groups = self._run(pool.run_groups(draws, repeat=repeat, split=Split.VALIDATION))
        self._write_episodes(f"validation_{step:06d}.jsonl", [e for g in groups for e in g.episodes], limit=None)
        evaluation = evaluate_groups(groups, repeat=repeat)
        if not evaluation.tasks:
            raise RunError(
                f"validation at step {step}: no episode could be scored; the reasons are in {self.run_dir.failures}"
            )
        self.log(step, {**evaluation.metrics(), "time/validation": time.perf_counter() - started})
        return evaluation

    def try_out(self, engine: InferenceEngine, codec: ChatCodec, *, tasks: int, max_parallel: int) -> list[Episode]:
        """One episode of each of the first training tasks, for looking at; nothing is trained or dropped."""
        draws = self.sampler.first(tasks)
        pool = self._pool(engine, codec, 0, self.train_sampling(codec), len(draws), max_parallel=max_parallel)
        groups = self._run(pool.run_groups(draws, repeat=1, split=Split.TRAIN))
        episodes = [e for g in groups for e in g.episodes]
        self._write_episodes("debug.jsonl", episodes, limit=None)
        return episodes

    def train_sampling(self, codec: ChatCodec) -> SamplingParams:
        r = self.config.astuner.rollout
        return SamplingParams(
            max_tokens=r.max_response_length_in_one_turn,
            temperature=r.temperature,
            top_p=r.top_p,
            top_k=r.top_k,
            stop_token_ids=codec.stop_token_ids,
        )

    def validation_sampling(self, codec: ChatCodec) -> SamplingParams:
        r = self.config.astuner.rollout
        return SamplingParams(
            max_tokens=r.max_response_length_in_one_turn,
            temperature=r.val_kwargs.temperature,
            top_p=r.val_kwargs.top_p,
            top_k=r.val_kwargs.top_k,
            stop_token_ids=codec.stop_token_ids,
        )

    # ------------------------------------------------------------------ books

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand numbers to every log sink."""
        self._tell(lambda sink: sink.step(step, metrics))

    def note(self, text: str) -> None:
        """Tell the person something."""
        self._tell(lambda sink: sink.note(text))

    def watch_learning(self, step: int, samples: Sequence[Sample], *, patience: int = 5) -> None:
        """Say loudly when there is nothing to learn from ``patience`` steps in a row: equal rewards in every group.

        A single such step is ordinary in small batches; its share is the metric ``adv/zero_group_frac``.
        """
        if any(s.advantage for s in samples):
            self._barren_steps = 0
            return
        self._barren_steps += 1
        if self._barren_steps % patience == 0:
            rewards = {round(s.reward, 6) for s in samples}
            what = (
                f"all rewards are {rewards.pop():g}" if len(rewards) == 1 else "all rewards within each group are equal"
            )
            self.note(
                f"step {step}: nothing to learn from in {self._barren_steps} steps, {what}; look at "
                f"{self.run_dir.episodes}, then at the judge, the temperature, or tasks of another difficulty"
            )

    def state(self) -> dict[str, Any]:
        """Everything but weights that a resumed run needs; JSON-serialisable."""
        return {"position": self.sampler.position, "ledger": self.ledger.state()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        """Continue after ``step``: position in the data, ledger, and the metrics file cut back to that step."""
        self.sampler.position = state["position"]
        self.ledger.restore(state["ledger"])
        self.run_dir.rewind(step)

    def close(self) -> None:
        """Close sinks and the event loop."""
        self._tell(lambda sink: sink.close())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    # ---------------------------------------------------------------- private

    def _read(self, split: Split) -> list[Task]:
        tasks = list(self.reader.read(split))
        for task in tasks:
            if not isinstance(task, Task):
                raise DataError(
                    f"the task reader {type(self.reader).__name__} yielded {task!r}; it must yield astuner.Task"
                )
        return tasks

    def _pool(
        self,
        engine: InferenceEngine,
        codec: ChatCodec,
        step: int,
        sampling: SamplingParams,
        total: int,
        what: str = "rollout",
        max_parallel: int | None = None,
    ) -> RolloutPool:
        done = 0

        def ended(episode: Episode) -> None:
            nonlocal done
            done += 1
            self.ledger.episode(step, episode)
            self._tell(lambda sink: sink.episode(step, episode))
            self._tell(lambda sink: sink.progress(step, self.total_steps, done, total, what))

        async def run(workflow_task: WorkflowTask) -> Episode:
            return await self.runner.run(workflow_task, engine, codec, sampling)

        workers = max_parallel or self.config.astuner.rollout.max_env_worker
        return RolloutPool(run, max_parallel=workers, on_episode=ended)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the run's own loop; an interrupt cancels it and becomes `Interrupted`."""
        task = self._loop.create_task(work)

        def cancel() -> None:
            self._loop.call_soon_threadsafe(task.cancel)

        with self.interrupt.cancels(cancel):
            try:
                return self._loop.run_until_complete(task)
            except asyncio.CancelledError:
                self.check_interrupt()
                raise

    def _trainable(self, groups: Sequence[Group]) -> list[Group]:
        rollout, algorithm = self.config.astuner.rollout, self.config.astuner.trainer_common.algorithm
        enough = [g for g in groups if len(g.scored) >= min(rollout.min_group_size, rollout.num_repeat)]
        if algorithm.dynamic_sampling:
            return [g for g in enough if len({e.reward for e in g.scored}) > 1]
        return enough

    def _cut(self, episode: Episode) -> Scored:
        built = build_samples(episode, max_samples=self.config.astuner.rollout.multi_turn.max_sample_per_task)
        self.ledger.counts["dropped_paths"] += built.dropped_paths
        assert episode.reward is not None  # a scored episode
        return Scored(
            episode_id=episode.workflow_task.episode_id,
            group_id=episode.workflow_task.group_id,
            reward=episode.reward,
            samples=built.samples,
        )

    def _check_failures(self, step: int, groups: Sequence[Group]) -> None:
        episodes = [e for g in groups for e in g.episodes]
        failed = [e for e in episodes if e.reward is None and e.stop_reason.value != "cancelled"]
        limit = self.config.astuner.rollout.max_failed_share
        if episodes and len(failed) / len(episodes) > limit:
            raise RunError(
                f"step {step}: {len(failed)} of {len(episodes)} episodes failed (more than rollout.max_failed_share = "
                f"{limit:g}); the first one: {failed[0].stop_reason.value}: {failed[0].error or 'no message'}; "
                f"all are in {self.run_dir.failures}"
            )

    def _write_episodes(self, name: str, episodes: Sequence[Episode], limit: int | None = -1) -> None:
        if limit == -1:
            most = self.config.astuner.trainer_common.save_episodes
            limit = None if most == -1 else most
        lines = [json.dumps(transcript(e), ensure_ascii=False, default=str) + "\n" for e in episodes[:limit]]
        if lines:
            (self.run_dir.episodes / name).write_text("".join(lines), encoding="utf-8")

    def _tell(self, tell: Callable[[LogSink], None]) -> None:
        """A sink that raises is reported once and left out."""
        for sink in list(self._sinks):
            try:
                tell(sink)
            except Exception as e:
                self._sinks.remove(sink)
                self.note(
                    f"the log sink {type(sink).__name__} failed and is left out from now on: {type(e).__name__}: {e}"
                )
