"""``astuner serve``, as a person types it: a process with the tiny model, its file, its one line, and its end."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from astuner.cli import main
from astuner.contracts.errors import ConfigError
from astuner_gateway.listening import key_for
from astuner_gateway.served.spans import collector_at, feedback_url
from tests.receivers import Collector, serving
from tests.table import table

EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent" / "math_agent.yaml"
KEY = "a-key-of-16-characters-or-more"
QUESTION = "Tom has 6 boxes with 4 eggs in each. How many eggs?"


@contextmanager
def served(tmp_path: Path, *options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the first thing that it printed; it is killed if the block leaves it running."""
    command = [sys.executable, "-m", "astuner", "serve", str(EXAMPLE), "--backbone", "local", "--checkpoint", "base"]
    environment = {**os.environ, "ASTUNER_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1", **variables}
    command += ["--port", "0", *options]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    assert process.stdout is not None
    watchdog = threading.Timer(240, process.kill)  # a process that never speaks
    watchdog.start()
    try:
        line = process.stdout.readline()
        assert line, (tmp_path / "log").read_text()
        yield process, line
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


def client(access: dict[str, Any]) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=access["base_url"],
        api_key=access["api_key"],
        max_retries=0,
        http_client=openai.DefaultHttpxClient(trust_env=False),
    )


def test_it_answers_until_ctrl_c_and_tells_a_collector(tmp_path: Path) -> None:
    with serving(Collector()) as collector:
        assert isinstance(collector, Collector)
        with served(tmp_path, "--json", "--temperature", "0", "--trace", collector.url) as (process, line):
            told = json.loads(line)
            file = Path(told["access_file"])
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            access = json.loads(file.read_text())
            assert access["api_key"] not in line
            assert access["feedback_url"] == f"{collector.url}/feedback" == told["feedback_url"]
            assert access["pid"] == process.pid
            with client(access) as openai_client:
                messages: Any = [{"role": "user", "content": QUESTION}]
                first, second = (
                    openai_client.chat.completions.create(model="any", messages=messages, max_tokens=20) for _ in "ab"
                )
                assert first.choices[0].message == second.choices[0].message, "greedy"
                assert first.model == "math_agent/base" == told["model"]
            process.send_signal(signal.SIGINT)
            assert process.wait(200) == 0, (tmp_path / "log").read_text()
            assert not file.exists()
        spans = {span["gen_ai.response.id"]: span for span in collector.spans}
    log = (tmp_path / "log").read_text()
    assert spans.keys() == {first.id, second.id}
    assert len({span["gen_ai.conversation.id"] for span in spans.values()}) == 2
    assert spans[first.id]["astuner.checkpoint"] == told["checkpoint"]
    assert "astuner.step" not in spans[first.id]
    assert spans[first.id]["gen_ai.request.temperature"] == 0
    assert json.loads(spans[first.id]["gen_ai.input.messages"])[0]["parts"][0]["content"] == QUESTION
    assert "answered 2 requests in 2 conversations, rejected 0" in log
    assert access["api_key"] not in log
    assert "Traceback" not in log


@pytest.mark.slow
def test_a_person_reads_where_it_is_and_the_agent_answers(tmp_path: Path) -> None:
    with served(tmp_path, "--workflow", "--key-env", "MY_KEY", MY_KEY=KEY) as (process, line):
        assert line.startswith("Serving   math_agent/base, with its agent")
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        assert lines[-1] == "Stop with Ctrl-C\n"
        base_url = lines[0].removeprefix("Base URL").strip()
        with client({"base_url": base_url, "api_key": KEY}) as openai_client:
            answer = openai_client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": QUESTION}]
            )
            assert answer.choices[0].message.content
            assert answer.usage is not None
            assert answer.usage.prompt_tokens > 50, "the agent's own prompt and tools"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=200)
        assert process.returncode == 0
        assert out == "answered 1 requests in 1 conversations, rejected 0\n"
        assert KEY not in "".join(lines) + (tmp_path / "log").read_text()


@table(
    ("options", "says"),
    [
        (["--host", "0.0.0.0"], "--key-env"),
        (["--key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set"),
        (["--trace", "collector:4318"], "use a URL like"),
        (["--trace", "http://me:secret@host"], "remove user and password"),
        (["--trace-headers-env", "X"], "--trace URL"),
        (["--port", "70000"], "valid ports are 0 to 65535"),
        (["temperature=1", "nonsense"], "nonsense"),
    ],
)
def test_what_is_asked_wrongly_is_said_before_anything_is_loaded(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tmp_path / "missing.yaml"), *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert says in said
    assert "secret" not in said


SAID = {"host_at": "--host", "key_at": "--key-env", "prefix": "sk"}


def test_a_key_is_long_enough_and_new_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key_for("127.0.0.1", None, **SAID) != key_for("localhost", None, **SAID)
    monkeypatch.setenv("MY_KEY", "short")
    with pytest.raises(ConfigError, match="16"):
        key_for("0.0.0.0", "MY_KEY", **SAID)
    monkeypatch.setenv("MY_KEY", KEY)
    assert key_for("0.0.0.0", "MY_KEY", **SAID) == KEY


def test_feedback_goes_beside_the_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    for url in ("http://127.0.0.1:4318", "http://127.0.0.1:4318/", "http://127.0.0.1:4318/v1/traces"):
        to = collector_at(url, None)
        assert (to.url, feedback_url(to)) == ("http://127.0.0.1:4318/v1/traces", "http://127.0.0.1:4318/feedback")
    monkeypatch.setenv("MINE", "authorization=Bearer%20abc")
    assert collector_at("http://127.0.0.1:4318", "MINE").headers == {"authorization": "Bearer abc"}
