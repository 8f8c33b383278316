"""Optimizer step: clip, then AdamW or Muon with the rate of `astuner_objectives.schedule`, always in float32.

A bfloat16 weight keeps 8 significant bits, so an update smaller than 1/256 of it is rounded away, and at the learning
rates of reinforcement learning (1e-6) almost every update is.  So each trainable weight that is not float32 has a
float32 *master*: gradients are accumulated in float32, the optimizer updates the master, and the model's weight is the
rounded master, written in place (the engine reads the same tensors).

A bfloat16 weight is rounded at random to one of its master's two neighbors, so that its mean equals the master
(stochastic rounding; Gupta et al. 2015).  With rounding to nearest it would not change until its master has moved
halfway to the next value, which takes half of the weights of SmolLM2-135M eight steps at a rate of 3e-5, so the first
steps would have almost no effect (`python -m benchmarks rounding`).

Invariant: after `step`, every trainable weight is its master or one of its neighbors in the weight's dtype, and the
same after a resume; a step whose gradients are not finite changes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from astuner import Optim
from astuner.contracts.errors import CheckpointError
from astuner_objectives import muon
from astuner_objectives.schedule import learning_rate


class Muon(torch.optim.Optimizer):
    """`astuner_objectives.muon` for hidden matrices."""

    def __init__(self, matrices: list[Tensor], *, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if (grad := weight.grad) is None:
                    continue
                if "momentum_buffer" not in self.state[weight]:
                    self.state[weight]["momentum_buffer"] = torch.zeros_like(grad)
                ahead = muon.look_ahead(grad, self.state[weight]["momentum_buffer"], group["momentum"])
                muon.move(weight, muon.orthogonal(ahead), rate=group["lr"], weight_decay=group["weight_decay"])


_NOISE = 1 << 20
"""Number of weights rounded with consecutive random numbers, which start at a random place among twice as many. Drawing
one number per weight takes ten times as long as adding it."""
_STATE = {torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"}, Muon: {"momentum_buffer"}}
"""State that each optimizer keeps per weight."""


@dataclass(frozen=True)
class StepResult:
    """Result of an optimizer step."""

    grad_norm: float
    """Global L2 norm before clipping."""
    lr: float
    applied: bool
    """False if the gradients were not finite and nothing was changed."""


class PolicyOptimizer:
    """Optimizer of a model's trainable weights.

    :param total_steps: Optimizer steps of the run, for schedules that decay.
    """

    def __init__(self, model: nn.Module, config: Optim, *, total_steps: int | None = None) -> None:
        learning_rate(config, config.lr_warmup_steps, total_steps)  # fail now if the schedule has no end
        self.config, self.total_steps, self.steps = config, total_steps, 0
        self._weights = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._weights:
            raise ValueError("the model has no trainable weights")
        self._masters: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            if weight.dtype == torch.float32:
                self._masters[name] = weight
            else:
                self._masters[name] = weight.detach().float()
                weight.register_post_accumulate_grad_hook(_moves_gradient_to(self._masters[name]))  # type: ignore[no-untyped-call]
        self._optimizers = self._build(model)

    def _build(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        hidden = _hidden_matrices(model) if self.config.optimizer == "muon" else set()
        matrices = [m for n, m in self._masters.items() if n in hidden]
        rest = [m for n, m in self._masters.items() if n not in hidden]
        c = self.config
        made: list[torch.optim.Optimizer] = []
        if matrices:
            made.append(Muon(matrices, lr=c.lr, weight_decay=c.weight_decay, momentum=c.momentum))
        if rest:
            groups = [
                {"params": [m for m in rest if m.dim() >= 2], "weight_decay": c.weight_decay},
                {"params": [m for m in rest if m.dim() < 2], "weight_decay": 0.0},  # norms and biases
            ]
            made.append(torch.optim.AdamW([g for g in groups if g["params"]], lr=c.lr, betas=c.betas, fused=True))
        return made

    def step(self, position: int) -> StepResult:
        """Apply the accumulated gradients and clear them.

        :param position: Position of this optimizer step in the learning-rate schedule, from 0.
        """
        lr = learning_rate(self.config, position, self.total_steps)
        masters = list(self._masters.values())
        norm = float(torch.nn.utils.clip_grad_norm_(masters, self.config.grad_clip))
        applied = math.isfinite(norm)
        if applied:
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr
                optimizer.step()
            self.steps += 1
            self._write_weights()
        self.zero_grad()
        return StepResult(norm, lr, applied)

    def zero_grad(self) -> None:
        for tensor in (*self._masters.values(), *self._weights.values()):
            tensor.grad = None

    @torch.no_grad()
    def _write_weights(self) -> None:
        rng, noise = random.Random(self.steps), None
        for name, weight in self._weights.items():
            master = self._masters[name]
            if weight.dtype != torch.bfloat16:
                if master is not weight:
                    weight.copy_(master)
                continue
            if noise is None:
                drawn = torch.Generator(device=master.device).manual_seed(self.steps)
                noise = torch.randint(1 << 16, (2 * _NOISE,), dtype=torch.int32, device=master.device, generator=drawn)
            for part, exact in zip(*(torch.split(t.view(-1), _NOISE) for t in (weight, master)), strict=True):
                start = rng.randrange(_NOISE)
                bits = exact.view(torch.int32) + noise[start : start + len(exact)]
                part.copy_(bits.bitwise_and_(-1 << 16).view(torch.float32))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state for a resumed run as flat tensors (live, not copies): moments, masters, number of steps."""
        state = {"steps": torch.tensor(self.steps)}
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                state[f"master/{name}"] = master
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(master, {}).items():
                    state[f"{key}/{name}"] = value
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; float32 model weights must already be restored.

        :raises CheckpointError: The state belongs to another model or optimizer.
        """
        fresh = dict(state)
        self.steps = int(fresh.pop("steps"))
        of_optimizer = {id(m): o for o in self._optimizers for g in o.param_groups for m in g["params"]}
        loaded: dict[str, dict[str, Any]] = {}
        for key, value in fresh.items():
            kind, _, name = key.partition("/")
            if name not in self._masters or (value.dim() and value.shape != self._masters[name].shape):
                raise CheckpointError(
                    f"the optimizer state has {key} of shape {tuple(value.shape)}, which does not fit this model; "
                    "resume with the astuner.model and trainer_common.optim settings of the checkpoint"
                )
            loaded.setdefault(name, {})[kind] = value
        for name, master in self._masters.items():
            entries = loaded.get(name, {})
            saved = entries.pop("master", None)
            if master is not self._weights[name]:
                if saved is None:
                    raise CheckpointError(
                        f"the optimizer state has no float32 master of {name}, because a float32 run wrote it; "
                        "resume with astuner.model.dtype: float32"
                    )
                master.copy_(saved)
            optimizer = of_optimizer[id(master)]
            expected = _STATE[type(optimizer)] if entries else set()
            if set(entries) != expected:
                raise CheckpointError(
                    f"the optimizer state of {name} has {sorted(entries)}, but {type(optimizer).__name__} needs "
                    f"{sorted(expected)}; resume with the trainer_common.optim.optimizer of the checkpoint"
                )
            optimizer.state[master] = {k: v.to(master.device, copy=True) for k, v in entries.items()}
        self._write_weights()


def _moves_gradient_to(master: Tensor) -> Any:
    """Return a hook that adds a weight's gradient to its master's in float32 and frees it, once per backward pass."""

    def hook(weight: Tensor) -> None:
        if weight.grad is None:
            return
        if master.grad is None:
            master.grad = weight.grad.float()
        else:
            master.grad += weight.grad
        weight.grad = None

    return hook


def _hidden_matrices(model: nn.Module) -> set[str]:
    """Return the names of 2-D weights for Muon: all except embeddings and the vocabulary head (Jordan 2024)."""
    get_output = getattr(model, "get_output_embeddings", None)
    outer = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if get_output is not None and get_output() is not None:
        outer.append(get_output())
    excluded = {id(p) for m in outer for p in m.parameters()}
    return {n for n, p in model.named_parameters() if p.dim() == 2 and id(p) not in excluded and "embed" not in n}
