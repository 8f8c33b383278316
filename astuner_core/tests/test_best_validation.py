"""Which validation was the best: compared on the tasks that all of them scored, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from astuner.builtin.console import JsonlSink
from astuner.contracts.types import Task
from astuner.contracts.validation import Best, Results, TaskResult, best_of, read_results, results_row, task_keys
from astuner.rollout.runner import EpisodeRunner
from astuner.runs.launch import finish
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir
from astuner.runs.tasks import read_tasks
from astuner.support.json_lines import write_jsonl
from astuner.testing import fake_config
from tests.table import table

Scored = Mapping[int, Sequence[float]]
"""Task -> the rewards of its scored episodes."""


def results(scored: Scored) -> dict[str, TaskResult]:
    return {
        f"t{task}": TaskResult(
            successes=sum(r >= 1 for r in rewards), scored=len(rewards), stated=0, reward=sum(rewards) / len(rewards)
        )
        for task, rewards in scored.items()
    }


def once(right: int, tasks: Sequence[int]) -> Scored:
    """The first so many of these tasks are right."""
    return {task: [float(n < right)] for n, task in enumerate(tasks)}


ALL, HARD, EASY = range(40), range(21, 40), range(21)
MEMBERS: list[tuple[str, dict[int, Scored], int, int, list[int]]] = [
    # what it is, step -> what was scored, the best, tasks compared, not comparable
    ("no failures", {1: once(10, ALL), 2: once(20, ALL), 3: once(15, ALL)}, 2, 40, []),
    ("the newest of equals", {1: once(20, ALL), 2: once(20, ALL), 3: once(1, ALL)}, 2, 40, []),
    ("equal but for the last bit", {1: {0: [0.3], 1: [0.1 + 0.2]}, 2: {0: [0.3], 1: [0.3]}}, 2, 2, []),
    ("hard tasks failed", {1: once(21, ALL), 2: once(12, EASY)}, 1, 21, []),
    ("hard tasks failed, and it is better", {1: once(20, ALL), 2: once(21, EASY)}, 2, 21, []),
    ("easy tasks failed", {1: once(30, ALL), 2: once(9, range(20, 40))}, 1, 20, []),
    ("other tasks failed in each", {1: once(9, range(30)), 2: once(12, range(10, 40))}, 2, 20, []),
    ("other tasks in three", {1: once(5, range(35)), 2: once(35, range(5, 40)), 3: once(0, ALL)}, 2, 30, []),
    ("few tasks, all right", {1: once(20, ALL), 2: once(3, range(37, 40))}, 1, 40, [2]),
    ("few tasks first", {1: once(3, range(3)), 2: once(10, ALL)}, 2, 40, [1]),
    ("one task only", {1: once(0, ALL), 2: once(1, [7])}, 1, 40, [2]),
    ("nothing in common", {1: once(9, range(20)), 2: once(1, range(20, 40))}, 2, 20, [1]),
    ("nothing scored in one", {1: once(5, ALL), 2: {}}, 1, 40, [2]),
    ("only one validation", {7: once(0, EASY)}, 7, 21, []),
    ("several attempts", {1: {0: [1, 0], 1: [1, 1]}, 2: {0: [1, 1], 1: [0, 1]}}, 2, 2, []),
    ("attempts of a task failed", {1: {0: [1], 1: [0, 0, 1]}, 2: {0: [1, 0, 0], 1: [0, 0, 1]}}, 1, 2, []),
    ("failed attempts are not wrong ones", {1: {0: [1, 1, 0], 1: [0]}, 2: {0: [1], 1: [0]}}, 2, 2, []),
    ("graded rewards", {1: {t: [0.2] for t in ALL}, 2: {t: [0.7] for t in ALL}}, 2, 40, []),
    ("graded rewards, hard ones failed", {1: {t: [0.9 - t / 50] for t in ALL}, 2: {t: [0.5] for t in EASY}}, 1, 21, []),
    ("negative rewards", {1: {t: [-5.0] for t in ALL}, 2: {t: [-2.0] for t in ALL}}, 2, 40, []),
]


@table("what, validations, best, tasks, not_comparable", MEMBERS)
def test_the_best_is_of_the_tasks_that_all_scored(
    what: str, validations: dict[int, Scored], best: int, tasks: int, not_comparable: list[int]
) -> None:
    found = best_of({step: results(scored) for step, scored in validations.items()})
    assert found is not None
    assert (found.step, found.tasks, found.not_comparable) == (best, tasks, not_comparable), what
    assert found.as_dict()["tasks"] == tasks
    if len(validations) > 1:
        assert f"{tasks} tasks" in str(found) or "not comparable" in str(found)


def test_there_is_no_best_of_nothing() -> None:
    assert best_of({}) is None
    assert best_of({3: {}}) is None


def test_tasks_keep_their_keys_wherever_they_are() -> None:
    first, second, other = (Task(task_id="t", main_query=q, metadata={"m": object()}) for q in ("a", "b", "c"))
    keys = task_keys([first, second, first, first])
    assert len(set(keys)) == 4
    assert task_keys([other, first, second])[1:] == keys[:2]
    assert task_keys([Task(task_id="t", init_messages=[{"content": "a"}])]) != task_keys([Task(task_id="t")])


def test_ten_thousand_tasks_with_several_attempts_are_kept_small(tmp_path: Path) -> None:
    keys = task_keys([Task(task_id=f"task-{n}" * 5, main_query="q" * 999) for n in range(10_000)])
    found = {key: TaskResult(n % 5, 4, 0, n % 5 / 4) for n, key in enumerate(keys)}
    run_dir = RunDir(tmp_path)
    run_dir.start()
    run_dir.write_task_results(12, found)
    assert run_dir.task_results(12) == read_results(results_row(found)) == found
    assert sum(path.stat().st_size for path in run_dir.episodes.iterdir()) < 50 * 10_000


# ------------------------------------------------------------------------------------------------------- a run's folder

FLOW = """
from pathlib import Path
from astuner import Workflow, WorkflowOutput

class Flow(Workflow):
    async def execute(self, workflow_task, model_tuner):
        found = (Path(__file__).parent / "outcomes").read_text().split()[int(workflow_task.task.metadata["n"])]
        if found == "x":
            raise ConnectionError("the service is down")
        return WorkflowOutput(reward=float(found))
"""


class ARun:
    """Validations whose outcomes are written down: a reward for each task, or x where its episode fails."""

    def __init__(self, folder: Path, questions: Sequence[str] = "abcdefgh") -> None:
        self.folder = folder
        rows = [{"question": question, "n": n} for n, question in enumerate(questions)]
        write_jsonl(folder / "train.jsonl", [{"question": "train", "n": 0}])
        write_jsonl(folder / "held_out.jsonl", rows)
        (folder / "flow.py").write_text(FLOW)
        self.config = fake_config(
            folder,
            "  rollout: {workflow: flow.py->Flow, max_failed_share: 0.9}\n"
            "  task_reader: {type: jsonl, jsonl: {training: {file_path: train.jsonl}, "
            "validation: {file_path: held_out.jsonl}}}\n",
        )
        self.run_dir = RunDir(folder / "run")
        self.run_dir.start()
        self.run = self.started()

    def started(self) -> TrainingRun:
        runner = EpisodeRunner(self.config)
        return TrainingRun(self.config, self.run_dir, read_tasks(self.config), runner=runner, sinks=[JsonlSink()])

    def validate(self, step: int, outcomes: str, *, keep: bool = True) -> None:
        (self.folder / "outcomes").write_text(outcomes)
        self.run.validate({}, step)
        if keep:
            self.run_dir.checkpoint(step).mkdir()
            (self.run_dir.checkpoint(step) / "config.json").write_text("{}")

    @property
    def best(self) -> Best:
        found = self.run_dir.best_validation()
        assert found is not None
        assert self.run_dir.best == self.run_dir.checkpoint(found.step)
        return found


def test_a_run_keeps_what_each_task_came_to_and_compares_that(tmp_path: Path) -> None:
    run = ARun(tmp_path)
    run.validate(0, "1 1 1 1 1 1 1 1", keep=False)  # of the model before training: no checkpoint to keep
    run.validate(1, "1 1 1 1 0 0 0 0")
    run.validate(2, "1 1 1 0 x x x x")
    assert run.run_dir.read_metrics()[-1]["val/success"] == 0.75
    assert (run.best.step, run.best.tasks, [*run.best.compared]) == (1, 4, [1, 2])
    run.validate(3, "1 1 1 1 1 x x x")
    assert (run.best.step, run.best.tasks) == (3, 4)
    run.run.close()
    result = finish(run.run, trains=True)
    assert result.best_checkpoint == run.run_dir.checkpoint(3)
    written = json.loads(run.run_dir.summary.read_text())["best_validation"]
    assert written == result.best_validation == run.best.as_dict()
    assert [(c["step"], c["success"]) for c in written["compared"]] == [(1, 1.0), (2, 0.75), (3, 1.0)]


def test_it_says_on_how_many_tasks_the_best_was_compared(tmp_path: Path) -> None:
    run = ARun(tmp_path)
    run.validate(1, "1 1 1 1 0 0 0 0")
    run.validate(2, "1 1 1 0 x x x x")
    assert "on the 4 tasks scored by all" in finish(run.run, trains=True).summary()
    run.validate(3, "1 1 1 x x x x x")
    summary = finish(run.run, trains=True).summary()
    assert "not comparable" in summary
    assert "step 3" in summary
    run.run.close()


def test_a_resumed_run_compares_with_what_was_validated_before(tmp_path: Path) -> None:
    run = ARun(tmp_path)
    run.validate(1, "1 1 1 1 0 0 0 0")
    state = run.run.state()
    run.validate(2, "1 1 1 1 1 1 1 1", keep=False)  # after the state that is continued from
    run.run.close()
    run.run = run.started()
    run.run.restore(state, 1)
    run.validate(2, "1 1 1 0 x x x x")
    run.run.close()
    assert (run.best.step, run.best.tasks) == (1, 4)


def test_repeated_tasks_are_tasks_of_their_own(tmp_path: Path) -> None:
    run = ARun(tmp_path, ["same"] * 4 + ["other"] * 4)
    run.validate(1, "1 1 1 1 0 0 0 0")
    run.validate(2, "1 1 1 0 x x x x")
    run.run.close()
    assert (run.best.step, run.best.tasks) == (1, 4)


def test_a_folder_of_an_older_run_goes_by_its_metrics(tmp_path: Path) -> None:
    run = ARun(tmp_path)
    run.validate(1, "1 1 1 1 0 0 0 0")
    run.validate(2, "1 1 1 0 x x x x")
    run.run.close()
    damaged = run.run_dir.episodes / "validated_000001.json"
    for text in ("", "[]", "{", '{"tasks": 3}', '{"tasks": {"a": [1]}}'):
        damaged.write_text(text)
        assert (run.best.step, run.best.tasks) == (2, None)
    damaged.unlink()
    assert (run.best.step, run.best.tasks) == (2, None)


def test_what_is_left_out_of_a_result_is_what_was_not_scored(tmp_path: Path) -> None:
    run = ARun(tmp_path)
    run.validate(1, "0.5 1 x 0 x 0.9999999 2 -1")
    run.run.close()
    found: Results = run.run_dir.task_results(1)
    assert [(r.successes, r.reward) for r in found.values()] == [
        (0, 0.5), (1, 1.0), (0, 0.0), (1, pytest.approx(1.0)), (1, 2.0), (0, -1.0),
    ]  # fmt: skip
    assert all((r.scored, r.stated) == (1, 0) for r in found.values())
