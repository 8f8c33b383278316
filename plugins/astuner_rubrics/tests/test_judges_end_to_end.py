"""Training with judges that ask a model: the shipped example, and a judge model that does its sums."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astuner import run
from astuner.contracts.errors import RunError
from astuner.testing import ScriptedModel
from astuner_helpers import BudgetSpent

from ._reading import read

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "math_agent" / "math_agent.yaml"
Body = dict[str, Any]


def solve(question: str) -> float:
    """What the example's questions ask for, from their words."""
    first, second = map(int, re.findall(r"\d+", question))
    if re.search(r"each of|in each|each (?:bag|box)", question, re.IGNORECASE):
        return first * second
    if re.search(r"equally|shares|among", question):
        return first / second
    if re.search(r"lost|lose|gives|remain|left|away|ate|sells", question):
        return first - second
    return first + second


def worth(question: str, answer: str) -> int:
    """2 for the right number in a box, 1 for another number there, else 0."""
    boxed = re.search(r"\\boxed\{(-?\d+(?:\.\d+)?)\}", answer)
    if boxed is None:
        return 0
    return 2 if abs(float(boxed[1]) - solve(question)) < 1e-6 else 1


def shown(body: Body) -> dict[str, str]:
    return read(body["messages"][1]["content"]).fenced


def grade(body: Body) -> Body:
    found = shown(body)
    return {"reason": "I did the sum.", "score": int(worth(found["QUESTION"], found["ANSWER"]) == 2)}


def rank(body: Body) -> Body:
    found = shown(body)
    names = [label.removeprefix("ATTEMPT ") for label in found if label.startswith("ATTEMPT ")]
    of = {name: worth(found["QUESTION"], found[f"ATTEMPT {name}"]) for name in names}
    tied = [[name for name in names if of[name] == value] for value in (2, 1, 0)]
    return {"reason": "I did the sums.", "ranking": [group for group in tied if group]}


def overrides(folder: Path, url: str, *more: str) -> list[str]:
    """The example, short, with a helper model."""
    return [
        "astuner.trainer_common.total_steps=2",
        "astuner.trainer_common.test_freq=100",
        "astuner.trainer_common.val_before_train=false",
        "astuner.data.max_validation_tasks=4",
        "astuner.data.train_batch_size=4",
        "astuner.rollout.num_repeat=4",
        "astuner.rollout.compute_madness_checklist=[]",
        f"astuner.experiment_dir={folder}",
        "astuner.experiment_name=run",
        f"astuner.helper_models.checker.base_url={url}",
        "astuner.helper_models.checker.model=sums",
        "astuner.helper_models.checker.cache=false",
        *more,
    ]


LLM_JUDGE = (
    "astuner.task_judge.judge=llm_judge",
    "astuner.task_judge.llm_judge.helper_model=checker",
    "astuner.task_judge.llm_judge.criteria='The boxed number is right.'",
)
RELATIVE = (
    "astuner.task_judge.judge=relative",
    "astuner.task_judge.relative.helper_model=checker",
    "astuner.task_judge.relative.alone=math_answer",
)


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / name).read_text().splitlines()]


def episodes(folder: Path) -> list[dict[str, Any]]:
    return [row for step in (1, 2) for row in rows(folder, f"episodes/step_{step:06d}.jsonl")]


def final(row: dict[str, Any]) -> str:
    return str(row["turns"][-1]["reply"].get("content") or "")


def test_the_judge_model_of_these_tests_can_do_the_examples_sums() -> None:
    lines = (EXAMPLE.parent / "data" / "train.jsonl").read_text().splitlines()
    for line in lines:
        task = json.loads(line)
        assert solve(task["question"]) == float(task["answer"].rpartition("#### ")[2]), task
    assert len(lines) >= 1000


@pytest.mark.slow
def test_llm_judge_trains_and_its_rewards_are_those_that_the_sums_deserve(tmp_path: Path) -> None:
    with ScriptedModel(grade) as server:
        run(EXAMPLE, overrides(tmp_path, server.base_url, *LLM_JUDGE), backbone="local")
        asked = len(server.requests)
    steps = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert [row["judge/asked"] for row in steps] == [1.0, 1.0]
    said = episodes(tmp_path)
    assert len(said) == 32
    assert asked >= 32  # the last validation too
    assert [row["reward"] for row in said] == [float(worth(row["query"], final(row)) == 2) for row in said]
    assert {row["reward_source"] for row in said} == {"judge"}


@pytest.mark.slow
def test_relative_trains_on_rankings_and_is_validated_by_another_judge(tmp_path: Path) -> None:
    with ScriptedModel(rank) as server:
        run(EXAMPLE, overrides(tmp_path, server.base_url, *RELATIVE), backbone="local")
    steps = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert [row["reward/mean"] for row in steps] == [0.5, 0.5]  # as in every group that was compared whole
    assert any(row["reward/std"] > 0 for row in steps)
    said = episodes(tmp_path)
    groups = [[row for row in said if row["group_id"] == group] for group in {row["group_id"] for row in said}]
    for group in groups:
        for one in group:
            for other in group:
                better = worth(one["query"], final(one)) - worth(other["query"], final(other))
                assert (one["reward"] - other["reward"]) * better >= 0
                assert better or one["reward"] == other["reward"]
    (validation,) = [row for row in rows(tmp_path) if "val/success" in row]
    assert 0 <= validation["val/success"] <= 1


def test_debugging_shows_single_attempts_judged_by_the_judge_for_them(tmp_path: Path) -> None:
    with ScriptedModel(rank) as server:
        result = run(EXAMPLE, overrides(tmp_path, server.base_url, *RELATIVE), backbone="debug")
        assert server.requests == []
    told = [json.loads(line) for line in (result.run_dir / "episodes" / "debug.jsonl").read_text().splitlines()]
    assert told
    assert all(row["reward"] in (0.0, 1.0) for row in told)


def test_a_judge_that_never_answers_stops_the_run_and_scores_nothing(tmp_path: Path) -> None:
    busy = (503, {"error": {"message": "overloaded"}})
    settings = ("astuner.helper_models.checker.max_retries=0", "astuner.rollout.max_retries=0")
    with ScriptedModel(lambda body: busy) as server, pytest.raises(RunError, match="judge_failed"):
        run(EXAMPLE, overrides(tmp_path, server.base_url, *RELATIVE, *settings), backbone="local")
    failures = rows(tmp_path, "failures.jsonl")
    assert {row["stop_reason"] for row in failures if "stop_reason" in row} == {"judge_failed"}
    assert all("no verdict" in row["error"] for row in failures if "stop_reason" in row)


@pytest.mark.slow
def test_a_spent_budget_stops_the_run_and_says_which_key_to_raise(tmp_path: Path) -> None:
    told: Callable[[Body], Body] = grade
    settings = ("astuner.helper_models.checker.budget_tokens=9000",)
    with ScriptedModel(told) as server, pytest.raises(BudgetSpent, match="budget_tokens"):
        run(EXAMPLE, overrides(tmp_path, server.base_url, *LLM_JUDGE, *settings), backbone="local")
