"""A group of episodes in one of Trinity's workflow runners, and where Trinity's explorer reads which ones.

A Trinity task is a draw, and a run of it brings a whole group: all attempts, by the core's own `EpisodeRunner`, whose
engine is the runner's rollout model.  The run hears of each episode as it ends, and says of the group whether it is
trained on or what to run in its place.

A runner that dies is lost to Trinity's scheduler, and so are the tasks that it is handed; therefore agents and judges,
which may take their process with them, have one beside it (`astuner_ray.fleet`) that is replaced when it dies.

Invariant: nothing is scored for an episode that failed, and a task always brings an experience, for Trinity takes none
as a failure (`astuner_trinity.experiences.nothing`).
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
    """Set as ``default_workflow_type``."""

    is_async = True
    can_repeat = True

    def __init__(self, *, task: Task, model: Any, auxiliary_models: list[Any] | None = None) -> None:
        super().__init__(task=task, model=model)  # clients of the auxiliary models are the judges' own business
        self._step: int = task.raw_task["step"]
        self._draw: Draw = task.raw_task["draw"]
        self._split = Split.VALIDATION if task.is_eval else Split.TRAIN
        self._auxiliary = auxiliary_models or []
        self._repeat = 1

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """The attempts of the group."""
        self._repeat = repeat_times

    async def run_async(self) -> list[Experience]:
        """Run groups until one can be trained on, or the run says that it is enough.

        :raises RunError: the run is over.
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
"""What a runner's process has, made when its first task comes."""
_making = asyncio.Lock()


async def _here(model: Any, auxiliary: list[Any]) -> tuple[Parts, Fleet]:
    global _made
    async with _making:
        if _made is None:
            parts = await mailbox.ask(Session.get_parts)
            servers = [(f"{judge.api_address}/v1", judge.model_name) for judge in auxiliary]
            environ = {**parts.environ, **facts.helper_environ(servers, parts.helper_names)}
            engine = partial(connect, model.api_address, model.api_key, model.model, parts.max_model_len)

            def start() -> Fleet:  # waits for its worker
                def note(text: str) -> None:
                    mailbox.tell(Session.noted, text)

                return Fleet(parts.runner, engine, workers=1, environ=environ, model=parts.model, note=note, here=True)

            _made = parts, await in_daemon_thread(start)
        return _made


class DrawReader(BufferReader):
    """The taskset's ``storage_type``: asks the run for draws; what was drawn is in the run's state, none of it here."""

    def __init__(self, config: StorageConfig) -> None:
        """Everything that is to be known the run knows."""

    async def read(self, batch_size: int | None = None, **kwargs: Any) -> list[Task]:
        """The groups of the next step.

        :raises StopAsyncIteration: that was the last one.
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
        """Nothing: see the class."""


def group_tasks(drawn: Drawn, *, validation: bool = False) -> list[Task]:
    """Trinity's tasks for draws, one each."""
    step, draws, repeat = drawn
    return [
        Task(workflow=GroupWorkflow, repeat_times=repeat, raw_task={"step": step, "draw": draw}, is_eval=validation)
        for draw in draws
    ]
