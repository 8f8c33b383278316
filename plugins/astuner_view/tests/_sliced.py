"""Runs with slices, alarms and a certificate, and runs that are running."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from astuner import RunDir
from astuner.contracts.types import Episode, JudgeOutput, Split, StopReason
from astuner.contracts.validation import TaskResult

from ._runs import add_metrics, byte_tokenizer, credited, episode, make_run, write_log

LAYOUTS = ("one column", "two columns", "scanned")
TASKS = 24
BEGAN = time.time() - 3600


def sliced_run(folder: Path, *, steps: int = 12, gain: float = 0.6, ended: bool = True, lr: float = 1e-5) -> Path:
    """Write a run of some steps, with validations every four steps in which one layout gets worse."""
    run = make_run(folder, ended=ended)
    config = (
        f"astuner:\n  backbone: local\n  model: {{path: Qwen/Qwen2.5-0.5B-Instruct}}\n  trainer_common: "
        f"{{total_steps: {steps}, optim: {{lr: {lr}}}}}\n"
    )
    (run / "resolved.yaml").write_text(config)
    (run / "metrics.jsonl").unlink()
    logged: list[tuple[int, Episode]] = []
    for step in range(steps + 1):
        if step:
            attempts = [_attempt(step, i, success=i < 2 + step // 4) for i in range(8)]
            attempts[-1] = replace(
                attempts[-1], stop_reason=StopReason.TRUNCATED, error="the answer reached 256 tokens"
            )
            logged += [(step, one) for one in attempts]
            add_metrics(run, _trained(step))
        if step % 4 == 0:
            solved = [_solved(step, i, gain) for i in range(TASKS)]
            logged += [(step, _validated(step, i, solved=one)) for i, one in enumerate(solved)]
            add_metrics(run, _measured(step, solved))
            results = {f"invoice-{i}": _result(one) for i, one in enumerate(solved)}
            RunDir(run).write_task_results(step, results)
    up, down = (one for _, one in logged[TASKS : TASKS + 8][1:3])
    credit = [*credited(up), *credited(down, advantage=-0.75)]
    write_log(run, logged, {1: credit})
    byte_tokenizer(run / "episodes/tokenizer/tokenizer.json")
    for step, rule in ((1, "zero_signal"), (steps, "cut_off")):
        message = f"{40 + step} % of episodes of step {step}"
        alarm = {
            "step": step,
            "time": 1.0,
            "rule": rule,
            "severity": "warning",
            "message": message,
            "advice": "Read some",
        }
        with (run / "alarms.jsonl").open("a") as file:
            file.write(json.dumps(alarm) + "\n")
    (run / "certificate.json").write_text(json.dumps(CERTIFICATE))
    return run


CERTIFICATE = {
    "counted_since_step": 0, "turns": 384, "turns_going_on": 192, "continued_exactly": 190,
    "continued_exactly_share": 190 / 192, "branches": {"another_prompt": 2}, "approximations": {},
    "tokens": {
        "prompt": 9000, "wasted_prompt": 120, "generated": 4000, "trained": 3900, "trained_with_zero_advantage": 100,
        "of_untrained_agents": 0, "left_out": {"unscored_episodes": 100}, "trained_share": 0.975,
    },
    "first_examples": {}, "meaning": {"unscored_episodes": "the episode failed and has no reward"},
}  # fmt: skip


def _attempt(step: int, i: int, *, success: bool) -> Episode:
    return _of_task(episode(f"g{step}-{i}", float(success), seconds=156.0), step % TASKS)


def _validated(step: int, i: int, *, solved: bool) -> Episode:
    return _of_task(episode(f"v{step}x{i}-0", float(solved), split=Split.VALIDATION), i)


def _of_task(made: Episode, i: int) -> Episode:
    metadata = {"answer": 4, "layout": LAYOUTS[i % 3], "pages": i % 4}
    query = f"Return the JSON of invoice {i}: number, date, total, and all positions with their prices"
    task = replace(made.workflow_task.task, task_id=f"invoice-{i}", main_query=query, metadata=metadata)
    return replace(made, workflow_task=replace(made.workflow_task, task=task))


def _solved(step: int, i: int, gain: float) -> bool:
    if i % 3 == 2:
        return i < 20 - step
    return (i * 7) % TASKS < 6 + gain * 3 * step


def _result(solved: bool) -> TaskResult:
    verdict = JudgeOutput(reward=float(solved), is_success=solved)
    return TaskResult(successes=int(verdict.is_success or 0), scored=1, stated=0, reward=verdict.reward)


def _trained(step: int) -> dict[str, Any]:
    return {
        "step": step, "time": BEGAN + 160 * step, "reward/mean": 0.3 + 0.04 * step, "success/mean": 0.25 + 0.04 * step,
        "loss": 0.5 / step, "adv/zero_group_frac": 0.0, "time/step": 156.2, "throughput/tokens_per_s": 1234.5,
        "tokens/trained": 300, "entropy": 1.0 / step, "tokens/generated": 320,
    }  # fmt: skip


def _measured(step: int, solved: Sequence[bool]) -> dict[str, Any]:
    share = sum(solved) / TASKS
    row = {
        "step": step, "time": BEGAN + 160 * step, "val/success": share, "val/success_ci_low": max(0.0, share - 0.19),
        "val/success_ci_high": min(1.0, share + 0.19), "val/reward/mean": share, "val/tasks": TASKS,
    }  # fmt: skip
    for k, layout in enumerate(LAYOUTS):
        at, of = f"val/slice/layout/{layout.replace(' ', '_')}", solved[k::3]
        row |= {f"{at}/success": sum(of) / len(of), f"{at}/reward": sum(of) / len(of), f"{at}/tasks": len(of)}
    return row


@contextmanager
def as_running(run: Path, **progress: Any) -> Iterator[None]:
    """Hold the lock of a run, and write its progress."""
    lock = run.with_name(f".{run.name}.lock")
    state = {"time": time.time(), "phase": "rollout", "step": 7, "total_steps": 12, "done": 10, "total": 64}
    state |= {"elapsed_seconds": 981.2, "remaining_seconds": 840.0, **progress}
    (run / "progress.json").write_text(json.dumps(state))
    with lock.open("w") as file:
        file.write(str(os.getpid()))
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
