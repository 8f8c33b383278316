"""Ray actor around a `CpuEngine` that replaces Trinity's vLLM engine.

Its methods are those of `trinity.common.models.vllm_model.vLLMRolloutModel`, which `hooks` replaces by this class.
Weights come from the trainer's memory through the Synchronizer, or from its checkpoints; NCCL is not supported.
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
    """One engine, for the trained model or for an auxiliary one."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        if config.enable_lora:
            raise ValueError("the CPU engine does not accept adapters; remove model.lora_configs, or use GPUs")
        self._prepared = False
        self._engine: CpuEngine | None = None
        self._open = contextlib.AsyncExitStack()
        self._url: str | None = None
        self._preparing = asyncio.Lock()

    async def prepare(self) -> None:
        """Load the model, and serve it over HTTP if Trinity's config enables that."""
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
        """Listen on this node's own address, which is 127.0.0.1 in a private Ray instance."""
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
        """Return the URL without ``/v1``; None without a server."""
        return self._url

    async def shutdown(self) -> None:
        await self._open.aclose()
        self._url = None

    # --------------------------------------------------------------------------------------------------------- weights

    async def sync_model_weights(self, model_version: int, method: SyncMethod, timeout: float = 1200) -> int:
        """Replace the weights by the trainer's between two tokens; return the loaded version.

        :raises TimeoutError: It took longer than ``timeout`` seconds.
        :raises ValueError: The weights do not match, or ``method`` needs GPUs; nothing is changed.
        """
        return await asyncio.wait_for(self._sync(model_version, method), timeout)

    async def _sync(self, model_version: int, method: SyncMethod) -> int:
        weights, version = await weights_of(self.config, model_version, method, self.logger)
        await self._ready.load(weights, version, at_once=True)
        self.logger.info(f"loaded weights of version {version}: {len(weights)} tensors")
        return version

    def get_model_version(self) -> int:
        return self._engine.version if self._engine is not None else 0

    @property
    def _ready(self) -> CpuEngine:
        if self._engine is None:
            raise RuntimeError("the engine is not prepared; call prepare() first")
        return self._engine

    # The engine keeps its weights in memory, and drops cached keys when they change.

    async def reset_prefix_cache(self) -> None: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake_up(self) -> None: ...


async def weights_of(config: Any, version: int, method: SyncMethod, logger: Any) -> tuple[dict[str, Tensor], int]:
    """Return the trainer's weights and their version; with method "memory", its newest.

    :param config: The engine's configuration, Trinity's `InferenceModelConfig`.
    :raises ValueError: ``method`` needs GPUs, or the trainer has not sent weights yet.
    """
    if method == SyncMethod.CHECKPOINT:
        folder = Path(config.checkpoint_job_dir) / f"global_step_{version}" / "actor"
        return await asyncio.to_thread(_from_checkpoint, folder, logger), version
    if method != SyncMethod.MEMORY:
        raise ValueError(f"the CPU engine does not support {method.value}; set synchronizer.sync_method: memory")
    from trinity.manager.synchronizer import Synchronizer

    weights, version = await Synchronizer.get_actor(namespace=config.ray_namespace).get_model_state_dict.remote()
    if not isinstance(weights, dict):
        raise ValueError("the Synchronizer has no weights, because the trainer has not sent any yet")
    return weights, version


def _from_checkpoint(folder: Path, logger: Any) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, unrounded if possible.

    Trinity's own functions read a full checkpoint in bfloat16: the Hugging Face model because of its config, regardless
    of its tensors, and verl's shards because verl rounds them when it joins them.
    """
    for place in (folder, folder / "huggingface"):
        if files := sorted(place.glob("*.safetensors")):
            return {name: tensor for file in files for name, tensor in load_file(file).items()}
    logger.warning(f"{folder} contains only verl's shards, which are joined in bfloat16: not exactly the policy")
    from trinity.common.models.utils import load_state_dict_iterator

    return dict(load_state_dict_iterator(str(folder)))
