"""VERL's rollout backend ``hf_cpu``: a Ray actor that generates, and its counterpart in the trainer.

`HFServer` has the methods that VERL calls on a rollout server, `HFReplica` starts one, and `HFServerAdapter` in the
trainer's workers sends it the weights.  VERL defines the names.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from astuner_cpu.engine import CpuEngine


def server_name(replica_rank: int, suffix: str = "") -> str:
    """Return the Ray actor's name, which also serves as its address, because there is no HTTP server."""
    return f"hf_cpu_server_{replica_rank}{suffix}"


class HFServer:
    """Server that continues prompts of token IDs. Works without Ray too."""

    def __init__(self, config: Any, model_config: Any, replica_rank: int = 0) -> None:
        config, model_config = omega_conf_to_dataclass(config), omega_conf_to_dataclass(model_config)
        self.engine = CpuEngine(
            model_config.local_path,
            max_model_len=config.max_model_len or config.prompt_length + config.response_length,
            default_tokens=config.response_length,
            defaults={"ignore_eos": config.ignore_eos},
            seed=config.seed + replica_rank,
            max_rows=config.max_num_seqs,
            max_prefill_tokens=config.max_num_batched_tokens,
            dtype=config.dtype,
        )
        self.updates = 0

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **extra: Any
    ) -> TokenOutput:
        """Continue a prompt.

        ``stop_reason`` uses VERL's values: "completed" at an end token or the token limit, "aborted" by a pause.

        :raises ValueError: The prompt fills the context, or a parameter is not supported.
        """
        if given := sorted(name for name, value in extra.items() if value):
            raise ValueError(f"the CPU server of astuner-verl-cpu accepts text only, but received {given[0]!r}")
        (request,) = await self.engine.generate([int(token) for token in prompt_ids], sampling_params)
        return TokenOutput(
            token_ids=request.tokens,
            log_probs=request.logprobs if sampling_params.get("logprobs") else None,
            stop_reason="completed" if request.finished else "aborted",
            extra_fields={"global_steps": request.version},
        )

    async def load_weights(self, weights: dict[str, Tensor], global_steps: int | None = None) -> int:
        """Replace the weights once no request is running; return the number of updates so far.

        :raises ValueError: A tensor is missing or unknown; nothing is changed.
        """
        await self.engine.load(weights, global_steps, at_once=False)
        self.updates += 1
        return self.updates

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        return {"aborted_count": await self.engine.pause(reject=reject_request), "request_ids": []}

    async def resume_generation(self) -> None:
        await self.engine.resume()

    async def set_global_steps(self, global_steps: int) -> None:
        self.engine.version = global_steps

    # The server keeps its weights in memory, and a request's KV cache lives as long as the request.

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def start_profile(self, **_: Any) -> None: ...

    async def stop_profile(self) -> None: ...


class HFReplica(RolloutReplica):
    """Replica with one server on the machine of its first worker, regardless of the number of workers."""

    async def launch_servers(self) -> None:
        name = server_name(self.replica_rank, self.name_suffix)
        beside = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        where = NodeAffinitySchedulingStrategy(beside, soft=False)
        server = (
            ray.remote(HFServer)
            .options(name=name, max_concurrency=self.max_concurrency, num_cpus=0, scheduling_strategy=where)
            .remote(self.config, self.model_config, self.replica_rank)
        )
        self.servers.append(server)
        self._server_handle = server
        self._server_address = name


class HFServerAdapter(BaseRollout):
    """Adapter in each worker that has new weights for a replica; only a replica's first worker sends them.

    These are the trainer's workers, or, with `separate_async`, workers of the replica (`astuner_verl_cpu.weights`).
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ["RANK"])
        workers = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // workers if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % workers == 0

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | AsyncIterable[tuple[str, Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Send the weights. Every worker consumes the iterator, which gathers or receives tensors collectively."""
        if wire_format != "named_tensors":
            raise ValueError(f"the CPU server accepts weights as 'named_tensors', not as {wire_format!r}")
        if peft_config is not None:
            raise ValueError("the CPU server does not accept adapters; set actor_rollout_ref.model.lora.merge: true")
        whole = {
            name: tensor.detach().to("cpu", torch.float32, copy=True)
            async for name, tensor in ensure_async_iterator(weights)
        }
        if self.is_leader_rank:
            server = await asyncio.to_thread(ray.get_actor, server_name(self.replica_rank))
            await server.load_weights.remote(whole, global_steps=global_steps)
