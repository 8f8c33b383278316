"""Inference engine over one of Trinity's rollout engines.

Each rollout engine has its own OpenAI server, whose completions route accepts and returns token IDs.  The engine's
actor reports the version of its weights; it is queried before each generation, so that a version is never newer than
the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.types import Generation, SamplingParams
from astuner_debug.engine import OpenAICompletionsEngine


class TrinityEngine(InferenceEngine):
    """One rollout model of Trinity."""

    def __init__(self, server: OpenAICompletionsEngine, actor: Any, *, max_model_len: int) -> None:
        """:param actor: Handle of Trinity's ``InferenceModel``."""
        server.max_model_len = self.max_model_len = min(max_model_len, server.max_model_len)
        self._server, self._actor = server, actor

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        version: int = await self._actor.get_model_version.remote()
        return replace(await self._server.generate(prompt_ids, sampling), policy_version=version)


def connect(address: str, api_key: str, actor: Any, max_model_len: int) -> TrinityEngine:
    """Return the engine whose server listens at ``address``.

    :raises RunError: It does not answer, or does not return token IDs.
    """
    server = OpenAICompletionsEngine(f"{address}/v1", api_key=api_key)
    return TrinityEngine(server, actor, max_model_len=max_model_len)


def start_engine(told: Any, *, max_model_len: int) -> TrinityEngine:
    """Start one engine with the configured weights, without explorer and trainer, for `eval` and `chat`.

    It ends with the connection to Ray.

    :raises RunError: Its server does not answer.
    """
    from trinity.common.models.allocator import Allocator

    told.explorer.rollout_model.engine_num, told.explorer.auxiliary_models = 1, []
    (model,), _ = asyncio.run(Allocator(told.explorer).create_all_models())
    return connect(model.api_address, model.api_key, model.model, max_model_len)
