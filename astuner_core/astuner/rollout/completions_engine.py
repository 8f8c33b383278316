"""Token ids in, token ids out, over an OpenAI-compatible ``/v1/completions``.

The completions route takes a prompt as token ids; vLLM (0.10.2 and newer) also returns ids when asked with
``return_token_ids``.  A server that returns text only is refused with the reason: re-tokenising its text would train
on tokens the model never produced.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.errors import ContextOverflow, ModelFailed, RunError
from astuner.contracts.types import FinishReason, Generation, SamplingParams
from astuner.support.http_client import HttpError, JsonClient
from astuner.support.threads import in_daemon_thread

MAX_REPLY = 1 << 26
"""Bytes: about 100 for each token of an answer (ids, text, log-probabilities), and the prompt's ids again."""


class OpenAICompletionsEngine(InferenceEngine):
    """One model of one server."""

    def __init__(self, base_url: str, *, api_key: str = "", model: str | None = None, timeout: float = 600.0) -> None:
        """Ask the server what it serves.

        :param model: the model's name on the server; None takes the only one there is.
        :raises RunError: it does not answer, does not serve ``model``, or cannot give token ids.
        """
        self._client = _client(base_url, api_key, timeout)
        served = self._find_model(model)
        self.model, self.max_model_len = served.id, served.max_model_len
        self._check_token_ids()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.max_model_len}"
            )
        answer = await in_daemon_thread(self._complete, list(prompt_ids), sampling, min(sampling.max_tokens, room))
        return _generation(prompt_ids, answer)

    def _complete(self, prompt_ids: list[int], sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)  # vLLM's token ids go on to the token that completes it
        return self._ask("/completions", body)

    def _find_model(self, wanted: str | None) -> ServedModel:
        served = {m.id: m for m in list_models(self._client)}
        if wanted is not None and wanted in served:
            return served[wanted]
        if wanted is None and len(served) == 1:
            return next(iter(served.values()))
        which = f"not {wanted}" if wanted is not None else "and which one is meant is not said"
        raise RunError(
            f"{self._client.base_url} serves {', '.join(served) or 'no model'}, {which}; "
            "set astuner.model.path to the one whose tokenizer is to be used"
        )

    def _check_token_ids(self) -> None:
        try:
            answer = self._complete([0], SamplingParams(max_tokens=1, temperature=0.0), 1)
            _generation([0], answer)
        except ModelFailed as e:
            raise RunError(
                f"the server at {self._client.base_url} cannot give token ids ({e}); training data needs the ids it "
                "really produced: use vLLM 0.10.2 or newer (--backbone debug needs none, by astuner.debug.engine=local)"
            ) from e

    def _ask(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            answer = self._client.get(route) if body is None else self._client.post(route, body)
        except HttpError as e:
            raise ModelFailed(str(e)) from None
        if not isinstance(answer, dict):
            raise ModelFailed(f"{self._client.base_url}{route} answered something that is not a JSON object")
        return answer


def connect(base_url: str, *, api_key: str = "", paths: Sequence[str]) -> tuple[OpenAICompletionsEngine, str]:
    """The engine for the model of an experiment, whose tokenizer will be used with it.

    :param paths: what the model may be called on the server: ``astuner.model.path`` and what it was located as.
    :returns: the engine, and a note (or nothing) when the server's only model is called something else, which may be
        the same model and may be one with other tokens.
    :raises RunError: as `OpenAICompletionsEngine`; or several models are served and none is called so.
    """
    served = list_models(_client(base_url, api_key, timeout=60.0))
    name = next((m.id for path in paths for m in served if path in (m.id, m.root)), None)
    engine = OpenAICompletionsEngine(base_url, api_key=api_key, model=name if name or len(served) == 1 else paths[0])
    note = (
        f"the server at {base_url} serves {engine.model!r} and astuner.model.path is {paths[0]!r}: if these are not "
        "the same model, the tokenizer is the wrong one; set astuner.model.path to what the server runs"
    )
    return engine, "" if name else note


@dataclass(frozen=True)
class ServedModel:
    """A line of ``/v1/models``."""

    id: str
    root: str
    """What vLLM loaded it from; empty where the server does not say."""
    max_model_len: int


def list_models(client: JsonClient) -> list[ServedModel]:
    """What a server serves.

    :raises RunError: it does not answer, or not with a list of models.
    """
    try:
        listed = client.get("/models")["data"]
        return [ServedModel(m["id"], m.get("root") or "", int(m.get("max_model_len") or 32768)) for m in listed]
    except (HttpError, LookupError, TypeError, ValueError, AttributeError) as e:
        reason = str(e) if isinstance(e, HttpError) else f"/models: {type(e).__name__}: {e}"
        raise RunError(
            f"no OpenAI-compatible server answers at {client.base_url} ({reason}); "
            "start one (--backbone debug needs none, with astuner.debug.engine=local)"
        ) from None


def _client(base_url: str, api_key: str, timeout: float) -> JsonClient:
    try:
        return JsonClient(base_url, api_key=api_key, timeout=timeout, max_reply=MAX_REPLY)
    except HttpError as e:
        raise RunError(f"the server's address (astuner.debug.base_url) or its key cannot be used: {e}") from None


def api_key_from(variable: str) -> str:
    """The key in the environment variable ``variable``, or none."""
    return os.environ.get(variable, "")


def _generation(prompt_ids: Sequence[int], answer: dict[str, Any]) -> Generation:
    try:
        choice = answer["choices"][0]
    except (KeyError, IndexError, TypeError):
        raise ModelFailed(f"the answer has no choices: {str(answer)[:200]}") from None
    ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list) or len(ids) != len(logprobs):
        missing = "token_ids" if not isinstance(ids, list) else "one logprob per token"
        raise ModelFailed(f"the answer has no {missing}")
    finish = FinishReason.STOP if choice.get("finish_reason") == "stop" else FinishReason.LENGTH
    return Generation(
        prompt_ids=list(prompt_ids), response_ids=ids, logprobs=logprobs, finish_reason=finish, policy_version=-1
    )
