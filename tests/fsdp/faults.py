"""An experiment whose episodes fail in every way that an episode can, one step after another."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from .runs import Run, running

WORKFLOW = '''
import asyncio, os, signal
from pathlib import Path
from astuner import Workflow, WorkflowOutput

HERE = Path(__file__).parent

class Faulty(Workflow):
    """Does what its task says; an episode that does nothing else is worth 0.5 or 1."""

    async def execute(self, workflow_task, model_tuner):
        what, first = workflow_task.task.main_query, workflow_task.attempt == 0
        if what == "all fail" or (what == "one fails" and first):
            raise RuntimeError("the flux capacitor is missing")
        if what == "one is slow" and first:
            await asyncio.sleep(600)
        if what == "one always kills" and first:
            await asyncio.sleep(2)  # the others are done by then
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "one kills" and first:
            try:
                (HERE / "killed").touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        reply = await model_tuner.chat([{"role": "user", "content": what}])
        with (HERE / "pids").open("a") as file:
            file.write(f"{os.getpid()}\\n")
        return WorkflowOutput(reward=0.5 if len(reply.message["content"] or "") % 2 else 1.0)
'''
BROKEN = "import sys\nif 'default_worker' in sys.argv[0]:  # of Ray\n    import frobnicate\n"
EXPERIMENT = """
astuner:
  model: {path: tiny-calculator}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
  data: {train_batch_size: 4, shuffle: false}
  rollout:
    workflow: faulty.py->Faulty
    num_repeat: 4
    max_model_len: 128
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
    episode_timeout: 20
  trainer_common: {total_steps: 9, save_freq: 9, save_episodes: -1, optim: {lr: 1.0e-3}}
"""
STEPS = (
    ("one fails", "all fail", "one is slow", "fine"),
    ("one kills", "one always kills", "fine", "fine"),
    ("fine", "all fail", "all fail", "all fail"),
)


def write(folder: Path, *, first_lines: str = "", steps: tuple[tuple[str, ...], ...] = STEPS) -> Path:
    """The experiment's file; the tasks are what its episodes do.

    :param first_lines: of the workflow's file.
    """
    (folder / "faulty.py").write_text(first_lines + WORKFLOW)
    (folder / "exp.yaml").write_text(EXPERIMENT)
    tasks = [json.dumps({"question": what}) for step in steps for what in step]
    (folder / "tasks.jsonl").write_text("\n".join(tasks) + "\n")
    return folder / "exp.yaml"


@contextmanager
def two_runs(backbone: str, factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Run]]:
    """Two runs at once, since each of them waits most of the time: one whose episodes fail, one that cannot begin."""
    with ExitStack() as stack:
        found = {}
        for name, first_lines in (("faulty", ""), ("broken", BROKEN)):
            folder = factory.mktemp(name)
            file = write(folder, first_lines=first_lines)
            found[name] = stack.enter_context(running(backbone, file, folder / "run", "--no-resume"))
        for run in found.values():
            run.ends()
        yield found


def check_says_what_cannot_be_imported(run: Run) -> None:
    """An agent that cannot be imported in a worker stops the run."""
    assert run.ends() == 1
    assert "No module named 'frobnicate'" in run.said()
    assert run.steps() == {}


def conversations(run: Run) -> list[dict[str, Any]]:
    files = sorted((run.folder / "episodes").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def check_counted_and_never_scored(run: Run) -> None:
    """What fails is counted and never scored, until too much fails."""
    assert run.ends() == 1
    said = run.said()
    assert "step 3: 12 of 16 episodes failed" in said
    assert "the flux capacitor is missing" in said, "the cause is named"

    steps, failed = run.steps(), [f for f in run.failures() if "stop_reason" in f]
    assert sorted(steps) == [1, 2], "both were trained, whatever failed in them"
    assert run.resumable_at() == 2, "what was finished is saved"
    of_first = sorted((f["episode_id"], f["stop_reason"]) for f in failed if f["step"] == 1)
    assert of_first == [
        ("g0000000-0", "workflow_failed"),
        *((f"g0000001-{n}", "workflow_failed") for n in range(4)),
        ("g0000002-0", "timed_out"),
    ]
    dropped = [(f["step"], f["group_id"]) for f in run.failures() if "dropped" in f]
    assert [d for d in dropped if d[0] == 1] == [(1, "g0000001")]

    (lost,) = [f for f in failed if f["step"] == 2 and f["episode_id"] == "g0000005-0"]
    assert lost["stop_reason"] == "worker_lost"
    assert "3 times" in lost["error"]
    assert "g0000004-0" not in {f["episode_id"] for f in failed}, "it ran in another worker when the first was killed"
    workers = set((run.folder.parent / "pids").read_text().split())
    assert len(workers) > 2, "episodes ran in the workers that took the place of those killed"

    shown = conversations(run)
    assert len(shown) == 3 * 16
    unscored = {"workflow_failed", "timed_out", "worker_lost"}
    assert all((e["reward"] is None) == (e["stop_reason"] in unscored) for e in shown)
    assert steps[1]["rollout/errored_frac"] == pytest.approx(6 / 16)
    assert min(row["reward/min"] for row in steps.values()) == 0.5, "nothing was scored 0"
