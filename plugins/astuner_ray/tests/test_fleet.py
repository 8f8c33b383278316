"""A worker that dies is told of, and an episode that starts over in another counts that, without Ray."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from astuner import EpisodeRunner
from astuner.contracts.types import Episode, SamplingParams, StopReason, Task, WorkflowTask
from astuner.testing import fake_config
from astuner_ray.fleet import Fleet


class Died(Exception):
    """Ray's error of an actor that is gone."""


class Worker:
    """An actor, every call of which goes as `deaths` has it."""

    def __init__(self, deaths: list[bool]) -> None:
        self.pid = SimpleNamespace(remote=lambda: 1)
        self.run = SimpleNamespace(remote=self._run)
        self._deaths = deaths

    async def _run(self, workflow_task: WorkflowTask, sampling: SamplingParams) -> Episode:
        await asyncio.sleep(0)
        if self._deaths.pop(0):
            raise Died("The actor is dead because its process was killed\nWorker exit type: SYSTEM_ERROR")
        return Episode(
            workflow_task=workflow_task,
            turns=(),
            output=None,
            verdict=None,
            stop_reason=StopReason.COMPLETED,
            retries=1,
        )


@pytest.fixture
def deaths(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    found: list[bool] = []
    ray: Any = ModuleType("ray")
    ray.remote = lambda cls: SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda *told: Worker(found)))
    ray.get, ray.kill = list, lambda actor: None
    ray.exceptions = exceptions = ModuleType("ray.exceptions")
    for name in ("RayTaskError", "TaskCancelledError"):
        setattr(exceptions, name, type(name, (Exception,), {}))
    exceptions.RayError = Died  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)
    return found


def test_a_worker_that_dies_is_told_of_once_and_its_episodes_count_it(tmp_path: Path, deaths: list[bool]) -> None:
    deaths += [True, True, False, False, False, True, True, True]
    runner, notes = EpisodeRunner(fake_config(tmp_path, "  rollout: {max_retries: 2}")), list[str]()
    fleet = Fleet(runner, lambda: pytest.fail("in a worker"), workers=1, environ={}, model="m", note=notes.append)
    tasks = [WorkflowTask(task=Task(task_id="t"), episode_id=f"e{n}", group_id="g") for n in range(3)]
    sampling = SamplingParams(max_tokens=1)

    async def play() -> list[Episode]:
        return [
            *await asyncio.gather(*(fleet.run(one, sampling) for one in tasks)),
            await fleet.run(tasks[0], sampling),
        ]

    *found, lost = asyncio.run(play())
    assert sorted(e.retries for e in found) == [1, 2, 2]
    assert lost.stop_reason is StopReason.WORKER_LOST
    assert notes[0] == (
        "an episode worker died, and its episodes (3) start over: The actor is dead because its process was killed"
    )
    assert len(notes) == 1 + 3
