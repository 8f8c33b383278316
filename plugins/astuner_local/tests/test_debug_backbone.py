"""The `debug` backbone against each of its engines: the local one, a server that gives token ids, and a vLLM it starts.

vLLM itself does not install beside these tests' transformers, so a small server of ours stands in for it: it speaks
vLLM's completions route with ``return_token_ids`` and answers with the real tiny model.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from astuner import run
from astuner.config.schema import DebugSection, ModelSection
from astuner.contracts.errors import (
    AstunerError,
    ContextOverflow,
    Interrupted,
    MissingDependency,
    ModelFailed,
    RunError,
)
from astuner.contracts.types import FinishReason, SamplingParams
from astuner_debug.engine import OpenAICompletionsEngine, running_vllm
from astuner_local.engine import LocalEngine
from astuner_local.modeling import load_model
from astuner_local.plugin import locate_model
from tests.table import table

from .conftest import EXAMPLE

KEY = "a-key-of-this-test"


class Server:
    """Serves the tiny model; each switch makes it a server that ASTuner must refuse."""

    def __init__(self) -> None:
        loaded = load_model(ModelSection(path="tiny-calculator"), path=locate_model("tiny-calculator"))
        self.engine = LocalEngine(loaded.model, tokenizer_eos_ids=loaded.eos_token_ids, max_model_len=256)
        self.with_ids = True
        self.raw_logprobs = False
        self.models: list[dict[str, Any]] = [{"id": "tiny", "max_model_len": 256}]
        self.requests: list[dict[str, Any]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({"data": server.models})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(body)
                self.answer(server.complete(body))

            def answer(self, body: dict[str, Any]) -> None:
                allowed = self.headers.get("Authorization") == f"Bearer {KEY}"
                data = json.dumps(body if allowed else {"error": "no key"}).encode()
                self.send_response(200 if allowed else 401)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                return None

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = SamplingParams(
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_k=-1 if self.raw_logprobs else body.get("top_k", -1),
            stop_token_ids=tuple(body["stop_token_ids"]),
        )
        made = asyncio.run(self.engine.generate(body["prompt"], sampling))
        choice: dict[str, Any] = {
            "text": "…",
            "finish_reason": "stop" if made.finish_reason is FinishReason.STOP else "length",
        }
        if self.with_ids:
            choice |= {"token_ids": list(made.response_ids), "logprobs": {"token_logprobs": list(made.logprobs)}}
        return {"choices": [choice]}

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.engine.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def debug(tmp_path: Path, *overrides: str) -> list[dict[str, Any]]:
    run(EXAMPLE, [f"astuner.experiment_dir={tmp_path}", "astuner.experiment_name=x", *overrides], backbone="debug")
    return [json.loads(line) for line in (tmp_path / "x.debug" / "episodes" / "debug.jsonl").read_text().splitlines()]


def test_the_same_file_runs_a_few_tasks_on_the_local_engine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    episodes = debug(tmp_path, "astuner.debug.debug_first_n_tasks=3", "astuner.debug.debug_max_parallel=2")
    assert [e["task_id"] for e in episodes] == ["train.jsonl:1", "train.jsonl:2", "train.jsonl:3"]
    assert all(e["turns"] for e in episodes)
    shown = capfd.readouterr().err
    assert "calculator(" in shown  # every turn, tool calls included, is shown
    assert "no training" in shown


def test_it_leaves_a_training_run_alone(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "metrics.jsonl").write_text("{}\n")
    debug(tmp_path, "astuner.debug.debug_first_n_tasks=1")
    assert [p.name for p in sorted(tmp_path.iterdir()) if not p.name.startswith(".")] == ["x", "x.debug"]


def test_it_runs_against_a_server_that_gives_token_ids(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    episodes = debug(
        tmp_path,
        "astuner.debug.engine=openai",
        f"astuner.debug.base_url={server.url}",
        "astuner.debug.api_key_env=MY_KEY",
        "astuner.rollout.temperature=0.5",
    )
    assert all(e["reward"] is not None for e in episodes)
    asked = server.requests[-1]
    assert asked["return_token_ids"] is True
    assert asked["temperature"] == 0.5
    assert isinstance(asked["prompt"][0], int)


def test_a_server_without_token_ids_is_refused_with_the_reason(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.with_ids = False
    with pytest.raises(RunError, match=r"cannot give token ids.*vLLM 0\.10\.2"):
        debug(tmp_path, "astuner.debug.engine=openai", f"astuner.debug.base_url={server.url}")


@table(
    ("url", "says"),
    [
        ("http://127.0.0.1:9/v1", "no OpenAI-compatible server answers"),
        ("localhost:80", "example: http://127.0.0.1:8000/v1"),
    ],
)
def test_a_server_that_is_not_there_is_said(url: str, says: str) -> None:
    with pytest.raises(RunError, match=says):
        OpenAICompletionsEngine(url)


def test_a_wrong_key_and_a_wrong_model_are_said(server: Server) -> None:
    with pytest.raises(RunError, match="401"):
        OpenAICompletionsEngine(server.url, api_key="wrong")
    server.models.append({"id": "more"})
    with pytest.raises(RunError, match="serves tiny, more, but not other"):
        OpenAICompletionsEngine(server.url, api_key=KEY, paths=["other"])


def test_without_a_name_the_only_model_is_taken_and_several_are_refused(server: Server) -> None:
    assert OpenAICompletionsEngine(server.url, api_key=KEY).model == "tiny"
    server.models.append({"id": "other"})
    with pytest.raises(RunError, match=r"serves tiny, other, and no model is selected; set astuner.model.path"):
        OpenAICompletionsEngine(server.url, api_key=KEY)
    assert OpenAICompletionsEngine(server.url, api_key=KEY, paths=["other"]).max_model_len == 32768


def test_a_server_whose_model_is_called_something_else_is_told(server: Server) -> None:
    def connected(*paths: str) -> tuple[str, str]:
        engine = OpenAICompletionsEngine(server.url, api_key=KEY, paths=paths)
        return engine.model, engine.note

    assert connected("tiny") == ("tiny", "")
    model, note = connected("Qwen/Qwen3-8B", "/models/qwen3")
    assert model == "tiny"
    assert "serves 'tiny', but astuner.model.path is 'Qwen/Qwen3-8B'" in note
    server.models[:] = [{"id": "a", "root": "/models/a"}, {"id": "tiny", "root": "/models/qwen3"}]
    assert connected("Qwen/Qwen3-8B", "/models/qwen3") == ("tiny", "")
    with pytest.raises(RunError, match=r"serves a, tiny, but not Qwen/Qwen3-0\.6B"):
        connected("Qwen/Qwen3-0.6B")
    server.models[:] = []
    with pytest.raises(RunError, match="serves no model"):
        connected("tiny")
    server.models[:] = [{"name": "a"}]
    with pytest.raises(RunError, match=r"no OpenAI-compatible server answers.*KeyError"):
        connected("tiny")


def test_log_probabilities_from_before_the_sampling_are_said(server: Server) -> None:
    assert OpenAICompletionsEngine(server.url, api_key=KEY, paths=["tiny"]).note == ""
    server.raw_logprobs = True
    note = OpenAICompletionsEngine(server.url, api_key=KEY, paths=["tiny"]).note
    assert "before temperature" in note
    assert "--logprobs-mode processed_logprobs" in note
    both = OpenAICompletionsEngine(server.url, api_key=KEY, paths=["other"]).note
    assert both.endswith(f"; {note}")
    assert "serves 'tiny', but astuner.model.path is 'other'" in both


def test_a_url_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(RunError, match=r"astuner\.debug\.base_url") as e:
        OpenAICompletionsEngine("http://ada:s3cret@127.0.0.1:9/v1")
    assert "s3cret" not in str(e.value)


def test_the_engine_keeps_the_contract(server: Server) -> None:
    engine = OpenAICompletionsEngine(server.url, api_key=KEY)
    made = asyncio.run(engine.generate([1, 5, 6], SamplingParams(max_tokens=4, temperature=0)))
    again = asyncio.run(server.engine.generate([1, 5, 6], SamplingParams(max_tokens=4, temperature=0)))
    assert (made.response_ids, made.policy_version) == (again.response_ids, -1)
    assert made.logprobs == pytest.approx(again.logprobs, abs=1e-5)  # a reused prefix: other shapes, other rounding
    with pytest.raises(ContextOverflow):
        asyncio.run(engine.generate([1] * 256, SamplingParams(max_tokens=4)))
    server.close()
    with pytest.raises(ModelFailed):
        asyncio.run(engine.generate([1, 5, 6], SamplingParams(max_tokens=4)))


def test_an_episode_that_is_given_up_leaves_no_request_in_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = OpenAICompletionsEngine(server.url, api_key=KEY)
    asked, gone = threading.Event(), threading.Event()

    def never(handler: BaseHTTPRequestHandler) -> None:
        handler.connection.settimeout(20)
        handler.rfile.read(int(handler.headers["Content-Length"]))
        asked.set()
        if handler.connection.recv(1) == b"":  # as vLLM's HTTP server sees that a client has gone
            gone.set()
        handler.close_connection = True

    monkeypatch.setattr(server.http.RequestHandlerClass, "do_POST", never)

    async def give_up() -> None:
        asking = asyncio.create_task(engine.generate([1, 5, 6], SamplingParams(max_tokens=4)))
        assert await asyncio.to_thread(asked.wait, 20)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    asyncio.run(give_up())
    assert gone.wait(20)


STAND_IN = """#!{python}
import json, os, sys, time
sys.path[:0] = {path}
sys.argv[0] = "vllm"
port = int(sys.argv[sys.argv.index("--port") + 1])
assert sys.argv[sys.argv.index("--host") + 1] == "127.0.0.1"
if {dies}:
    print("CUDA is not here"); sys.exit(7)
from plugins.astuner_local.tests import test_debug_backbone as t
t.KEY = os.environ["VLLM_API_KEY"]
open({record!r} + ".new", "w").write(json.dumps([os.getpid(), sys.argv, t.KEY in " ".join(sys.argv)]))
os.rename({record!r} + ".new", {record!r})
if not {answers}:
    time.sleep(600)
server = t.Server()
server.http.server_close()
from http.server import ThreadingHTTPServer
ThreadingHTTPServer(("127.0.0.1", port), server.http.RequestHandlerClass).serve_forever()
"""


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dies: bool = False, answers: bool = True) -> Path:
    """Put a program called vllm first on the PATH."""
    record, program = tmp_path / "started.json", tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    root = str(Path(__file__).resolve().parents[3])
    program.write_text(
        STAND_IN.format(python=sys.executable, path=[root], dies=dies, record=str(record), answers=answers)
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    return record


def free_port() -> int:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as probe:
        return probe.server_port


@pytest.mark.slow
def test_a_vllm_is_started_on_loopback_with_a_secret_key_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stand_in(tmp_path, monkeypatch)
    told = f"astuner.debug.debug_vllm_port={free_port()}", "astuner.model.dtype=bfloat16"
    episodes = debug(tmp_path, "astuner.debug.engine=vllm", *told)
    assert all(e["turns"] for e in episodes)
    pid, command, key_is_visible = json.loads(record.read_text())
    assert not key_is_visible
    assert "--max-model-len" in command
    assert command[command.index("--dtype") + 1] == "bfloat16"  # vLLM's own choice for float32 is another
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list((tmp_path / "home" / "processes").glob("*.json")) == []


def test_a_vllm_that_dies_is_said_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, dies=True)
    with pytest.raises(RunError, match=r"ended with status 7.*vllm\.log"):
        debug(tmp_path, "astuner.debug.engine=vllm", f"astuner.debug.debug_vllm_port={free_port()}")


@pytest.mark.slow
def test_waiting_for_a_vllm_ends_on_request_and_the_vllm_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stand_in(tmp_path, monkeypatch, answers=False)
    settings = DebugSection(engine="vllm", debug_vllm_port=free_port())
    log = tmp_path / "vllm.log"
    with (
        pytest.raises(Interrupted, match="while vLLM was starting"),
        running_vllm("m", settings, max_model_len=None, log=log, interrupted=record.exists),
    ):
        pytest.fail("it never answers")
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(record.read_text())[0], 0)


def test_without_vllm_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="pip install vllm"):
        debug(tmp_path, "astuner.debug.engine=vllm")


def test_keys_for_training_are_noted_not_refused_and_keys_for_others_are_skipped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    debug(tmp_path, "astuner.debug.debug_first_n_tasks=1", "trinity.trainer.max_token_len_per_gpu=13000")
    assert "trinity" in capfd.readouterr().err


def test_an_unknown_engine_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(AstunerError, match=r"astuner\.debug\.engine"):
        debug(tmp_path, "astuner.debug.engine=sglang")
