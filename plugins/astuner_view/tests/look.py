"""Draw all pages of the viewer: ``python -m tests.look FOLDER [RUN_WITH_100,000_EPISODES]`` in ``plugins/astuner_view``.

The runs are a finished one with slices, a running one, a stopped one and an empty one. Each page is drawn in light and
dark mode, and on a phone. Errors in the console are printed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from astuner import RunDir
from astuner.contracts.types import Episode, JudgeOutput, Split, StopReason
from astuner.contracts.validation import TaskResult

from ._runs import add_metrics, byte_tokenizer, credited, episode, make_run, viewing, write_log

LAYOUTS = ("one column", "two columns", "scanned")
LOOKS = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
TASKS = 24


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
            attempts[-1] = replace(attempts[-1], stop_reason=StopReason.TRUNCATED, error="the answer reached 256 tokens")
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
        alarm = {"step": step, "time": 1.0, "rule": rule, "severity": "warning", "message": message, "advice": "Read some"}
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
        "step": step, "time": 100.0 + 160 * step, "reward/mean": 0.3 + 0.04 * step, "success/mean": 0.25 + 0.04 * step,
        "loss": 0.5 / step, "adv/zero_group_frac": 0.0, "time/step": 156.2, "throughput/tokens_per_s": 1234.5,
        "tokens/trained": 300, "entropy": 1.0 / step, "tokens/generated": 320,
    }  # fmt: skip


def _measured(step: int, solved: Sequence[bool]) -> dict[str, Any]:
    share = sum(solved) / TASKS
    row = {
        "step": step, "time": 101.0 + 160 * step, "val/success": share, "val/success_ci_low": max(0.0, share - 0.19),
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


def main(folder: Path, large: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="view-look-"))
    sliced_run(root / "invoices-lr-1e-5")
    sliced_run(root / "invoices-lr-5e-6", gain=0.2, lr=5e-6)
    running = sliced_run(root / "invoices-running", steps=7, ended=False)
    sliced_run(root / "invoices-stopped", steps=5, ended=False)
    (root / "empty").mkdir()
    shutil.copy(running / "resolved.yaml", root / "empty")
    first, second = "invoices-lr-1e-5", "invoices-lr-5e-6"
    pages = {
        "runs": "#/",
        **{f"run-{name}": f"#/run/invoices-{name}" for name in ("lr-1e-5", "running", "stopped")},
        "run-empty": "#/run/empty",
        "episodes-empty": "#/run/empty/episodes",
        "tasks": f"#/run/{first}?tab=tasks",
        "steps": f"#/run/{first}?tab=steps&step=4",
        "config": f"#/run/{first}?tab=config",
        "episodes": f"#/run/{first}/episodes?where=layout%3Dscanned&where=split%3Dvalidation",
        "compare": f"#/compare?run={first}&run={second}",
        **{
            f"episode-{view}": f"#/run/{first}/episode/g1-2?view={view}"
            for view in ("messages", "tokens", "tree", "lanes")
        },
    }
    if large is not None:
        (root / "large").symlink_to(large.absolute())
        pages |= {"run-large": "#/run/large", "episodes-large": "#/run/large/episodes?where=layout%3Dtwo"}
    with as_running(running), viewing(root) as viewer, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for look, settings in LOOKS.items():
            page = browser.new_context(**settings).new_page()
            page.on("console", lambda said: print("console:", said.text) if said.type in ("error", "warning") else None)
            for name, path in pages.items():
                page.goto("about:blank")
                page.goto(f"http://127.0.0.1:{viewer.port}/{path}")
                page.locator("h1").first.wait_for(state="attached")
                page.locator('[role="status"]').wait_for(state="detached")
                page.wait_for_timeout(1500 if "large" in name else 600)
                page.screenshot(path=folder / f"{name}-{look}.png")
                if page.evaluate("document.body.scrollWidth > innerWidth"):
                    print(name, look, "is wider than the screen")
            page.goto("about:blank")
        browser.close()
    shutil.rmtree(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
