"""Run a group of episodes in a Trinity workflow runner, and provide Trinity's explorer with tasks.

A Trinity task is a draw, and running it yields a complete group: all attempts, by core's own `EpisodeRunner` with the
runner's rollout model as engine.  The run receives each episode as it ends, and decides whether a group is trained on
or replaced.

Trinity's scheduler loses a runner that dies together with its tasks; agents and judges, which may crash their process,
therefore run in a child process (`astuner_ray.fleet`) that is replaced when it dies.

Invariant: a failed episode is never scored, and a task always yields an experience, because Trinity treats an empty
result as a failure (`astuner_trinity.experiences.nothing`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from trinity.buffer.buffer_reader import BufferReader
from trinity.common.config import StorageConfig
from trinity.common.experience import Experience
from trinity.common.workflows import Task, Workflow

from astuner import Draw, Group, RolloutPool, build_samples, in_daemon_thread, sampling_for
from astuner.contracts.types import Episode, Split, WorkflowTask
from astuner_ray.fleet import Fleet
from astuner_trinity import experiences, facts, mailbox
from astuner_trinity.engine import connect
from astuner_trinity.session import Drawn, Parts, Session


class GroupWorkflow(Workflow):
    """Workflow set as ``default_workflow_type``."""

    is_async = True
    can_repeat = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model)  # judges connect to the auxiliary models themselves
        self._step: int = task.raw_task["step"]
        self._draw: Draw = task.raw_task["draw"]
        self._split = Split.VALIDATION if task.is_eval else Split.TRAIN
        self._auxiliary = auxiliary_models or []
        self._repeat = 1

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set the number of attempts of the group."""
        self._repeat = repeat_times

    async def run_async(self) -> list[Experience]:
        """Run groups until one can be trained on or the run needs no more.

        :raises RunError: The run is over.
        """
        async with mailbox.reported(f"a workflow runner's group {self._draw[0]}"):
            here = await _here(self.model, self._auxiliary)
            if self._split is Split.VALIDATION:
                await mailbox.ask(Session.validated, self._step, await self._group(*here, self._draw))
                return [experiences.nothing()]
            return await self._trained(*here)

    async def _trained(self, parts: Parts, fleet: Fleet) -> list[Experience]:
        draw: Draw | None = self._draw
        most = parts.runner.config.astuner.rollout.multi_turn.max_sample_per_task
        while draw is not None:
            group = await self._group(parts, fleet, draw)
            ending = await mailbox.ask(Session.group_over, self._step, group)
            if ending.kept:
                found = [
                    experience
                    for episode in group.scored
                    for experience in experiences.of_episode(episode, build_samples(episode, max_samples=most).samples)
                ]
                return found or [experiences.nothing(group.group_id)]
            draw = ending.instead
        return [experiences.nothing(self._draw[0])]

    async def _group(self, parts: Parts, fleet: Fleet, draw: Draw) -> Group:
        sampling = sampling_for(parts.runner.config, self._split)

        async def run(workflow_task: WorkflowTask) -> Episode:
            return await fleet.run(workflow_task, sampling)

        def ended(episode: Episode) -> None:
            mailbox.tell(Session.episode_over, self._step, episode)

        pool = RolloutPool(run, max_parallel=parts.max_parallel, on_episode=ended, judge_group=fleet.judge_group)
        return (await pool.run_groups([draw], repeat=self._repeat, split=self._split))[0]


_made: tuple[Parts, Fleet] | None = None
"""State of a runner's process, created with its first task."""
_making = asyncio.Lock()


async def _here(model: Any, auxiliary: list[Any]) -> tuple[Parts, Fleet]:
    global _made
    async with _making:
        if _made is None:
            parts = await mailbox.ask(Session.get_parts)
            servers = [(f"{judge.api_address}/v1", judge.model_name) for judge in auxiliary]
            environ = {**parts.environ, **facts.helper_environ(servers, parts.helper_names)}
            engine = partial(connect, model.api_address, model.api_key, model.model, parts.max_model_len)

            def start() -> Fleet:  # blocks until its worker has started
                def note(text: str) -> None:
                    mailbox.tell(Session.noted, text)

                return Fleet(parts.runner, engine, workers=1, environ=environ, model=parts.model, note=note, here=True)

            _made = parts, await in_daemon_thread(start)
        return _made


class DrawReader(BufferReader):
    """Reader set as the taskset's ``storage_type``: it requests draws from the run, which has all state."""

    def __init__(self, config: StorageConfig) -> None:
        """Ignore the configuration; the run has all settings."""

    async def read(self, batch_size: int | None = None, **kwargs: Any) -> list[Task]:
        """Return the groups of the next step.

        :raises StopAsyncIteration: There are no more steps.
        """
        drawn = await mailbox.ask(Session.next_draws)
        if not drawn[1]:
            raise StopAsyncIteration
        return group_tasks(drawn)

    def __len__(self) -> int:
        return 0

    def state_dict(self) -> dict[str, int]:
        return {"current_index": 0}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing: see the class."""


def group_tasks(drawn: Drawn, *, validation: bool = False) -> list[Task]:
    """Return one Trinity task for each draw."""
    step, draws, repeat = drawn
    return [
        Task(workflow=GroupWorkflow, repeat_times=repeat, raw_task={"step": step, "draw": draw}, is_eval=validation)
        for draw in draws
    ]
