"""A vLLM that this run starts, waits for, and stops."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from astuner.config.schema import Debug
from astuner.contracts.errors import Interrupted, MissingDependency, RunError
from astuner.rollout.completions_engine import OpenAICompletionsEngine
from astuner.support.processes import register


@contextmanager
def running_vllm(
    model: str,
    settings: Debug,
    *,
    max_model_len: int | None,
    log: Path,
    interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[OpenAICompletionsEngine]:
    """Serve ``model`` on loopback with a key of its own until the block ends.

    :param interrupted: asked while waiting; once it says yes, the server is stopped.
    :raises Interrupted: it did.
    :raises MissingDependency: vLLM is not installed.
    :raises RunError: it ended, or did not answer within ``debug.startup_timeout``; its log is named.
    """
    program = shutil.which("vllm")
    if program is None:
        raise MissingDependency(
            "astuner.debug.engine=vllm needs vLLM, which is not installed; "
            "pip install vllm (GPU), or set astuner.debug.engine=local"
        )
    key = secrets.token_urlsafe(32)
    command = [
        program, "serve", model, "--host", "127.0.0.1", "--port", str(settings.debug_vllm_port),
        "--seed", str(settings.debug_vllm_seed), "--tensor-parallel-size", str(settings.debug_tensor_parallel_size),
    ]  # fmt: skip
    if max_model_len is not None:
        command += ["--max-model-len", str(max_model_len)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        server = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "VLLM_API_KEY": key},
        )
    try:
        with register(server.pid, f"vllm serve {model}", log.parent):
            yield _wait(server, settings, key, log, interrupted)
    finally:
        _stop(server)


def _wait(
    server: subprocess.Popen[bytes], settings: Debug, key: str, log: Path, interrupted: Callable[[], bool]
) -> OpenAICompletionsEngine:
    url = f"http://127.0.0.1:{settings.debug_vllm_port}/v1"
    deadline = time.monotonic() + settings.startup_timeout
    while True:
        if interrupted():
            raise Interrupted(f"stopped on request while vLLM was starting; its log is {log}")
        if server.poll() is not None:
            raise RunError(f"vLLM ended with status {server.returncode} before it answered; its log is {log}")
        try:
            return OpenAICompletionsEngine(url, api_key=key)
        except RunError as e:
            if "cannot give token ids" in str(e):
                raise
            if time.monotonic() > deadline:
                raise RunError(
                    f"vLLM did not answer at {url} within astuner.debug.startup_timeout = "
                    f"{settings.startup_timeout:g} s; its log is {log}"
                ) from e
        time.sleep(0.5)


def _stop(server: subprocess.Popen[bytes], grace: float = 20.0) -> None:
    """End the server and its workers: they share the session this run gave them, and nothing else is in it."""
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
