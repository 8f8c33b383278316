"""Trainer of the local backbone: update weights from samples.

An update makes `ppo_epochs` passes over the batch, each divided into `mini_batch_num` optimizer steps, each accumulated
over micro-batches.  The loss of a step is sum_t w_t (policy_t + β KL_t - c H_t) over its trained tokens, where w is the
sample's `token_weight`, normalized by core over the full batch: the weights of a mini-batch are scaled up, so that its
loss is as if that part were the batch.

`astuner_objectives.step` defines which log-probabilities are "old".  Here the engine runs the same weights in the same
arithmetic (differences of about 1e-5 in float32), so the rollout's recorded ones are used unless a `rollout_is`
correction is enabled.

Invariants: weights change only in `PolicyOptimizer.step`, and only by finite gradients; omitting samples without a
gradient changes no scale, hence no gradient.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from astuner import TrainerCommon
from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.types import Sample
from astuner_local.allocator import give_back
from astuner_local.modeling import Dimensions, causal_lm, hidden_states, lm_head
from astuner_local.trainer.layout import MicroBatch, PrefixSharing, plan
from astuner_local.trainer.logprobs import token_logprobs
from astuner_local.trainer.lora import is_lora
from astuner_local.trainer.optim import PolicyOptimizer
from astuner_objectives.step import (
    kl_from_rollout,
    kl_penalty,
    logit_gradients,
    moves_without_advantage,
    old_logprobs,
    token_losses,
)

MAX_BAD_STEPS = 3
"""Consecutive optimizer steps without finite gradients after which the run ends."""


@dataclass(frozen=True)
class Batch:
    """Samples as arrays; lists run over samples, arrays over their trained tokens."""

    samples: Sequence[Sample]

    @cached_property
    def ids(self) -> list[np.ndarray]:
        return [np.asarray(s.input_ids, dtype=np.int64) for s in self.samples]

    @cached_property
    def trained(self) -> list[np.ndarray]:
        """Ascending positions of the trained tokens."""
        return [np.flatnonzero(np.asarray(s.loss_mask)) for s in self.samples]

    @cached_property
    def rollout_logprobs(self) -> list[np.ndarray]:
        return [np.asarray(s.logprobs, dtype=np.float32)[at] for s, at in zip(self.samples, self.trained, strict=True)]


def per_token(micro: MicroBatch, members: Sequence[int], columns: Sequence[np.ndarray]) -> Tensor:
    """Return columns (one array per sample of the batch) as float32 [N] in the order of `micro`'s trained tokens."""
    joined = np.concatenate([columns[members[i]] for i in micro.samples])
    return torch.from_numpy(joined.astype(np.float32, copy=False)).to(micro.owner.device)


def per_sample(micro: MicroBatch, members: Sequence[int], values: Sequence[float]) -> Tensor:
    """Return one value per sample of the batch, repeated for `micro`'s trained tokens: float32 [N]."""
    mine = torch.tensor([values[members[i]] for i in micro.samples], dtype=torch.float32, device=micro.owner.device)
    return mine.index_select(0, micro.owner)


@dataclass(frozen=True)
class MiniBatch:
    """Samples of one optimizer step."""

    members: tuple[int, ...]
    """Indices into the batch's samples."""
    scale: float
    """Factor of their token weights."""


def mini_batches(samples: Sequence[Sample], count: int, loss_agg_mode: str, rng: random.Random) -> list[MiniBatch]:
    """Distribute samples over `count` optimizer steps at random, keeping groups together if there are enough groups.

    With fewer groups than steps, episodes are distributed instead; an episode is never split, so with fewer episodes
    than steps there are fewer steps.  Under the ``seq-mean-token-sum`` modes a token's weight is a constant over the
    number of episodes, so a mini-batch is scaled by episodes; under the others the weights sum to 1 (or to the scored
    share), so it is scaled by the sum of weights.
    """
    if not samples:
        return []
    everyone = range(len(samples))
    if count == 1:
        return [MiniBatch(tuple(everyone), 1.0)]
    units: dict[str, list[int]] = {}
    for by in ("group_id", "episode_id"):
        units = {}
        for i in everyone:
            units.setdefault(getattr(samples[i], by), []).append(i)
        if len(units) >= count:
            break
    dealt = list(units.values())
    rng.shuffle(dealt)
    count = min(count, len(dealt))
    parts = [[i for unit in dealt[n::count] for i in unit] for n in range(count)]

    def size(members: Sequence[int]) -> float:
        if loss_agg_mode.startswith("seq-mean-token-sum"):
            return len({samples[i].episode_id for i in members})
        return sum(samples[i].token_weight * samples[i].trained_tokens for i in members)

    whole = size(everyone)
    return [MiniBatch(tuple(p), whole / size(p) if size(p) else 0.0) for p in parts]


class Meters:
    """Metrics of one update, accumulated on the device and read once.

    A mean over tokens covers all tokens trained in the update; a token counts once per pass.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Tensor | float, int]] = {}
        self._maxima: dict[str, Tensor] = {}
        self._counts: dict[str, float | Tensor] = {}

    def mean(self, name: str, values: Tensor) -> None:
        """Add values of any shape to a mean over all of them."""
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = (values.detach().sum(dtype=torch.float64) + total, count + values.numel())

    def maximum(self, name: str, values: Tensor) -> None:
        largest = values.detach().max()
        self._maxima[name] = torch.maximum(largest, self._maxima[name]) if name in self._maxima else largest

    def count(self, name: str, number: float | Tensor) -> None:
        """Add to a sum."""
        self._counts[name] = self._counts.get(name, 0.0) + (number.detach() if isinstance(number, Tensor) else number)

    def read(self) -> dict[str, float]:
        means = {name: float(total) / count for name, (total, count) in self._sums.items() if count}
        others: dict[str, float | Tensor] = {**self._maxima, **self._counts}
        return means | {name: float(value) for name, value in others.items()}


class Progress:
    """Counter of the samples that an update has processed. A sample counts once per pass."""

    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def add(self, samples: int) -> None:
        self._done += samples
        self._report(self._done, self._total)


@dataclass(frozen=True)
class _Update:
    """Data shared by the steps of one update; lists run over the batch's samples, arrays over trained tokens."""

    batch: Batch
    reference: Sequence[np.ndarray] | None
    old: Sequence[np.ndarray] | None
    """The trainer's log-probabilities before the update; None if they need no separate forward pass."""
    progress: Progress
    first: dict[int, Tensor] = field(default_factory=dict)
    """Sample -> the same values as computed in the first optimizer step, for samples in it."""
    meters: Meters = field(default_factory=Meters)

    def before(self) -> dict[int, np.ndarray]:
        """Return the log-probabilities before the update by sample, where known."""
        if self.old is not None:
            return {i: mine for i, mine in enumerate(self.old) if len(mine)}
        return {i: mine.float().cpu().numpy() for i, mine in self.first.items()}


class PolicyTrainer:
    """Trainer that updates a transformers causal LM (or a peft-wrapped one) in place.

    :param temperature: Sampling temperature of the rollouts; log-probabilities belong to that distribution.
    :param reference_model: Initial weights, for KL; not needed with LoRA, whose base weights are the reference.
    :param total_optimizer_steps: Optimizer steps of the run; required by schedules that decay.
    :param prefix_sharing: Whether to compute shared prefixes once: `auto` (if it saves time), `always`, `never`.
    :param base_dir: Folder of the experiment file, for custom losses.
    :raises ConfigError: Unsupported settings.
    """

    def __init__(
        self,
        model: Any,
        trainer_config: TrainerCommon,
        *,
        temperature: float,
        device: torch.device | str,
        reference_model: Any = None,
        total_optimizer_steps: int | None = None,
        prefix_sharing: PrefixSharing = "auto",
        seed: int = 0,
        base_dir: Path | None = None,
    ) -> None:
        if temperature <= 0:
            raise ConfigError(
                f"astuner.rollout.temperature is {temperature:g}, but greedy decoding gives no learning signal; "
                "set it above 0, e.g. 1.0"
            )
        if any(p.dtype == torch.float16 for p in model.parameters()):
            raise ConfigError(
                "astuner.model.dtype is float16, in which small gradients become 0; use bfloat16 (or float32)"
            )
        self.model, self.reference_model = model, reference_model
        self.config, self.temperature, self.device = trainer_config, temperature, torch.device(device)
        self.prefix_sharing, self.seed, self.base_dir = prefix_sharing, seed, base_dir
        needs_reference = trainer_config.use_kl_loss or trainer_config.algorithm.use_kl_in_reward
        if needs_reference and reference_model is None and not is_lora(model):
            raise ValueError("KL to the reference needs a reference_model, or LoRA adapters on the model")
        self.optimizer = PolicyOptimizer(model, trainer_config.optim, total_steps=total_optimizer_steps)
        self.updates = 0
        """Calls of `update` so far. It determines the learning rate and the mini-batches, so that steps without a
        gradient do not delay the schedule, and a resumed run repeats neither."""
        self.before_update: Mapping[int, np.ndarray] = {}
        """Last `update`: index of a sample -> log-probabilities of its trained tokens under the weights before it;
        `astuner.contracts.events.LogprobsComputed` describes which samples are included."""
        self._hidden_size = Dimensions.of(causal_lm(model).config).hidden
        self._bad_steps = 0

    # --- log-probabilities ------------------------------------------------------------------------------------

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Return the log-probabilities of each sample's trained tokens under the current weights; float32 [trained]."""
        return self._logprobs(Batch(samples), self.model)

    def kl_penalties(self, samples: Sequence[Sample]) -> dict[tuple[str, str], float]:
        """Return `kl_loss_coef` times the KL to the reference, summed over trained tokens, by (episode id, agent).

        `assign_credit` subtracts it from the rewards under ``use_kl_in_reward``; the policy's own log-probabilities are
        the rollout's.
        """
        if not samples:
            return {}
        batch = Batch(samples)
        penalties: dict[tuple[str, str], float] = {}
        for sample, mine, theirs in zip(samples, batch.rollout_logprobs, self.reference_logprobs(batch), strict=True):
            kl = kl_penalty(self.config.kl_loss_type, torch.from_numpy(mine), torch.from_numpy(theirs))
            total = self.config.kl_loss_coef * float(kl.sum())
            key = (sample.episode_id, sample.agent)
            penalties[key] = penalties.get(key, 0.0) + total
        return penalties

    def reference_logprobs(self, batch: Batch) -> list[np.ndarray]:
        """Return log-probabilities under the reference: the reference model, or the model without its adapters."""
        if self.reference_model is not None:
            return self._logprobs(batch, self.reference_model)
        if not is_lora(self.model):
            raise ValueError("there is no reference: pass a reference_model to PolicyTrainer, or train with LoRA")
        with self.model.disable_adapter():
            return self._logprobs(batch, self.model)

    @torch.no_grad()
    def _logprobs(self, batch: Batch, model: Any) -> list[np.ndarray]:
        members = [i for i, at in enumerate(batch.trained) if len(at)]
        found = [np.zeros(0, dtype=np.float32) for _ in batch.samples]
        for micro in self._plan(batch, members):
            values = self._forward(micro, model, with_entropy=False)[0].cpu().numpy()
            lengths = [len(batch.trained[members[i]]) for i in micro.samples]
            for i, mine in zip(micro.samples, np.split(values, np.cumsum(lengths)[:-1]), strict=True):
                found[members[i]] = mine
        return found

    def _plan(self, batch: Batch, members: Sequence[int]) -> list[MicroBatch]:
        return plan(
            [batch.ids[i] for i in members],
            [batch.trained[i] for i in members],
            budget=self.config.micro_batch_tokens,
            sharing=self.prefix_sharing,
            hidden_size=self._hidden_size,
            device=self.device,
        )

    def _forward(
        self, micro: MicroBatch, model: Any, *, with_entropy: bool, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        sources, row = torch.unique(micro.source, return_inverse=True)  # shared by samples that diverge later
        hidden = hidden_states(
            model,
            micro.input_ids,
            micro.position_ids,
            micro.attention,
            rows=sources,
            activation_checkpointing=self.config.activation_checkpointing,
        )
        return token_logprobs(
            hidden,
            lm_head(model),
            micro.target,
            row=row,
            temperature=self.temperature,
            with_entropy=with_entropy,
            entropy_grad=entropy_grad,
        )

    # --- the update -------------------------------------------------------------------------------------------

    def update(
        self, samples: Sequence[Sample], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> dict[str, float]:
        """Train on one batch of samples with advantages and token weights.

        :param progress: Called after each micro-batch with the numbers of processed samples and of all samples.
        :returns: Metrics; ``nothing_learnable`` is 1 if no sample has a gradient, and nothing has changed.
        :raises RunError: Several consecutive optimizer steps had no finite loss or gradient.
        """
        metrics = self._update(samples, progress)
        self.updates += 1
        return metrics

    def _update(self, samples: Sequence[Sample], progress: Callable[[int, int], None]) -> dict[str, float]:
        config, algorithm = self.config, self.config.algorithm
        self.before_update = {}
        if not samples:
            return _nothing()
        batch = Batch(samples)
        keep_zero = moves_without_advantage(config) or not algorithm.filter_zero_advantage
        carrying = {
            i
            for i, (sample, at) in enumerate(zip(samples, batch.trained, strict=True))
            if len(at) and sample.token_weight and (keep_zero or sample.advantage)
        }
        if not carrying:
            return _nothing()
        dealers = [random.Random(f"{self.seed}/{self.updates}/{epoch}") for epoch in range(config.ppo_epochs)]
        steps = [
            MiniBatch(members, mini.scale)
            for dealer in dealers
            for mini in mini_batches(samples, config.mini_batch_num, algorithm.loss_agg_mode, dealer)
            if (members := tuple(i for i in mini.members if i in carrying))
        ]
        needs_old = algorithm.rollout_is not in ("auto", "none") and len(steps) > 1
        work = _Update(
            batch=batch,
            reference=self.reference_logprobs(batch) if config.use_kl_loss else None,
            old=self._logprobs(batch, self.model) if needs_old else None,
            progress=Progress(progress, sum(len(mini.members) for mini in steps)),
        )
        self.model.train()  # only affects adapters' dropout, if configured
        give_back()  # memory of the rollout
        try:
            first = self.updates * config.ppo_epochs * config.mini_batch_num
            for number, mini in enumerate(steps):
                self._step(work, mini, position=first + number, weights_are_old=number == 0)
        finally:
            self.model.eval()
            self.optimizer.zero_grad()
            give_back()
        self.before_update = work.before()
        metrics = {"nothing_learnable": 0.0, **work.meters.read()}
        summed = [name for name in metrics if name == "pg_loss" or name.startswith("logit_grad/")]
        return metrics | {name: metrics[name] / len(steps) for name in summed}

    def _step(self, work: _Update, mini: MiniBatch, *, position: int, weights_are_old: bool) -> None:
        loss, norm, applied = 0.0, math.nan, False
        for micro in self._plan(work.batch, mini.members):
            part = self._loss(work, mini, micro, weights_are_old=weights_are_old)
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
            work.progress.add(len(micro.samples))
        if math.isfinite(loss):
            result = self.optimizer.step(position)
            norm, applied = result.grad_norm, result.applied
        self.optimizer.zero_grad()
        work.meters.count("optimizer_steps", float(applied))
        work.meters.count("skipped_steps", float(not applied))
        if applied:
            self._bad_steps = 0
            for name, number in (("loss", loss), ("grad_norm", norm), ("lr", result.lr)):
                work.meters.mean(name, torch.tensor(number, dtype=torch.float64))
            return
        self._bad_steps += 1
        if self._bad_steps >= MAX_BAD_STEPS:
            episodes = list(dict.fromkeys(work.batch.samples[i].episode_id for i in mini.members))
            raise RunError(
                f"the loss or its gradient was not finite in {self._bad_steps} consecutive optimizer steps (last: loss "
                f"{loss:g}, gradient norm {norm:g}, episodes {', '.join(episodes[:8])}"
                f"{' …' if len(episodes) > 8 else ''}); these steps did not change the weights. Lower "
                f"trainer_common.optim.lr (now {self.config.optim.lr:g}), or set astuner.model.dtype: float32, and "
                "check the log-probabilities of these episodes"
            )

    def _loss(self, work: _Update, mini: MiniBatch, micro: MicroBatch, *, weights_are_old: bool) -> Tensor:
        """Return the micro-batch's share of the step's loss, a scalar."""
        config, meters, members = self.config, work.meters, mini.members
        samples = work.batch.samples
        logprobs, entropy = self._forward(micro, self.model, with_entropy=True, entropy_grad=config.entropy_coeff != 0)
        assert entropy is not None
        rollout = per_token(micro, members, work.batch.rollout_logprobs)
        advantage = per_sample(micro, members, [s.advantage for s in samples])
        weight = per_sample(micro, members, [s.token_weight * mini.scale for s in samples])
        if weights_are_old:
            gap = (logprobs.detach() - rollout).abs()
            meters.mean("kl/mismatch_mean", gap)
            meters.maximum("kl/mismatch_max", gap)
            lengths = [len(work.batch.trained[members[i]]) for i in micro.samples]
            parts = torch.tensor_split(logprobs.detach(), list(itertools.accumulate(lengths))[:-1])
            work.first.update({members[i]: mine for i, mine in zip(micro.samples, parts, strict=True)})
        # without `work.old`, these are the weights before the update, or the value is not used
        before = logprobs.detach() if work.old is None else per_token(micro, members, work.old)
        losses = token_losses(
            config,
            logprobs=logprobs,
            rollout=rollout,
            old=old_logprobs(config.algorithm, rollout=rollout, before=before),
            advantage=advantage,
            owner=micro.owner,
            reference=None if work.reference is None else per_token(micro, members, work.reference),
            entropy=entropy,
            base_dir=self.base_dir,
        )
        meters.count("pg_loss", (weight * losses.policy).sum())
        for name, size in logit_gradients(config, losses, logprobs=logprobs, weight=weight, entropy=entropy).items():
            meters.count(name, size)
        if losses.correction is not None:
            meters.mean("rollout_is/weight", losses.correction)
        if losses.kl is not None:
            meters.mean("kl/ref", losses.kl)
        meters.mean("kl", kl_from_rollout(logprobs.detach(), rollout))
        meters.mean("entropy", entropy)
        meters.mean("ratio/mean", losses.ratio)
        meters.maximum("ratio/max", losses.ratio)
        meters.mean("clip_frac/low", losses.clipped_low.float())
        meters.mean("clip_frac/high", losses.clipped_high.float())
        for name, values in losses.more.items():
            meters.mean(name, values)
        meters.count("tokens/trained", len(micro.target))
        meters.count("tokens/raw", micro.raw_tokens)
        meters.count("tokens/computed", len(micro.input_ids))
        return (weight * losses.total).sum()

    # --- checkpoints ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """Return optimizer state and counters as flat tensors; the model's weights are saved separately."""
        return {"updates": torch.tensor(self.updates), **self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from `state_dict`; the model's weights must already be restored.

        :raises CheckpointError: The state belongs to another model or optimizer.
        """
        rest = dict(state)
        self.updates = int(rest.pop("updates"))
        self.optimizer.load_state_dict(rest)


def _nothing() -> dict[str, float]:
    return {"nothing_learnable": 1.0, "tokens/trained": 0.0, "optimizer_steps": 0.0, "skipped_steps": 0.0}
