"""Token ids in, token ids out, over an OpenAI-compatible ``/v1/completions``.

The completions route takes a prompt as token ids; vLLM (0.10.2 and newer) also returns ids when asked with
``return_token_ids``.  A server that returns text only is refused with the reason: re-tokenising its text would train
on tokens the model never produced.
"""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from astuner.backbone import InferenceEngine
from astuner.errors import ContextOverflow, ModelFailed, RunError
from astuner.rollout.threads import in_daemon_thread
from astuner.types import FinishReason, Generation, SamplingParams


class OpenAICompletionsEngine(InferenceEngine):
    """One model of one server."""

    def __init__(self, base_url: str, *, api_key: str = "", model: str | None = None, timeout: float = 600.0) -> None:
        """Ask the server what it serves.

        :raises RunError: it does not answer, does not serve ``model``, or cannot give token ids.
        """
        if not base_url.startswith(("http://", "https://")):
            raise RunError(f"astuner.debug.base_url is {base_url!r}; write for example http://127.0.0.1:8000/v1")
        self._base_url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self.model, self.max_model_len = self._find_model(model)
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
        return self._ask("/completions", body)

    def _find_model(self, wanted: str | None) -> tuple[str, int]:
        try:
            served = {m["id"]: m for m in self._ask("/models")["data"]}
        except (ModelFailed, KeyError, TypeError) as e:
            raise RunError(
                f"no OpenAI-compatible server answers at {self._base_url} ({e}); "
                "start one, or set astuner.debug.engine=local"
            ) from e
        if not served or (wanted is not None and wanted not in served):
            raise RunError(
                f"{self._base_url} serves {', '.join(served) or 'no model'}, not {wanted}; "
                "set astuner.model.path to match"
            )
        name = wanted or next(iter(served))
        return name, int(served[name].get("max_model_len") or 32768)

    def _check_token_ids(self) -> None:
        try:
            answer = self._complete([0], SamplingParams(max_tokens=1, temperature=0.0), 1)
            _generation([0], answer)
        except ModelFailed as e:
            raise RunError(
                f"the server at {self._base_url} cannot give token ids ({e}); training data needs the ids it really "
                "produced: use vLLM 0.10.2 or newer, or set astuner.debug.engine=local"
            ) from e

    def _ask(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base_url + route, data=data, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as e:
            with e:
                detail = e.read(2000).decode("utf-8", "replace")
            raise ModelFailed(f"{self._base_url}{route} answered {e.code}: {detail}") from None
        except (OSError, ValueError) as e:
            raise ModelFailed(f"{self._base_url}{route}: {e}") from e
        if not isinstance(answer, dict):
            raise ModelFailed(f"{self._base_url}{route} answered something that is not a JSON object")
        return answer


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
