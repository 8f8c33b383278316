"""One rank of an actor that trains with VERL's FSDP 2 engine, without Ray, on the cases of a file.

``python PROGRAM RANK WORLD PORT FOLDER``, where the program calls `main`, reads ``cases.pt`` in the folder (experiment
file -> its weights that are not the model's, its cases) and writes ``WORLD-RANK.pt``: case -> what `Actor.train`
returned.
"""

from __future__ import annotations

import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

TEMPERATURE = 0.8
PAD_TO = 4
"""Rows are filled up to a multiple of this, as a run does for its workers and mini-batches."""


class Actor(ABC):
    """A worker whose optimizer's steps are watched."""

    def __init__(self, worker: Any, rank: int, world: int) -> None:
        """:param worker: VERL's ``ActorRolloutRefWorker``, or one that extends it; its model is made."""
        self.worker, self.rank, self.world = worker, rank, world
        self.engine = worker.actor.engine
        self.weights = dict(self.engine.module.named_parameters())
        self.start = {name: weight.full_tensor().clone() for name, weight in self.weights.items()}
        self.trained = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        self.gradients: dict[str, torch.Tensor] = {}
        self.rate = 0.0
        self.engine.optimizer.register_step_pre_hook(self._before_step)

    @classmethod
    @abstractmethod
    def make(cls, experiment: Path, rank: int, world: int) -> Actor:
        """The actor of an experiment."""

    @abstractmethod
    def train(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Train on ``case["samples"]`` as ``case["settings"]`` say, from the model's own weights."""

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Replace these weights."""
        from torch.distributed.tensor import distribute_tensor

        with torch.no_grad():
            for name, new in weights.items():
                weight = self.weights[name]
                weight.copy_(distribute_tensor(new.clone(), weight.device_mesh, weight.placements))

    def reset(self, rate: float) -> None:
        """Forget what was trained; steps are taken at ``rate`` from now on."""
        self.load(self.start)
        self.engine.optimizer.state.clear()
        self.rate = rate

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.gradients = {name: weight.grad.full_tensor().clone() for name, weight in self.trained.items()}
        optimizer.config = optimizer.config.model_copy(update={"lr": self.rate})  # each case has a rate of its own


def main(actor: type[Actor], rank: str, world: str, port: str, folder: str) -> None:
    """Run a rank."""
    os.environ.update(
        RANK=rank,
        WORLD_SIZE=world,
        LOCAL_RANK=rank,
        LOCAL_WORLD_SIZE=world,
        RAY_LOCAL_WORLD_SIZE=world,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        TORCHDYNAMO_DISABLE="1",  # compiling takes longer than everything else
    )
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for experiment, (weights, cases) in torch.load(Path(folder, "cases.pt"), weights_only=False).items():
        made = actor.make(Path(folder, experiment), int(rank), int(world))
        gc.freeze()  # verl collects garbage several times a step, and would look through all that was imported
        made.start |= weights
        results |= {name: made.train(case) for name, case in cases.items()}
    torch.save(results, Path(folder, f"{world}-{rank}.pt"))
