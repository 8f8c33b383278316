"""Runs beside one another: what the page is told of groups, curves and tasks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner.contracts.types import Split
from astuner_report.compare import compare
from tests.table import table

from ._runs import HOSTILE, Client, add_metrics, episode, make_run, viewing, write_log

STEPS = 4


def a_run(root: Path, name: str, solved: Sequence[int], *, seed: int = 1, lr: float = 0.1, **astuner: Any) -> Path:
    """Six validation tasks after step 4, of which it solves some; ``reward/mean`` is seed + step / 10."""
    run = make_run(root / name, ended=True)
    settings = {"experiment_name": name, "seed": seed, "trainer_common": {"optim": {"lr": lr}}, **astuner}
    settings = {"task_judge": {"judge": "exact"}} | settings
    (run / "resolved.yaml").write_text(yaml.safe_dump({"astuner": settings}, sort_keys=False))
    (run / "metrics.jsonl").unlink()
    for step in range(1, STEPS + 1):
        add_metrics(run, {"step": step, "time": 1.0, "reward/mean": seed + step / 10, f"only/{name}": 1.0})
    add_metrics(run, {"step": STEPS, "time": 2.0, "val/success": len(solved) / 6})
    checked = [episode(f"v{i}-0", float(i in solved), split=Split.VALIDATION) for i in range(6)]
    write_log(run, [(STEPS, one) for one in checked])
    return run


@pytest.fixture
def runs(tmp_path: Path, static: Path) -> Iterator[tuple[Path, Client]]:
    a_run(tmp_path, "slow-1", [0, 1], seed=1)
    a_run(tmp_path, "slow-2", [0], seed=2)
    a_run(tmp_path, "fast", [1, 2, 3], seed=1, lr=0.2)
    with viewing(tmp_path, static=static) as client:
        yield tmp_path, client


def compared(client: Client, *ids: str, metrics: Sequence[str] = ()) -> Any:
    asked = [*(("run", one) for one in ids), *(("metric", name) for name in metrics)]
    return client.get("/api/compare", asked).ok


def test_seeds_are_a_group_with_a_band(runs) -> None:
    _, client = runs
    found = compared(client, "slow-1", "fast", "slow-2", metrics=["reward/mean", "val/success", "none"])
    slow, fast = found["groups"]
    assert [run["id"] for run in slow["runs"]] == ["slow-1", "slow-2"]
    assert [run["id"] for run in fast["runs"]] == ["fast"]
    assert found["steps"] == [1, 2, 3, 4]
    curve = slow["curves"]["reward/mean"]
    assert curve["mean"] == pytest.approx([1.6, 1.7, 1.8, 1.9])
    assert (curve["low"], curve["high"]) == (pytest.approx([1.1, 1.2, 1.3, 1.4]), pytest.approx([2.1, 2.2, 2.3, 2.4]))
    assert slow["curves"]["val/success"]["mean"] == [None, None, None, pytest.approx(0.25)]
    assert fast["curves"]["reward/mean"] == {"mean": [1.1, 1.2, 1.3, 1.4]}  # one run has no band
    assert set(fast["curves"]) == {"reward/mean", "val/success"}
    assert {"only/slow-1", "only/slow-2", "only/fast"} < set(found["metrics"])
    assert found["settings"] == [{"key": "astuner.trainer_common.optim.lr", "values": [0.1, 0.2]}]
    assert (found["yardsticks"], found["problems"]) == ([], [])


def test_a_band_ends_where_a_seed_ends(runs) -> None:
    root, client = runs
    add_metrics(root / "slow-1", {"step": 5, "time": 3.0, "reward/mean": 9.0})
    curve = compared(client, "slow-1", "slow-2", metrics=["reward/mean"])["groups"][0]["curves"]["reward/mean"]
    assert [column[-1] for column in (curve["mean"], curve["low"], curve["high"])] == [None, None, None]


def test_other_judges_and_limits_are_yardsticks(runs) -> None:
    root, client = runs
    a_run(root, "lenient", [0, 1, 2], task_judge={"judge": "kind"}, rollout={"max_model_len": 9})
    a_run(root, "strict", [0, 1, 2], rollout={"max_model_len": 7})
    assert compared(client, "strict", "lenient")["yardsticks"] == [
        {"about": "judge", "key": "astuner.task_judge.judge", "values": ["exact", "kind"]},
        {"about": "limits", "key": "astuner.rollout.max_model_len", "values": [7, 9]},
    ]


def test_tasks_are_those_of_the_command(runs) -> None:
    root, client = runs
    said = client.get("/api/compare/tasks", {"a": "slow-1", "b": "fast"}).ok
    diff = json.loads(json.dumps(compare([root / "slow-1"], [root / "fast"])))
    for name in ("measures", "table", "settings", "tasks", "yardsticks"):
        assert said[name] == diff[name]
    assert [flip["task_id"] for flip in said["won"]] == ["task-v2", "task-v3"]
    (lost,) = said["lost"]
    assert (lost["task_id"], lost["episodes_a"], lost["episodes_b"]) == (
        "task-v0",
        [["slow-1", "v0-0"]],
        [["fast", "v0-0"]],
    )
    assert (said["won_total"], said["lost_total"]) == (2, 1)
    assert (said["a"][0]["run"], said["a"][0]["step"]) == ("slow-1", STEPS)
    assert str(root) not in json.dumps(said)


def test_seeds_are_a_side(runs) -> None:
    _, client = runs
    said = client.get("/api/compare/tasks", [("a", "slow-1"), ("a", "slow-2"), ("b", "fast")]).ok
    assert said["measures"]["success"]["a"] == pytest.approx(0.25)
    assert [flip["episodes_a"] for flip in said["lost"]] == [[["slow-1", "v0-0"], ["slow-2", "v0-0"]]]
    said = client.get("/api/compare/tasks", [("a", "fast"), ("b", "slow-2"), ("b", "slow-1")]).ok
    (half,) = [flip for flip in said["lost"] if flip["task_id"] == "task-v1"]
    assert (half["success_b"], half["episodes_b"]) == (0.5, [["slow-2", "v1-0"], ["slow-1", "v1-0"]])
    said = client.get("/api/compare/tasks", [("a", "slow-1"), ("a", "slow-2"), ("b", "fast")]).ok
    (half,) = [flip for flip in said["won"] if flip["task_id"] == "task-v1"]
    assert half["episodes_a"] == [["slow-2", "v1-0"], ["slow-1", "v1-0"]]  # the one that does not solve it first


def test_other_tasks_are_said_and_left_out(runs) -> None:
    root, client = runs
    write_log(root / "fast", [(STEPS, episode("v9-0", 1.0, split=Split.VALIDATION))])
    said = client.get("/api/compare/tasks", {"a": "slow-1", "b": "fast"}).ok
    assert (said["tasks"]["paired"], said["tasks"]["only_b"]) == (6, ["task-v9"])
    assert [one["about"] for one in said["yardsticks"]] == ["tasks"]


@table(
    ("path", "query", "status", "says"),
    [
        ("compare", [("run", "fast")], 400, "run must list 2 to 20 run IDs, not 1"),
        ("compare", [("run", "fast"), ("run", "fast")], 400, "not 1"),
        ("compare", [("run", str(i)) for i in range(21)], 400, "not 21"),
        ("compare", [("run", "fast"), ("run", "../x")], 404, "Run not found"),
        ("compare", [("run", "fast"), ("run", "slow-1"), *(("metric", str(i)) for i in range(61))], 400, "At most 60"),
        ("compare/tasks", [("a", "fast")], 400, "b must list 1 to 20 run IDs"),
        ("compare/tasks", [("a", "fast"), ("b", "slow-1"), ("by", "x")], 400, "task or text"),
        ("compare/tasks", [("a", "fast"), ("b", "slow-1"), ("step_b", "x")], 400, "step_b must be a number"),
        ("compare/tasks", [("a", "fast"), ("b", "slow-1"), ("step_b", "3")], 404, "Available steps: 4"),
        ("compare/tasks", [("a", "fast"), ("b", "bare")], 404, "has no episode log"),
        ("compare/elsewhere", [], 404, "Address not found"),
    ],
)
def test_what_cannot_be_compared_is_said(runs, path, query, status, says) -> None:
    root, client = runs
    if not (root / "bare").exists():
        make_run(root / "bare")
    answer = client.get(f"/api/{path}", query)
    assert (answer.status, says in answer.error) == (status, True), answer.error


def test_what_a_run_holds_cannot_break_the_comparison(runs) -> None:
    """Settings, metrics and names from elsewhere: they are data, or left out and said."""
    root, client = runs
    bad = a_run(root, "bad", [0], **{HOSTILE: {HOSTILE: [HOSTILE]}})
    huge = "9" * 400
    (bad / "metrics.jsonl").write_text(
        '{"step": "x", "reward/mean": 1}\n{"step": true, "reward/mean": 1}\n[]\n{"reward/mean": 1}\n'
        f'{{"step": {huge}, "reward/mean": 1}}\n{{"step": 2, "reward/mean": {huge}}}\n'
        '{"step": -1, "reward/mean": 1}\n'
        '{"step": 3, "reward/mean": NaN, "val/success": [1]}\n{"step": 4, "reward/mean": 0.5}\n'
    )
    broken = a_run(root, "broken", [0])
    (broken / "resolved.yaml").write_text("a: [")
    other = a_run(root, "other", [0])
    (other / "resolved.yaml").write_text("1: {2: [3]}\nastuner: 7\n")
    found = compared(client, "bad", "broken", "other", metrics=["reward/mean", "val/success"])
    (curve,) = [group["curves"]["reward/mean"]["mean"] for group in found["groups"] if group["runs"][0]["id"] == "bad"]
    assert dict(zip(found["steps"], curve, strict=True)) == {1: None, 2: None, 3: None, 4: 0.5}
    assert any(one["key"] == f"astuner.{HOSTILE}.{HOSTILE}" for one in found["settings"])
    assert any(problem.startswith("broken: resolved.yaml could not be read") for problem in found["problems"])
    assert client.get("/api/compare/tasks", {"a": "bad", "b": "broken"}).ok["tasks"]["paired"] == 6


def test_a_validation_that_was_looked_at_is_kept_until_the_log_changes(runs, monkeypatch: pytest.MonkeyPatch) -> None:
    root, client = runs
    sides = {"a": "slow-1", "b": "fast"}
    before = client.get("/api/compare/tasks", sides).ok
    with monkeypatch.context() as kept:
        kept.setattr("astuner_view.app.measured", lambda *_, **__: pytest.fail("measured again"))
        assert client.get("/api/compare/tasks", sides).ok == before
    write_log(root / "fast", [(STEPS + 1, episode("w1-0", 0.0, split=Split.VALIDATION))])
    with monkeypatch.context() as few:
        few.setattr("astuner_view.app.MOST_MEASURED", 1)
        assert client.get("/api/compare/tasks", {**sides, "step_b": STEPS}).ok == before
    assert client.get("/api/compare/tasks", sides).status == 404  # of step 5 there is another task alone
