"""Token ids in, token ids out, from one of Trinity's rollout engines.

Each engine has an OpenAI server of its own, whose completions route takes token ids and gives them back.  Which
version of the weights drew them the engine's actor says; it is asked before each generation, so that a version is
never newer than the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.types import Generation, SamplingParams
from astuner.rollout.completions_engine import OpenAICompletionsEngine


class TrinityEngine(InferenceEngine):
    """One rollout model of Trinity."""

    def __init__(self, server: OpenAICompletionsEngine, actor: Any, *, max_model_len: int) -> None:
        """:param actor: the handle of Trinity's ``InferenceModel``."""
        server.max_model_len = self.max_model_len = min(max_model_len, server.max_model_len)
        self._server, self._actor = server, actor

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        version: int = await self._actor.get_model_version.remote()
        return replace(await self._server.generate(prompt_ids, sampling), policy_version=version)


def connect(address: str, api_key: str, actor: Any, max_model_len: int) -> TrinityEngine:
    """The engine whose server listens at ``address``.

    :raises RunError: it does not answer, or gives no token ids.
    """
    server = OpenAICompletionsEngine(f"{address}/v1", api_key=api_key)
    return TrinityEngine(server, actor, max_model_len=max_model_len)
