"""Optimizer for VERL's FSDP 2 engine: AdamW or Muon with the learning rate of `astuner_objectives.schedule`.

It updates weights exactly as the local backbone does, so an experiment file means the same on every backbone; Trinity
uses VERL's engine too.  VERL passes parameters without names, some of them frozen, each a DTensor of which a process
holds some rows; it clips the gradients, and skips a step with gradients that are not finite.  The weights are float32.

`muon` applies to hidden matrices; embeddings and the vocabulary head use AdamW.  Without names, matrices with as many
rows as the vocabulary has entries count as embeddings.  A hidden matrix with this number of rows therefore uses AdamW,
and a table of positions, which few models still have, uses Muon.

The position in the learning-rate schedule follows from the training step, which the loss reads from its rows in the
same process (`astuner_ray.training.before_update`); no number of optimizer steps has to be saved.

Invariants: a step whose gradients are all exactly zero changes nothing, as on the other backbones; the state dict
contains everything that a resumed run needs, and hyperparameters come from the resumed run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from astuner import Optim
from astuner.contracts.errors import CheckpointError
from astuner_objectives import muon
from astuner_objectives.schedule import learning_rate
from astuner_ray.training.before_update import training_step


class PolicyOptimizer(torch.optim.Optimizer):
    """Optimizer of the trainable weights in `params`.

    Its state is flat and its groups are plain, as VERL's offloading and checkpoints expect: AdamW's moments and Muon's
    momentum side by side.

    :param total_steps: Positions in the run's schedule, for schedules that decay.
    :param updates_per_step: Positions of one training step: ``mini_batch_num * ppo_epochs``.
    :param vocab_size: Rows of the embedding, including padding.
    :param optim: The remaining settings of `astuner.config.schema.Optim`.
    :raises ConfigError: A schedule that decays without `total_steps`.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        total_steps: int | None,
        updates_per_step: int,
        vocab_size: int,
        **optim: Any,
    ) -> None:
        self.config = Optim(lr=lr, weight_decay=weight_decay, **optim)
        self.total_steps, self.updates_per_step = total_steps, updates_per_step
        self._training_step, self._taken = 0, 0
        learning_rate(self.config, self.config.lr_warmup_steps, total_steps)  # fail now if the schedule has no end
        weights = list(params)
        if not any(_is_vocabulary(w, vocab_size) for w in weights):
            raise ValueError(f"vocab_size is {vocab_size}, but no matrix of the model has as many rows")
        trained = [w for w in weights if w.requires_grad]
        if not trained:
            raise ValueError("the model has no trainable weights")
        c = self.config
        hidden = {
            id(w) for w in trained if c.optimizer == "muon" and w.dim() == 2 and not _is_vocabulary(w, vocab_size)
        }
        rest = [w for w in trained if id(w) not in hidden]
        groups: list[dict[str, Any]] = [
            {"params": [w for w in trained if id(w) in hidden], "muon": True},
            {"params": [w for w in rest if w.dim() >= 2]},
            {"params": [w for w in rest if w.dim() < 2], "weight_decay": 0.0},  # norms and biases
        ]
        fused = all(w.device.type in ("cpu", "cuda") for w in trained) or None  # None: torch chooses
        self._adamw = torch.optim.AdamW(trained, lr=c.lr, betas=c.betas, weight_decay=c.weight_decay, fused=fused)
        super().__init__([g for g in groups if g["params"]], {**self._adamw.defaults, "muon": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply the gradients, which VERL has clipped."""
        rate = learning_rate(self.config, self._next_position(), self.total_steps)
        if _all_zero([w.grad for g in self.param_groups for w in g["params"] if w.grad is not None]):
            return
        for group in self.param_groups:
            group["lr"] = rate  # VERL's constant schedule writes the peak there
        # assign each time: loading a state creates new objects
        self._adamw.state, self._adamw.param_groups = self.state, [g for g in self.param_groups if not g["muon"]]
        self._adamw.step()
        for group in self.param_groups:
            if group["muon"]:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self._muon(weight, rate)

    def _next_position(self) -> int:
        """Return the position of this call in the schedule, from 0."""
        if (step := training_step()) != self._training_step:
            self._training_step, self._taken = step, 0
        self._taken += 1
        return (step - 1) * self.updates_per_step + self._taken - 1

    def _muon(self, weight: Tensor, rate: float) -> None:
        """Apply Muon as on a single device; orthogonalization needs the full matrix of a sharded weight."""
        grad = weight.grad
        assert grad is not None
        if "momentum_buffer" not in self.state[weight]:
            self.state[weight]["momentum_buffer"] = torch.zeros_like(grad)
        ahead = muon.look_ahead(grad, self.state[weight]["momentum_buffer"], self.config.momentum)
        direction = _sharded(muon.orthogonal(_gathered(ahead)), weight)
        muon.move(weight, direction, rate=rate, weight_decay=self.config.weight_decay)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state, but keep the settings of this optimizer.

        :raises CheckpointError: The state belongs to other weights or to another kind of optimizer.
        """
        saved = [(g.get("muon"), len(g["params"])) for g in state_dict["param_groups"]]
        mine = [(g["muon"], len(g["params"])) for g in self.param_groups]
        if saved != mine:
            raise CheckpointError(
                f"the optimizer state covers {_in_words(saved)}, but this run trains {_in_words(mine)}; resume with "
                "the astuner.model and trainer_common.optim.optimizer settings of the checkpoint"
            )
        settings = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        super().load_state_dict(dict(state_dict))
        for group, kept in zip(self.param_groups, settings, strict=True):
            group.update(kept)


def _is_vocabulary(weight: Tensor, vocab_size: int) -> bool:
    return weight.dim() == 2 and weight.shape[0] == vocab_size


def _in_words(groups: Iterable[tuple[Any, int]]) -> str:
    return " and ".join(f"{n} weights by {'Muon' if muon else 'AdamW'}" for muon, n in groups)


def _all_zero(grads: list[Tensor]) -> bool:
    """Return whether all elements are zero, including those of other processes; True without gradients."""
    if not grads:
        return True
    # a sum of magnitudes, because squares of small numbers underflow in float32
    return not float(_gathered(torch.nn.utils.get_total_norm(grads, 1.0)))


def _gathered(tensor: Tensor) -> Tensor:
    """Return the full tensor of a sharded one in every process, on the device used for communication."""
    if not isinstance(tensor, DTensor):
        return tensor
    here: Any = tensor.to(tensor.device_mesh.device_type)
    whole: Tensor = here.full_tensor()
    return whole


def _sharded(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that every process has, sharded and placed like `like`, without communication."""
    if not isinstance(like, DTensor):
        return whole
    mesh = like.device_mesh
    copies = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=like.placements).to(like.device)
