"""Trinity's vLLM engine, as it runs on a CPU."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import vllm
from safetensors.torch import save_file
from trinity.common.constants import SyncMethod
from trinity.common.models.vllm_patch import api_patch_v17

from astuner_trinity_cpu.rollout_model import weights_of


def adapt(engine: type[Any]) -> None:
    """:param engine: Trinity's `vLLMRolloutModel`, which Ray finds by its name."""
    prepare_on_gpus = engine.prepare

    async def prepare(self: Any) -> None:
        listening = functools.partial(api_patch_v17.create_server_socket, reuse_port=False)  # vLLM 0.28 asks
        with (
            mock.patch.object(vllm, "AsyncEngineArgs", _engine_args),
            mock.patch.object(api_patch_v17, "create_server_socket", listening),
        ):
            await prepare_on_gpus(self)
            await asyncio.sleep(0)  # the server is a task, and takes its socket as soon as it runs

    async def init_process_group(self: Any, *_: Any, **__: Any) -> None:
        """Nothing: it is NCCL's, which Trinity uses for every way of the weights."""

    async def sync_model_weights(self: Any, model_version: int, method: SyncMethod, timeout: float = 1200) -> int:
        weights, version = await weights_of(self.config, model_version, method, self.logger)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.safetensors"
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, file)
            await self.async_llm.pause_generation(mode="keep", clear_cache=False)
            await self.async_llm.reset_prefix_cache(reset_running_requests=True)
            await self._collective_rpc("load_from", timeout=timeout, args=(str(file),))
            await self.async_llm.resume_generation()
        self.model_version = version
        return version

    engine.prepare, engine.init_process_group = prepare, init_process_group
    engine.sync_model_weights = sync_model_weights


def _engine_args(*, weight_transfer_config: Any, **given: Any) -> Any:
    """vLLM's settings as Trinity makes them, but for what asks for GPUs."""
    return _ENGINE_ARGS(**{**given, "worker_cls": "trinity_on_vllm.worker.TrinityCpuWorker"})


_ENGINE_ARGS = vllm.AsyncEngineArgs
