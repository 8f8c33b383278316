"""verl's rollout servers without its trainer: a model that answers, for `eval`, `chat` and `debug`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from astuner_ray.redirect import Redirect
from astuner_verl.separate import serving_gpus

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient


@contextmanager
def standalone_servers(native: DictConfig, redirect: Redirect) -> Iterator[LLMServerClient]:
    """Start the servers that the configuration says, on GPUs of their own; they end with the Ray connection.

    :param native: verl's configuration; its model's path says what is served.
    """
    from verl.workers.rollout.llm_server import LLMServerManager

    rollout = native.actor_rollout_ref.rollout
    rollout.nnodes, rollout.n_gpus_per_node = serving_gpus(native)
    rollout.load_format = "auto"  # the weights come from the model's folder, not from a trainer
    with redirect.theirs():
        manager = LLMServerManager.create(config=native)
        with redirect.ours():
            yield manager.get_client()
