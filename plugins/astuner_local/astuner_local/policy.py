"""One policy of a run: the engine that samples from its weights, and the trainer that updates them.

Invariant: weights that no trainer changes are in memory once, however many policies use them: the base under LoRA
adapters, the model of an untrained policy, the reference of the KL terms.  Weights that a trainer changes belong to one
policy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from astuner import AgentRegistry
from astuner_local.allocator import keep_freed_memory
from astuner_local.engine.engine import LocalEngine, Turns
from astuner_local.engine.kv_cache import bytes_per_token, default_token_budget
from astuner_local.memory import micro_batch_tokens
from astuner_local.modeling import Dimensions, LoadedModel, load_model
from astuner_local.settings import LocalSettings
from astuner_local.trainer.lora import is_lora, wrap
from astuner_local.trainer.trainer import PolicyTrainer

if TYPE_CHECKING:
    from astuner import Config


@dataclass(frozen=True, kw_only=True)
class LocalPolicy:
    """A loaded policy."""

    name: str
    loaded: LoadedModel
    engine: LocalEngine
    trainer: PolicyTrainer | None
    """None if none of its agents trains, so that it never changes."""


class Weights:
    """Models of an experiment, loaded on demand."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._shared: dict[str, LoadedModel] = {}

    def own(self, policy: str) -> LoadedModel:
        """Load a separate copy of a model."""
        return load_model(self._config.model_of(policy), path=self._config.locate_model(policy=policy))

    def shared(self, policy: str) -> LoadedModel:
        """Return a model that is not changed; policies that start from the same path share it."""
        path = self._config.locate_model(policy=policy)
        if path not in self._shared:
            loaded = self.own(policy)
            loaded.model.requires_grad_(False)
            self._shared[path] = loaded
        return self._shared[path]


def twin(model: Any) -> Any:
    """Return a second module tree with the same parameters and buffers, which can be wrapped separately."""
    return copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


@contextmanager
def running(config: Config, *, done: int, total_steps: int) -> Iterator[Mapping[str, LocalPolicy]]:
    """Yield every policy of the experiment, loaded, with a trainer if it learns, until the block ends.

    :param done: Completed steps; a resumed run draws different random numbers than the original run.
    :param total_steps: Steps of the run.
    """
    roster, weights = AgentRegistry.of(config.astuner), Weights(config)
    loaded = {name: _load(config, weights, name, name in roster.trained_policies) for name in roster.policies}
    several = len(loaded) > 1
    turns = Turns() if several else None
    with ExitStack() as stack:
        stack.enter_context(threads(config, *loaded.values()))
        policies = {}
        for name, mine in loaded.items():
            seed = f"{config.astuner.seed}/{done}" + (f"/{name}" if several else "")
            engine = start_engine(config, mine, seed=seed, engines=len(loaded), turns=turns)
            stack.callback(engine.close)
            trained = name in roster.trained_policies
            trainer = new_trainer(config, weights, name, mine, total_steps) if trained else None
            policies[name] = LocalPolicy(name=name, loaded=mine, engine=engine, trainer=trainer)
        yield policies


@contextmanager
def threads(config: Config, *models: LoadedModel) -> Iterator[None]:
    """Set the number of CPU threads, the allocator and the random seed for these models."""
    small = all(Dimensions.of(loaded.model.config).is_small for loaded in models)
    if not small and any(loaded.device.type == "cpu" for loaded in models):
        keep_freed_memory()
    before = torch.get_num_threads()
    torch.set_num_threads(LocalSettings.of(config).threads or (1 if small else before))
    torch.manual_seed(config.astuner.seed)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def start_engine(
    config: Config, loaded: LoadedModel, *, seed: str, engines: int = 1, turns: Turns | None = None
) -> LocalEngine:
    """Return an engine for ``loaded``.

    :param engines: Total number of engines, which share KV memory and base weights.
    """
    rollout, budget = config.astuner.rollout, LocalSettings.of(config).kv_token_budget
    if budget is None and engines > 1:
        size = bytes_per_token(Dimensions.of(loaded.model.config), loaded.dtype)
        budget = max(1, default_token_budget(size, loaded.device) // engines)
    return LocalEngine(
        loaded.model,
        tokenizer_eos_ids=loaded.eos_token_ids,
        max_model_len=rollout.max_model_len,
        max_num_seqs=rollout.max_num_seqs or rollout.max_env_worker,
        kv_token_budget=budget,
        seed=random.Random(seed).getrandbits(62),
        merge_adapters=engines == 1,
        turns=turns if loaded.device.type == "cpu" else None,
        decode=partial(loaded.tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
    )


def _load(config: Config, weights: Weights, name: str, trained: bool) -> LoadedModel:
    """Return the model of a policy: with adapters on a shared base, shared, or a separate copy."""
    lora, a = config.model_of(name).lora, config.astuner
    if not trained:
        return weights.shared(name)
    if not lora.rank:
        return weights.own(name)
    base = weights.shared(name)
    seed = a.seed if len(AgentRegistry.of(a).policies) == 1 else random.Random(f"{a.seed}/{name}").getrandbits(62)
    return replace(base, model=wrap(twin(base.model), lora, seed=seed))


def new_trainer(config: Config, weights: Weights, name: str, loaded: LoadedModel, total_steps: int) -> PolicyTrainer:
    """Return a trainer of a policy with a fresh optimizer."""
    a, common = config.astuner, config.astuner.trainer_common
    wants_reference = common.use_kl_loss or common.algorithm.use_kl_in_reward
    at_once = micro_batch_tokens(common, Dimensions.of(loaded.model.config), loaded.dtype, loaded.device)
    return PolicyTrainer(
        loaded.model,
        common.model_copy(update={"micro_batch_tokens": at_once}),
        temperature=a.rollout.temperature,
        device=loaded.device,
        # LoRA uses its frozen base as reference
        reference_model=weights.shared(name).model if wants_reference and not is_lora(loaded.model) else None,
        total_optimizer_steps=total_steps * common.mini_batch_num * common.ppo_epochs,
        prefix_sharing=LocalSettings.of(config).prefix_sharing,
        seed=a.seed,
        base_dir=config.base_dir,
    )
