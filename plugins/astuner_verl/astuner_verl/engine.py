"""Inference engine over VERL's client of its rollout servers.

VERL balances requests over its servers by request ID, and sends the same ID to the same server: an agent's turns find
their prefix in its cache.  In the asynchronous modes the client also continues a generation across an update of the
weights; its `policy_version` is then the version of its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.errors import ContextOverflow, ModelFailed
from astuner.contracts.types import FinishReason, Generation, SamplingParams
from astuner_ray.cluster import last_words

if TYPE_CHECKING:
    from verl.workers.rollout.llm_server import LLMServerClient


class VerlEngine(InferenceEngine):
    """One model behind VERL's rollout servers."""

    def __init__(self, client: LLMServerClient, *, max_model_len: int, strings: bool = True) -> None:
        """Wrap a client.

        :param client: Result of `PPOTrainer.get_llm_client`; usable in any process of the Ray cluster.
        :param strings: Whether the servers have a tokenizer, so that they can end at stop strings.
        """
        self._client = client
        self._strings = strings
        self.max_model_len = max_model_len

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.max_model_len}"
            )
        most = min(sampling.max_tokens, room)
        if not self._strings:
            sampling = replace(sampling, stop=())
        try:
            output = await self._client.generate(
                request_id=session, prompt_ids=list(prompt_ids), sampling_params=_parameters(sampling, most)
            )
        except Exception as e:  # VERL, Ray and the engine share no base class of errors
            raise ModelFailed(f"verl's rollout server failed: {type(e).__name__}: {last_words(e)}") from e
        return _generation(prompt_ids, output, sampling, most)


def _parameters(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Return sampling parameters under vLLM's names; vLLM rejects unknown names."""
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": max_tokens,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": True,
    }
    if sampling.seed is not None:
        parameters["seed"] = sampling.seed
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    return parameters


def _generation(prompt_ids: Sequence[int], output: Any, sampling: SamplingParams, max_tokens: int) -> Generation:
    ids, logprobs = output.token_ids, output.log_probs
    if logprobs is None or len(logprobs) != len(ids):
        raise ModelFailed(
            f"verl's rollout server returned {len(ids)} tokens but {0 if logprobs is None else len(logprobs)} "
            "log-probabilities; training needs one per token"
        )
    if ids and ids[-1] in sampling.stop_token_ids:
        finish = FinishReason.STOP
    elif output.stop_reason in ("aborted", "abort"):
        finish = FinishReason.CANCELLED
    else:
        finish = FinishReason.LENGTH if len(ids) >= max_tokens else FinishReason.STOP
    version = output.extra_fields.get("min_global_steps")
    return Generation(
        prompt_ids=list(prompt_ids),
        response_ids=ids,
        logprobs=logprobs,
        finish_reason=finish,
        policy_version=-1 if version is None else int(version),
    )
