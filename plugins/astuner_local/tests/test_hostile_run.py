"""A whole run in which one of four attempts does what no code should: each costs itself, and the others are counted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner import process_start_time, run
from astuner_record.episode_log import EpisodeLog

from .conftest import EXAMPLE

CODE = f"""
import asyncio
import os
import runpy
import subprocess
import sys
from pathlib import Path
from astuner import Judge, JudgeOutput, WorkflowOutput
from astuner.contracts.types import Split

class Mute(Exception):
    def __str__(self):
        raise SystemExit
    __repr__ = __str__

async def leave(kind):
    raise kind

def judged(how):
    deep = eval("[" * 90 + "]" * 90)
    return WorkflowOutput(metadata={{"judge": how, "huge": 10**5000, "mute": Mute(), "deep": deep}})

async def child(kind):
    await asyncio.create_task(leave(kind))

async def several(kind):
    await asyncio.gather(leave(kind), asyncio.sleep(0.01))

BAD = [
    lambda: leave(KeyboardInterrupt), lambda: leave(GeneratorExit), lambda: leave(Mute),
    lambda: child(SystemExit(0)), lambda: several(KeyboardInterrupt),
    lambda: WorkflowOutput(reward=1e308), lambda: WorkflowOutput(reward=1.0, is_success="no"),
    lambda: judged(KeyboardInterrupt), lambda: os._exit(0),
]

class Flow(runpy.run_path({str(EXAMPLE.with_name("workflow.py"))!r})["MathAgentWorkflow"]):
    async def execute(self, workflow_task, model_tuner):
        with Path(__file__).with_name("pids").open("a") as file:
            file.write(subprocess.check_output(["sh", "-c", "sleep 600 >&- & echo $!"], text=True))
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.attempt < 3 or workflow_task.split is not Split.TRAIN:
            return output
        if not BAD:
            return judged(None)
        done = BAD.pop()()
        return await done if asyncio.iscoroutine(done) else done

class Mine(Judge):
    def judge(self, workflow_task, output):
        if (bad := output.metadata.get("judge")) is not None:
            raise bad
        return JudgeOutput(reward=float(workflow_task.attempt % 2))
"""


@pytest.mark.slow
def test_what_is_hostile_costs_itself_and_the_others_are_counted(
    short: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "flow.py").write_text(CODE)
    run(
        EXAMPLE,
        short(
            f"astuner.rollout.workflow={tmp_path / 'flow.py'}->Flow",
            f"astuner.task_judge.judge={tmp_path / 'flow.py'}->Mine",
            "astuner.data.max_validation_tasks=4",
        ),
        backbone="local",
    )
    folder = tmp_path / "run"
    ledger = json.loads((folder / "summary.json").read_text())["ledger"]
    steps = [
        row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "reward/mean" in row
    ]
    assert [row["step"] for row in steps] == [1, 2, 3]
    with EpisodeLog(folder) as log:
        assert log.problems == ()
        episodes = [one.episode for one in log.read_all() if one.episode.workflow_task.split.value == "train"]
    assert len({e.workflow_task.episode_id for e in episodes}) == len(episodes)
    ended = Counter(e.stop_reason.value for e in episodes)
    assert (ended["workflow_failed"], ended["judge_failed"]) == (8, 1)
    assert ended == Counter({k: n for k, n in ledger.items() if k in ended})
    scored = [e for e in episodes if e.verdict is not None]
    assert len(scored) == len(episodes) - 9
    assert all(e.reward == e.workflow_task.attempt % 2 for e in scored)
    told = [e.output.metadata for e in episodes if e.output is not None and "huge" in e.output.metadata]
    assert len(told) > 1
    assert all(one["huge"] == "<an integer of 16,610 bits>" for one in told)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) >= len(episodes)
    assert [pid for pid in pids if process_start_time(pid) is not None] == []
    assert all(one["mute"] == "<Mute, whose text cannot be made: SystemExit>" for one in told)
