"""Engine over an OpenAI-compatible ``/v1/completions`` server, including a vLLM server that this module starts.

The completions route accepts a prompt as token IDs.  vLLM 0.10.2 and newer also returns IDs if a request sets
``return_token_ids``.  A server that returns text only is refused: re-tokenized text would train on tokens that the
model never produced.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astuner import DebugSection, in_daemon_thread, recorded_process
from astuner.contracts.backbone import InferenceEngine
from astuner.contracts.errors import ContextOverflow, Interrupted, MissingDependency, ModelFailed, RunError
from astuner.contracts.types import FinishReason, Generation, SamplingParams
from astuner_http.client import HttpError, JsonClient, given_up_when_cancelled

TIMEOUTS = 600.0, 60.0
"""Timeouts in seconds of a generation and of the list of models."""
MAX_REPLY = 1 << 26
"""Bytes: about 100 per token of an answer (IDs, text, logprobs), plus the prompt's IDs."""


class OpenAICompletionsEngine(InferenceEngine):
    """One model of one server."""

    def __init__(self, base_url: str, *, api_key: str = "", paths: Sequence[str] = ()) -> None:
        """Connect to the server and select a model.

        :param paths: Accepted names of the model: ``astuner.model.path``, whose tokenizer is used, and the path that it
            resolves to. If the server has a single model, that model is used regardless of its name.
        :raises RunError: The server does not answer, serves several models of which none matches, or does not return
            token IDs.
        """
        try:
            self._client, asker = (
                JsonClient(base_url, api_key=api_key, timeout=seconds, max_reply=MAX_REPLY) for seconds in TIMEOUTS
            )
        except HttpError as e:
            raise RunError(f"invalid server address (astuner.debug.base_url) or API key: {e}") from None
        try:  # ID, path that vLLM loaded it from, and context length
            listed = asker.get("/models")["data"]
            served = [(m["id"], m.get("root") or "", int(m.get("max_model_len") or 32768)) for m in listed]
        except (HttpError, LookupError, TypeError, ValueError, AttributeError) as e:
            reason = str(e) if isinstance(e, HttpError) else f"/models: {type(e).__name__}: {e}"
            raise RunError(
                f"no OpenAI-compatible server answers at {self._client.base_url} ({reason}). "
                "Start one, or use astuner.debug.engine=local, which needs no server"
            ) from None
        named = next((m for path in paths for m in served if path in m[:2]), None)
        if named is None and len(served) != 1:
            which = f"but not {paths[0]}" if paths else "and no model is selected"
            raise RunError(
                f"{base_url} serves {', '.join(m[0] for m in served) or 'no model'}, {which}; "
                "set astuner.model.path to the served model, because its tokenizer is used"
            )
        self.model, _, self.max_model_len = named or served[0]
        self.note = ""
        """Warnings for the user: the served model has a different name, so the tokenizer may not match; logprobs do not
        belong to the sampling distribution."""
        if paths and named is None:
            self.note = (
                f"the server at {base_url} serves {self.model!r}, but astuner.model.path is {paths[0]!r}. If these are "
                "different models, the tokenizer does not match: set astuner.model.path to the model of the server"
            )
        self._check_token_ids()

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        room = self.max_model_len - len(prompt_ids)
        if room < 1:
            raise ContextOverflow(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {self.max_model_len}"
            )
        with given_up_when_cancelled():
            answer = await in_daemon_thread(self._complete, list(prompt_ids), sampling, min(sampling.max_tokens, room))
        return _generation(prompt_ids, answer)

    def _complete(self, prompt_ids: list[int], sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": 0.0,  # vLLM takes missing parameters from the model's generation_config.json
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        if sampling.stop:
            body["stop"] = list(sampling.stop)  # vLLM's token IDs include the token that completes the stop string
        try:
            answer = self._client.post("/completions", body)
        except HttpError as e:
            raise ModelFailed(str(e)) from None
        if not isinstance(answer, dict):
            raise ModelFailed(f"{self._client.base_url}/completions answered something that is not a JSON object")
        return answer

    def _check_token_ids(self) -> None:
        try:  # the likeliest token alone has probability 1 under the sampling distribution
            made = _generation([0], self._complete([0], SamplingParams(max_tokens=1, top_k=1), 1))
        except ModelFailed as e:
            raise RunError(
                f"the server at {self._client.base_url} cannot give token ids ({e}); training needs the exact IDs. "
                "Use vLLM 0.10.2 or newer, or astuner.debug.engine=local, which needs no server"
            ) from e
        if any(one < -1e-3 for one in made.logprobs):
            raw = f"the server at {self._client.base_url} returns log-probabilities before temperature, top_k and "
            raw += "top_p, which are wrong if one of them is set: start vLLM with --logprobs-mode processed_logprobs"
            self.note = f"{self.note}; {raw}" if self.note else raw


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


@contextmanager
def running_vllm(
    model: str,
    settings: DebugSection,
    *,
    max_model_len: int | None,
    dtype: str = "auto",
    log: Path,
    interrupted: Callable[[], bool] = lambda: False,
    trust_remote_code: bool = False,
) -> Iterator[OpenAICompletionsEngine]:
    """Serve ``model`` with vLLM on loopback, protected by a random key, until the block ends.

    :param interrupted: Polled during startup; if it returns True, the server is stopped.
    :raises Interrupted: ``interrupted`` returned True.
    :raises MissingDependency: vLLM is not installed.
    :raises RunError: The server ended or did not answer within ``debug.startup_timeout``; the message names its log.
    """
    program = shutil.which("vllm")
    if program is None:
        raise MissingDependency(
            "astuner.debug.engine=vllm needs vLLM, which is not installed. "
            "Run: pip install vllm (needs a GPU), or set astuner.debug.engine=local"
        )
    key = secrets.token_urlsafe(32)
    command = [
        program, "serve", model, "--host", "127.0.0.1", "--port", str(settings.debug_vllm_port),
        "--seed", str(settings.debug_vllm_seed), "--tensor-parallel-size", str(settings.debug_tensor_parallel_size),
        "--dtype", dtype, "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    if trust_remote_code:
        command.append("--trust-remote-code")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "VLLM_API_KEY": key},
        )
    try:
        with recorded_process(server.pid, f"vllm serve {model}", log.parent):
            yield _wait(server, settings, key, log, interrupted)
    finally:
        _stop(server)


def _wait(
    server: subprocess.Popen[bytes], settings: DebugSection, key: str, log: Path, interrupted: Callable[[], bool]
) -> OpenAICompletionsEngine:
    url = f"http://127.0.0.1:{settings.debug_vllm_port}/v1"
    deadline = time.monotonic() + settings.startup_timeout
    while True:
        if interrupted():
            raise Interrupted(f"stopped on request while vLLM was starting; log: {log}")
        if server.poll() is not None:
            raise RunError(f"vLLM ended with status {server.returncode} before it answered; log: {log}")
        try:
            return OpenAICompletionsEngine(url, api_key=key)
        except RunError as e:
            if "cannot give token ids" in str(e):
                raise
            if time.monotonic() > deadline:
                raise RunError(
                    f"vLLM did not answer at {url} within astuner.debug.startup_timeout = "
                    f"{settings.startup_timeout:g} s; log: {log}"
                ) from e
        time.sleep(0.5)


def _stop(server: subprocess.Popen[bytes], grace: float = 20.0) -> None:
    """End the server and its workers, which share a separate session."""
    for number, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        try:
            os.killpg(server.pid, number)
        except ProcessLookupError:
            break
        try:
            server.wait(wait)
        except subprocess.TimeoutExpired:
            continue
    server.wait()
