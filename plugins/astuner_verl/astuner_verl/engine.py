"""Token ids in, token ids out, through verl's own client of its rollout servers.

verl balances requests over its servers by request id, and the same id goes to the same server: an agent's turns find
their prefix in its cache.  In the asynchronous modes the client also carries a generation over an update of the
weights; its `policy_version` is then that of its first token.
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
    """One model behind verl's rollout servers."""

    def __init__(self, client: LLMServerClient, *, max_model_len: int, strings: bool = True) -> None:
        """:param client: as `PPOTrainer.get_llm_client` gives it; it may be used in any process of the Ray cluster.
        :param strings: whether the servers have a tokenizer, and so end at stop strings.
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
        except Exception as e:  # verl, Ray and the engine behind them have no common base
            raise ModelFailed(f"verl's rollout server failed: {type(e).__name__}: {last_words(e)}") from e
        return _generation(prompt_ids, output, sampling, most)


def _parameters(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """As verl's servers take them: vLLM's names; a name that vLLM does not know would be an error there."""
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
            f"verl's rollout server gave {len(ids)} tokens and {0 if logprobs is None else len(logprobs)} "
            "log-probabilities; training needs one for each token"
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
