"""Rerun a recorded episode's workflow: recorded replies answer up to a turn, a model answers from there on.

The workflow receives the same task, episode ID and attempt, so values seeded from them are the same. Tools and
environments run again. Infrastructure failures are not retried, because a user inspects each fork.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from astuner import Config, EpisodeRunner, Models, ModelTuner, RunDir, sampling_for, write_jsonl
from astuner.contracts.errors import RunError
from astuner.contracts.messages import ChatReply
from astuner.contracts.statistics import mean, percent, wilson_interval
from astuner.contracts.types import Episode, StopReason, WorkflowOutput, WorkflowTask
from astuner_record.conversations import transcript
from astuner_record.episode_log import EpisodeLogWriter, LoggedEpisode
from astuner_record.replay import short
from astuner_record.replay.recording import (
    Divergence,
    Plan,
    Recording,
    first_difference,
    replay_outside,
    replaying,
)

OVERRIDES = ("astuner.rollout.max_retries=0",)
"""Overrides of every fork. User overrides take precedence."""
BY_HAND = "stopped by the user"
QUESTION = "[Enter] next  [b] breakpoint  [c] continue  [q] quit > "


def _say(text: str) -> None:
    print(text, flush=True)


@dataclass(kw_only=True)
class Stepping:
    """Interactive stops of one fork."""

    recording: Recording
    step: bool = False
    """Show every model call, and prompt before it."""
    break_at: int | None = None
    """Turn before which `breakpoint()` is called."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Serializes prompts, because agents may call models in several threads."""
    _seen: dict[str, int] = field(default_factory=dict)
    """Agent -> number of messages in its last request."""

    def watch(self, tuner: ModelTuner) -> None:
        """Intercept every model call of an episode."""
        chat: Callable[..., Coroutine[Any, Any, ChatReply]] = tuner.chat

        def watched(
            messages: Sequence[Mapping[str, Any]], tools: Any = None, **options: Any
        ) -> Coroutine[Any, Any, ChatReply]:
            agent = str(options.get("agent_name") or tuner.agent_name)
            self._before(agent, messages)
            return self._answered(agent, len(messages), chat(messages, tools, **options))

        setattr(tuner, "chat", watched)  # noqa: B010  # mypy takes no assignment to a method

    def _before(self, agent: str, messages: Sequence[Mapping[str, Any]]) -> None:
        turn = self.recording.next_turn
        stop = turn == self.break_at
        if self.step and not self.recording.stopped:
            with self._lock:
                stop = self._show_and_ask(agent, turn, messages) or stop
        if stop:
            self.break_at = None
            _say(f"before turn {turn} of {agent}: type `up` until you reach the workflow, and `c` to continue")
            breakpoint()  # requested with --pdb; PYTHONBREAKPOINT selects another debugger

    def _show_and_ask(self, agent: str, turn: int, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Show the new messages, and return whether the user requested a breakpoint."""
        expected = self.recording.expected(agent)
        answers = f"recorded turn {expected} answers" if expected is not None else "the model answers"
        _say(f"── turn {turn} of {agent}: {answers}")
        for message in messages[self._seen.get(agent, 0) :]:
            if message.get("role") != "assistant" or agent not in self._seen:
                _say(f"   {message.get('role', '?'):<9} {content_of(message)}")
        while True:
            try:
                typed = input(QUESTION).strip().lower()
            except EOFError:
                typed = "q"
            if typed in ("", "n"):
                return False
            if typed == "b":
                return True
            if typed == "c":
                self.step = False
                return False
            if typed == "q":
                self.recording.stop(BY_HAND)
                return False

    async def _answered(self, agent: str, messages: int, call: Coroutine[Any, Any, ChatReply]) -> ChatReply:
        reply = await call
        self._seen[agent] = messages
        self.recording.next_turn = max(self.recording.next_turn, reply.turn_index + 1)
        if self.step:
            recorded = self.recording.sources.get(agent)
            by = f"recorded turn {recorded}" if recorded is not None else "new"
            _say(f" ▶ {agent:<9} {content_of(reply.message)}   [{by}, {reply.completion_tokens} tokens]")
        return reply


def content_of(message: Mapping[str, Any]) -> str:
    """Format a message in one paragraph: its text and its tool calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = " ".join(str(part.get("text", f"<{part.get('type')}>")) for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return " ".join([content, *(f"{call['name']}({call['arguments']})" for call in calls)]).strip()


@dataclass(frozen=True, kw_only=True)
class Fork:
    """One rerun of the workflow."""

    episode: Episode
    """The episode, with a new ID."""
    divergences: tuple[Divergence, ...]
    given: tuple[int, ...]
    """Recorded turns that answered."""
    differs_from: int | None
    """First turn whose reply differs from the recorded one; None if all are equal."""
    stopped: str
    """Why the rerun was stopped before the workflow returned; empty otherwise."""
    notes: tuple[str, ...] = ()


async def run_forks(
    config: Config,
    episode: Episode,
    plan: Plan,
    models: Models,
    times: int = 1,
    *,
    on_fork: Callable[[Fork], None] = lambda fork: None,
) -> list[Fork]:
    """Rerun a recorded episode ``times`` times, up to ``rollout.max_env_worker`` concurrently.

    :param models: Models that answer from `Plan.from_turn` on.
    :param on_fork: Called with each fork when it ends.
    """
    gate = asyncio.Semaphore(config.astuner.rollout.max_env_worker)

    async def one(number: int) -> Fork:
        async with gate:
            fork = await _fork(config, episode, plan, models, number)
        on_fork(fork)
        return fork

    return list(await asyncio.gather(*(one(number) for number in range(1, times + 1))))


async def _fork(config: Config, recorded: Episode, plan: Plan, models: Models, number: int) -> Fork:
    recording = Recording(
        episode=recorded, plan=plan, decode=lambda policy, ids: models[policy].codec.template.decode(ids)
    )
    stepping = Stepping(recording=recording, step=plan.step, break_at=plan.break_at)

    def watch(tuner: ModelTuner) -> None:
        replay_outside(tuner, recording)
        stepping.watch(tuner)

    task = _as_read(config, recorded.workflow_task)
    runner = _WatchedRunner(config, watch)
    runner.prepare()
    try:
        episode = await runner.run(task, replaying(models, recording, number), sampling_for(config, task.split))
        if episode.is_open:  # a judge that compares attempts gets a group of one
            (episode,) = await runner.judge_group([episode])
    finally:
        await runner.close()
    recording.finish(episode.stop_reason)
    return Fork(
        episode=_named(episode, number, recording.stopped),
        divergences=tuple(recording.divergences),
        given=tuple(recording.given),
        differs_from=first_difference(recorded, episode),
        stopped=recording.stopped,
        notes=runner.notes(recorded),
    )


class _WatchedRunner(EpisodeRunner):
    """Episode runner that passes the model tuner to a callback before the workflow starts."""

    def __init__(self, config: Config, watch: Callable[[ModelTuner], None]) -> None:
        super().__init__(config)
        self._watch = watch
        self._tuner: ModelTuner | None = None

    async def _work(
        self, parts: Any, workflow_task: WorkflowTask, tuner: ModelTuner
    ) -> tuple[WorkflowOutput | None, StopReason | None, str]:
        self._tuner = tuner
        self._watch(tuner)
        return await super()._work(parts, workflow_task, tuner)

    def notes(self, recorded: Episode) -> tuple[str, ...]:
        """Return notes for the user in addition to divergences."""
        started = self._tuner.workflow_task.task if self._tuner is not None else None
        task = recorded.workflow_task.task
        if started is None or _plain(started.init_messages) == _plain(task.init_messages):
            return ()
        return (f"the environment {task.env_type!r} started with a different observation than in the recording",)


def _plain(messages: Any) -> Any:
    return json.loads(json.dumps(list(messages), default=dict))


def _as_read(config: Config, workflow_task: WorkflowTask) -> WorkflowTask:
    """Return the task as its reader provided it, without the first observation, which comes from the environment."""
    reference = config.astuner.task_reader.type
    reader = config.resolve("task reader", reference) if reference else None
    if not (inspect.isclass(reader) and getattr(reader, "environment_begins", False)):
        return workflow_task
    return replace(workflow_task, task=replace(workflow_task.task, init_messages=(), main_query=""))


def _named(episode: Episode, number: int, stopped: str) -> Episode:
    """Return the episode with a new ID and attempt number, to store it next to the original."""
    of, ended = episode.workflow_task, dict[str, Any]()
    if stopped:
        ended = {"stop_reason": StopReason.CANCELLED, "error": stopped, "verdict": None, "reward_source": ""}
    renamed = replace(of, episode_id=f"{of.episode_id}.fork{number}", attempt=number)
    return replace(episode, workflow_task=renamed, **ended)


def write_forks(
    run: RunDir, config: Config, original: LoggedEpisode, forks: Sequence[Fork], about: dict[str, Any], out: Path | None
) -> Path:
    """Write forks and their original to a new folder.

    :param about: Additional content for ``replay.json``.
    :param out: New folder. Default: a folder in ``replays/`` of the run.
    :returns: The folder.
    :raises RunError: The folder cannot be written.
    """
    folder = RunDir(out or _free(run.path / "replays", original.episode.workflow_task.episode_id))
    try:
        folder.episodes.mkdir(parents=True)
        RunDir.write_atomically(folder.resolved, config.dump_yaml())
        tokenizer = run.episodes / "tokenizer"
        if tokenizer.is_dir():
            shutil.copytree(tokenizer, folder.episodes / "tokenizer")
        episodes = [original.episode, *(fork.episode for fork in forks)]
        log = EpisodeLogWriter(folder.episodes)
        for episode in episodes:
            log.episode(original.step, episode)
        log.close()
        write_jsonl(folder.episodes / "replay.jsonl", map(transcript, episodes))
        folder.write_json(folder.path / "replay.json", {**about, "forks": [fork_row(fork) for fork in forks]})
    except OSError as e:
        raise RunError(f"Cannot write the forks to {folder.path}: {e}. Choose another folder: --out DIR") from e
    return folder.path


def fork_row(fork: Fork) -> dict[str, Any]:
    """Return a fork as a JSON object."""
    episode = fork.episode
    return {
        "episode_id": episode.workflow_task.episode_id,
        "reward": episode.reward,
        "is_success": episode.is_success,
        "stop_reason": episode.stop_reason.value,
        "error": episode.error,
        "turns": len(episode.turns),
        "tokens": sum(len(turn.generation.response_ids) for turn in episode.turns),
        "recorded_turns": list(fork.given),
        "differs_from_turn": fork.differs_from,
        "divergences": [asdict(d) for d in fork.divergences],
        "stopped": fork.stopped,
        "notes": list(fork.notes),
        "seconds": episode.seconds,
    }


def about_plan(run: RunDir, original: LoggedEpisode, plan: Plan, checkpoint: str) -> dict[str, Any]:
    """Return a description of the replay for ``replay.json``."""
    return {
        "format": 1,
        "run": str(run.path),
        "episode": original.episode.workflow_task.episode_id,
        "step": original.step,
        "from_turn": plan.from_turn,
        "to_turn": plan.to_turn,
        "checkpoint": checkpoint,
        "reward": original.episode.reward,
        "is_success": original.episode.is_success,
    }


def _free(parent: Path, episode_id: str) -> Path:
    safe = re.sub(r"[^\w.-]", "_", episode_id)
    stamp = f"{safe}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = itertools.chain([stamp], (f"{stamp}-{n}" for n in itertools.count(2)))
    return next(path for name in names if not (path := parent / name).exists())


def forks_text(original: Episode, forks: Sequence[Fork], from_turn: int) -> Iterator[str]:
    """Yield a table of the forks next to the original episode."""
    yield (
        f"episode {original.workflow_task.episode_id}, forked at turn {from_turn}: tools and environments ran again; "
        "only model replies came from the recording"
    )
    yield f"{'':<10}{'reward':>8}{'success':>9}{'turns':>7}{'recorded':>10}  differs from  ended"
    yield _row("original", original, "", "")
    for number, fork in enumerate(forks, start=1):
        differs = "nowhere" if fork.differs_from is None else f"turn {fork.differs_from}"
        yield _row(f"fork {number}", fork.episode, str(len(fork.given)), differs)
    scored = [fork.episode for fork in forks if fork.episode.reward is not None]
    if len(forks) > 1 and scored:
        rewards = [e.reward for e in scored if e.reward is not None]
        successes = sum(bool(e.is_success) for e in scored)
        low, high = wilson_interval(successes, len(scored))
        yield (
            f"{len(scored)} scored forks: mean reward {mean(rewards):.4g} ({min(rewards):.4g} to "
            f"{max(rewards):.4g}); success {percent(successes / len(scored), 1)} "
            f"[{percent(low, 1)}, {percent(high, 1)}]; original "
            f"{'no reward' if original.reward is None else f'{original.reward:.4g}'}"
        )
        for reward, n in sorted(Counter(rewards).items())[:20]:
            yield f"  {reward:>8.4g}  {n:>4}  {'█' * max(1, round(40 * n / len(rewards)))}"
    for number, fork in enumerate(forks, start=1):
        yield from (f"fork {number}: {note}" for note in fork.notes)
        yield from (f"fork {number} diverged: {divergence.said}" for divergence in fork.divergences)


def _row(name: str, episode: Episode, recorded: str, differs: str) -> str:
    reward = "none" if episode.reward is None else f"{episode.reward:.4g}"
    success = {None: "", True: "yes", False: "no"}[episode.is_success]
    turns = len(episode.turns) + len(episode.external)
    row = f"{name:<10}{reward:>8}{success:>9}{turns:>7}{recorded:>10}  {differs:<12}  {episode.stop_reason.value}"
    return f"{row}: {short(episode.error)}" if episode.error else row
