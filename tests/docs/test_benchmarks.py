"""The benchmarks can be started, and what makes their numbers trustworthy works. Nothing here looks at a clock."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from astuner.contracts.types import JudgeOutput, Split, WorkflowOutput
from astuner.testing import workflow_task
from tests.table import table

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = sorted(p.stem for p in (REPOSITORY / "benchmarks").glob("*.py") if p.stem != "__main__")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY))


def _module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


@table("name", MODULES)
def test_every_module_imports(name: str) -> None:
    assert _module(name).__doc__


def test_help_names_every_benchmark_and_every_benchmark_can_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--help"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    names = _module("__main__").BENCHMARKS
    assert all(name in done.stdout and callable(_module(name).run) for name in names)


@table("arguments", [["speed"], ["step_vs_trl", "--quick", "--write"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "error: " in done.stderr


def test_a_page_is_not_kept_from_a_busy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    main, ran = _module("__main__"), []
    report = _module("report").Report("t", "i")
    monkeypatch.setattr(_module("sandbox_cost"), "run", lambda quick: ran.append(quick) or report)
    monkeypatch.setattr(main, "HERE", tmp_path)
    monkeypatch.setattr(main, "_LOAD", 1e6)
    with pytest.raises(SystemExit):
        main.main(["sandbox_cost", "--write"])
    assert not ran
    main.main(["sandbox_cost", "--write", "--force"])
    assert (tmp_path / "sandbox_cost.md").read_text().startswith("# t")


@pytest.mark.slow
def test_what_is_for_a_gpu_is_rehearsed_without_one(tmp_path: Path) -> None:
    def said(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "benchmarks", "gpu", "--task", "local", *more]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True)

    assert "--quick rehearses it" in said().stderr
    page = said("--quick", "--runs", str(tmp_path)).stdout
    rows = [line for line in page.splitlines() if line.startswith("| local")]
    assert len(rows) == 4, page
    assert page.count("memory (estimate)") == 2


def test_a_training_run_that_came_to_its_end_is_read_and_not_made_again(tmp_path: Path) -> None:
    trained = _module("trained")
    for seed, after in ((1, 0.9), (2, 0.5)):
        folder = tmp_path / "as-shipped" / str(seed)
        folder.mkdir(parents=True)
        rows = [
            {"step": s, "val/success": v, "val/success_ci_low": v, "val/success_ci_high": v, "val/tasks": 200}
            for s, v in ((0, 0.2), (5, after))
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "seconds.json").write_text('{"seconds": 7}')
    conditions = {trained.AS_SHIPPED: trained.Condition((), (1, 2))}
    command = trained.Command(("no-such-experiment.yaml",), 150)
    found = trained.train_all(conditions, command, trained.Runs(tmp_path, jobs=2))[trained.AS_SHIPPED]
    assert [(run.seed, run.before.success, run.after.success, run.seconds) for run in found] == [
        (1, 0.2, 0.9, 7), (2, 0.2, 0.5, 7)
    ]  # fmt: skip
    report = _module("report").Report("t", "i")
    trained.verdict(report, {trained.AS_SHIPPED: found}, conditions)
    assert "as it should" in report.parts[-1]
    with pytest.raises(RuntimeError, match="no-such-experiment"):
        trained.train_all({"other": trained.Condition((), (1,))}, command, trained.Runs(tmp_path))


def test_sides_take_turns_and_warm_up_is_not_counted() -> None:
    order: list[str] = []
    times = _module("measure").interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warm_up=1
    )
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert {name: len(t.wall) for name, t in times.items()} == {"a": 3, "b": 3}


def test_a_report_is_a_markdown_page_with_aligned_tables() -> None:
    report = _module("report").Report("Title", "What is compared.")
    report.table(("what", "ms"), [("one", 1), ("another", "12.5")])
    text = report.markdown("python -m benchmarks x", 1.0)
    assert text.startswith("# Title\n\nWhat is compared.\n\n")
    assert "| what    |   ms |\n|---------|-----:|\n| one     |    1 |\n| another | 12.5 |\n" in text


def test_unequal_work_is_refused() -> None:
    steps = _module("step_vs_trl")
    count = _module("local_side").StepCount
    ours = count(episodes=64, prompt_tokens=1, added_tokens=100, model_tokens=100, rollout_cpu=0.1, train_cpu=0.1)
    theirs = count(episodes=64, prompt_tokens=1, added_tokens=100, model_tokens=110, rollout_cpu=0.1, train_cpu=0.1)
    steps.check_tokens({"a": [ours], "b": [ours]}, 0.0)
    with pytest.raises(RuntimeError, match="model_tokens"):
        steps.check_tokens({"a": [ours], "b": [theirs]}, 0.05)


def test_shuffled_rewards_keep_their_number_but_not_their_owner() -> None:
    module = _module("shuffled_judge")
    judge = module.ShuffledJudge(SimpleNamespace(astuner=SimpleNamespace(seed=0)))
    before = sum(v.reward for v in judge._waiting)
    good, bad = (WorkflowOutput(metadata={"final_answer": f"\\boxed{{{n}}}"}) for n in (4, 5))

    def ask(output: WorkflowOutput, split: Split) -> JudgeOutput:
        verdict: JudgeOutput = asyncio.run(judge.judge(workflow_task(split=split, answer="4"), output))
        return verdict

    outputs = [good, bad] * 400
    given = [ask(output, Split.TRAIN).reward for output in outputs]
    assert sum(given) + sum(v.reward for v in judge._waiting) == before + 400, "no verdict is made or lost"
    after_first = given[2 * module.POOL :]
    assert abs(sum(after_first[::2]) - sum(after_first[1::2])) < 0.25 * len(after_first), "good and bad fare alike"
    assert (ask(good, Split.VALIDATION).reward, ask(bad, Split.VALIDATION).reward) == (1.0, 0.0)


def test_the_bootstrap_draws_whole_kinds_of_tasks() -> None:
    from benchmarks.trained import Trained, Validation, bootstrap

    def run(seed: int, gained: str) -> Trained:
        """One that failed all tasks before, and then passes those whose query begins so."""
        queries = [f"{kind} {n}" for kind in "abcd" for n in range(50)]
        rows = [[{"task_id": q, "query": q, "is_success": step and q[0] in gained} for q in queries] for step in (0, 9)]
        return Trained(seed, [Validation(s, 0, 0, 1, 200) for s in (0, 9)], [], 0.0, [], {0: rows[0], 9: rows[1]})

    assert bootstrap([run(0, "abcd"), run(1, "abcd")], str) == (1, 1, 1)
    alone, kinds = (bootstrap([run(0, "ab"), run(1, "ab")], kind) for kind in (str, lambda query: query[0]))
    assert alone[0] == kinds[0] == 0.5
    assert alone[1] > 0.4 > 0.1 > kinds[1]  # four kinds, of which two gained, say much less than 200 tasks
    seeds = bootstrap([run(0, ""), run(1, "abcd")], str)
    assert (seeds[0], seeds[1], seeds[2]) == (0.5, 0, 1)


def test_how_something_grows_is_found_and_what_does_not_grow_so_is_seen() -> None:
    fit = _module("scale").Fit
    square = fit.of({n: 3.0 * n**2 for n in (2.0, 8.0, 32.0)})
    assert (square.cost, square.power, square.worst) == pytest.approx((3.0, 2.0, 1.0))
    assert square(100) == pytest.approx(30_000)
    bent = fit.of({1.0: 1.0, 10.0: 10.0, 100.0: 1000.0})
    assert 1 < bent.power < 2
    assert bent.worst > 1.5
