"""A vLLM for CPUs, started as a user starts one; ``make test-vllm`` has it in an environment of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import astuner_local

MODEL = Path(os.environ.get("ASTUNER_TEST_MODEL") or Path(astuner_local.__file__).parent / "tiny" / "model")
"""A folder with the model to serve: the tiny one, or e.g. SmolLM2."""
START = 240.0
"""Seconds that a vLLM may take to answer, on a machine with a load of its own."""
CALLED_VLLM = Path(__file__).parent / "called_vllm"
"""A folder for PYTHONPATH that has a distribution called vllm, whose version the command ``vllm`` asks for."""


def environment(**more: str) -> dict[str, str]:
    """Of a vLLM: one thread, 1 GiB for keys and values, nothing sent or fetched."""
    cache = Path(sys.prefix) / "cache"
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CACHE_ROOT": str(cache),  # what it compiles; otherwise in the home directory
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "HF_HUB_OFFLINE": "1",
        **more,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True)
class Server:
    url: str
    """With /v1."""
    log: Path

    def count(self, metric: str) -> float:
        """The sum of one of vLLM's counters or gauges."""
        with urllib.request.urlopen(f"{self.url.removesuffix('/v1')}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{metric}{{"))


@contextmanager
def serving(log: Path, *flags: str) -> Iterator[Server]:
    """vLLM's OpenAI server with `MODEL`, on loopback, until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512", "--max-num-seqs", "8"]
    command += ["--enforce-eager", "--logprobs-mode", "processed_logprobs", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(f"http://127.0.0.1:{port}/v1", log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # what it has left in the session that is its own
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    deadline = time.monotonic() + START
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(health, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    said = log.read_text(errors="replace")[-3000:]
    pytest.fail(f"vLLM did not answer (status {process.poll()}); the end of {log}:\n{said}")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In float32, with adapters, prefixes that are kept, and a model's wish for a sampling that nobody asks for."""
    folder = tmp_path_factory.mktemp("vllm")
    wish = {"temperature": 0.3, "top_k": 1, "top_p": 0.5, "min_p": 0.9, "repetition_penalty": 3.0}
    (folder / "generation_config.json").write_text(json.dumps(wish))
    flags = ["--dtype", "float32", "--enable-prefix-caching", "--enable-lora", "--max-lora-rank", "8"]
    with serving(folder / "vllm.log", *flags, "--generation-config", str(folder)) as one:
        yield one
