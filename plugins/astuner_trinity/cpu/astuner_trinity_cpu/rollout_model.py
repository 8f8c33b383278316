"""What Trinity takes for its vLLM engine: the Ray actor around a `CpuEngine`, with the methods that Trinity calls.

The method names are Trinity's (`trinity.common.models.vllm_model.vLLMRolloutModel`, in whose place `hooks` puts this).
Weights come from the trainer's memory through the Synchronizer, or from its checkpoints; there is no NCCL.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import ray
from safetensors.torch import load_file
from torch import Tensor
from trinity.common.constants import SyncMethod
from trinity.common.models.model import BaseInferenceModel

from astuner_cpu.engine import CpuEngine
from astuner_trinity_cpu.openai_server import OpenAIServer, bind, url


class CpuRolloutModel(BaseInferenceModel):
    """One engine, for the model that is trained or for an auxiliary one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.enable_lora:
            raise ValueError(
                "the CPU engine takes whole weights and no adapters; leave model.lora_configs out, or use GPUs"
            )
        self._prepared = False
        self._engine: CpuEngine | None = None
        self._open = contextlib.AsyncExitStack()
        self._url: str | None = None
        self._preparing = asyncio.Lock()

    async def prepare(self) -> None:
        """Load the model, and serve it over HTTP where Trinity's config says so."""
        async with self._preparing:
            if self._prepared:
                return
            self._engine = engine = await asyncio.to_thread(self._load)
            if self.config.enable_openai_api:
                await self._serve(engine)
            self._prepared = True

    def _load(self) -> CpuEngine:
        config = self.config
        return CpuEngine(
            config.model_path,
            max_model_len=config.max_model_len,
            default_tokens=config.max_response_tokens,
            defaults={
                "temperature": config.temperature,
                "top_p": config.top_p,
                "top_k": config.top_k,
                "repetition_penalty": config.repetition_penalty,
                "ignore_eos": config.ignore_eos,
            },
            seed=config.seed + config.engine_id,
            dtype=config.dtype if config.checkpoint_job_dir else "float32",  # a judge's: Trinity says bfloat16
        )

    async def _serve(self, engine: CpuEngine) -> None:
        """Listen on this node's own address, which is 127.0.0.1 where Ray is the run's own."""
        port = 0 if self.config.base_port is None else self.config.base_port + self.config.engine_id
        bound = bind(ray.util.get_node_ip_address(), port)
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        server = OpenAIServer(
            engine,
            name=self.config.model_path,
            chat_template=self.chat_template,
            template_kwargs=thinking,
        )
        await self._open.enter_async_context(server.serving(bound))
        self._url = url(bound)
        self.logger.info(f"{self.config.model_path} is served at {self._url}/v1")

    def get_api_server_url(self) -> str | None:
        """Without ``/v1``; None where no server is asked for."""
        return self._url

    async def shutdown(self) -> None:
        await self._open.aclose()
        self._url = None

    # --------------------------------------------------------------------------------------------------------- weights

    async def sync_model_weights(self, model_version: int, method: SyncMethod, timeout: float = 1200) -> int:
        """Take over the trainer's weights between two tokens; the version that is loaded then.

        :raises TimeoutError: it took longer than ``timeout`` seconds.
        :raises ValueError: the weights are not this model's, or ``method`` needs GPUs; nothing is changed then.
        """
        return await asyncio.wait_for(self._sync(model_version, method), timeout)

    async def _sync(self, model_version: int, method: SyncMethod) -> int:
        weights, version = await weights_of(self.config, model_version, method, self.logger)
        await self._ready.load(weights, version, at_once=True)
        self.logger.info(f"weights of version {version} are loaded: {len(weights)} tensors")
        return version

    def get_model_version(self) -> int:
        return self._engine.version if self._engine is not None else 0

    @property
    def _ready(self) -> CpuEngine:
        if self._engine is None:
            raise RuntimeError("the engine is not prepared; call prepare() first")
        return self._engine

    # The engine keeps its weights, and drops its keys with them.

    async def reset_prefix_cache(self) -> None: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self) -> None: ...


async def weights_of(config: Any, version: int, method: SyncMethod, logger: Any) -> tuple[dict[str, Tensor], int]:
    """The trainer's weights and their version, which in memory is its newest.

    :param config: the engine's, Trinity's `InferenceModelConfig`.
    :raises ValueError: ``method`` needs GPUs, or the trainer has not sent any yet.
    """
    if method == SyncMethod.CHECKPOINT:
        folder = Path(config.checkpoint_job_dir) / f"global_step_{version}" / "actor"
        return await asyncio.to_thread(_from_checkpoint, folder, logger), version
    if method != SyncMethod.MEMORY:
        raise ValueError(f"the CPU engine cannot sync by {method.value}; set synchronizer.sync_method: memory")
    from trinity.manager.synchronizer import Synchronizer

    weights, version = await Synchronizer.get_actor(namespace=config.ray_namespace).get_model_state_dict.remote()
    if not isinstance(weights, dict):
        raise ValueError("the Synchronizer has no weights: the trainer has not sent any yet")
    return weights, version


def _from_checkpoint(folder: Path, logger: Any) -> dict[str, Tensor]:
    """As they were trained, where the folder has them so.

    Trinity's own functions read a full checkpoint in bfloat16: the Hugging Face model because its config says so,
    whatever its tensors are, and verl's shards because verl rounds them as it joins them.
    """
    for place in (folder, folder / "huggingface"):
        if files := sorted(place.glob("*.safetensors")):
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
    logger.warning(f"{folder} has verl's shards only, which are joined in bfloat16: not exactly the policy")
    from trinity.common.models.utils import load_state_dict_iterator

    return dict(load_state_dict_iterator(str(folder)))
