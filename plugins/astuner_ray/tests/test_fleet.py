"""A worker that dies is told of, and an episode that starts over in another counts that, without Ray."""

from __future__ import annotations

import asyncio
import itertools
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from astuner import EpisodeRunner
from astuner.contracts.types import Episode, SamplingParams, StopReason, Task, WorkflowTask
from astuner.testing import fake_config
from astuner_ray import fleet as fleets
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
    ray.get, ray.kill, ray.nodes = list, lambda actor: None, lambda: [{"NodeID": "first", "Alive": True}]
    monkeypatch.setattr(fleets, "_on", lambda label: label)
    ray.get_runtime_context = lambda: SimpleNamespace(runtime_env={"working_dir": "sent along"})
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
        "an episode worker died; its 3 episodes start over: The actor is dead because its process was killed"
    )
    assert len(notes) == 1 + 3


def test_a_machine_that_joins_runs_episodes_once_its_worker_can_and_is_told_of_if_it_cannot(
    tmp_path: Path, deaths: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths += [False] * 4
    ray: Any = sys.modules["ray"]
    up, dead = {"first"}, set[int]()

    def get(found: Any) -> Any:
        if isinstance(found, int) and found in dead:
            raise Died("ModuleNotFoundError: No module named 'frobnicate'")
        return found if isinstance(found, int) else list(found)

    numbers = itertools.count(1)
    ray.remote = lambda cls: SimpleNamespace(options=lambda **how: SimpleNamespace(remote=lambda *told: made(how)))
    started: list[str] = []

    def made(how: Any) -> Worker:
        started.append(how["scheduling_strategy"])
        worker, number = Worker(deaths), next(numbers)
        worker.pid.remote = lambda: number
        return worker

    coming: set[int] = {2}
    ray.get, ray.nodes = get, lambda: [{"NodeID": label, "Alive": True} for label in up]
    ray.wait = lambda asked, **how: ([one for one in asked if one not in coming], [])
    monkeypatch.setattr(fleets, "LOOK_SECONDS", 0.0)
    runner, notes = EpisodeRunner(fake_config(tmp_path)), list[str]()
    fleet = Fleet(runner, lambda: pytest.fail("in a worker"), workers=1, environ={}, model="m", note=notes.append)
    task = WorkflowTask(task=Task(task_id="t"), episode_id="e", group_id="g")

    def play() -> None:
        asyncio.run(fleet.run(task, SamplingParams(max_tokens=1)))

    play()
    up.add("second")
    play()
    assert (started, notes) == (["first", "second"], []), "its worker has not come up yet"
    coming.clear()
    play()
    assert notes == ["a machine joined the cluster; episodes now run in 2 workers"]
    up.add("third")
    dead.add(3)
    play()
    assert notes[1:] == [
        "a machine joined the cluster, but episodes cannot run on it: ModuleNotFoundError: No module named 'frobnicate'"
    ]
    assert started == ["first", "second", "third"], "each machine is tried once"
