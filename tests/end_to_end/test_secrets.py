"""Secrets in the environment, the experiment and exceptions reach no file of a run, no output and no answer."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.checking import rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "math_agent"
PLANTED = {
    "OPENAI_API_KEY": "sk-planted-of-openai-1",
    "WANDB_API_KEY": "planted-of-wandb-2",
    "MY_HELPER": "planted-of-helper-3",  # a name that says nothing
    "DB_PASSWORD": "planted-of-database-4",
    "ASTUNER_ENDPOINT_KEY": "planted-of-endpoint-5",
    "IN_YAML": "planted-in-yaml-6",  # interpolated as the password of a URL
}
IN_CLEAR = "planted-in-clear-7"
TYPED = "planted-typed-8"
CODE = """
import os, runpy, sys
from astuner import Judge, JudgeOutput, WorkflowOutput

Math = runpy.run_path(EXAMPLE)["MathAgentWorkflow"]
SECRETS = [os.environ[name] for name in NAMES]
if os.environ.get("IN_CLEAR"):
    SECRETS[-1] = os.environ["IN_CLEAR"]

class Flow(Math):
    async def execute(self, workflow_task, model_tuner):
        if workflow_task.attempt == 4:
            raise ValueError(f"Incorrect API key provided: {SECRETS}, at http://ada:planted-url-9@host/v1")
        output = await super().execute(workflow_task, model_tuner)
        if workflow_task.attempt == 1:
            return WorkflowOutput(reward=" ".join(SECRETS))
        return output

class Mine(Judge):
    def __init__(self, config, helper_models):
        self._helper = helper_models.get("judge", where="the judge")

    async def judge(self, workflow_task, output):
        if workflow_task.attempt == 2:
            await self._helper.ask([{"role": "user", "content": "?"}], purpose="judge")
        if workflow_task.attempt == 3:
            raise RuntimeError(KeyError(*SECRETS))
        return JudgeOutput(reward=float(workflow_task.attempt % 3))
"""


class Echo(http.server.BaseHTTPRequestHandler):
    """Refuses everybody, and says with which key."""

    def do_POST(self) -> None:
        body = json.dumps({"error": {"message": f"Incorrect key: {self.headers['Authorization']}"}}).encode()
        self.send_response(401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def echo() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def found_in(text: bytes | str) -> set[str]:
    """Which secrets, by what is theirs alone."""
    return {m.decode() for m in re.findall(rb"planted-[a-z-]+\d", text if isinstance(text, bytes) else text.encode())}


def answers(url: str) -> Iterator[bytes]:
    """What a viewer says of its one run, of every episode, and of what there is not."""

    def get(route: str) -> bytes:
        try:
            with urllib.request.urlopen(url + route, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as e:
            return e.read()

    runs = get("api/runs")
    (run,) = json.loads(runs)["runs"]
    of = f"api/runs/{run['id']}"
    listed = get(f"{of}/episodes?limit=100")
    yield from (runs, listed, get("api/sk-nothing"))
    for what in ("", "/metrics", "/steps", "/groups", "/files/report.html", "/files/run.log", "/files/failures.jsonl"):
        yield get(of + what)
    for one in json.loads(listed)["episodes"]:
        yield get(f"{of}/episodes/{one['episode_id']}")


def test_planted_secrets_are_in_no_file_no_output_and_no_answer(tmp_path: Path, echo: str) -> None:
    names, example = list(PLANTED), str(EXAMPLE / "workflow.py")
    (tmp_path / "flow.py").write_text(f"EXAMPLE, NAMES = {example!r}, {names!r}\n{CODE}")
    variables = {**os.environ, **PLANTED, "ASTUNER_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    given = {
        "rollout.workflow": f"{tmp_path}/flow.py->Flow",
        "rollout.num_repeat": 6,
        "rollout.max_failed_share": 1.0,
        "rollout.max_retries": 0,
        "task_judge.judge": f"{tmp_path}/flow.py->Mine",
        "helper_models.judge": f"{{base_url: '{echo}', model: m, api_key_env: MY_HELPER}}",
        "debug.base_url": "http://ada:${oc.env:IN_YAML}@127.0.0.1:1/v1",
        "data.train_batch_size": 2,
        "data.max_validation_tasks": 2,
        "trainer_common.total_steps": 1,
        "trainer_common.use_kl_loss": "false",
        "experiment_dir": tmp_path,
        "experiment_name": "run",
    }
    file = str(EXAMPLE / "math_agent.yaml")
    overrides = [f"astuner.{key}={value}" for key, value in given.items()]
    clear = f"astuner.debug.base_url=http://ada:{IN_CLEAR}@127.0.0.1:1/v1"
    run = str(tmp_path / "run")

    def call(*arguments: str, code: int | None = 0) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "astuner", *arguments],
            env=variables, cwd=tmp_path, capture_output=True, timeout=400, check=False,
        )  # fmt: skip
        assert code is None or done.returncode == code, done.stderr[-3000:]
        assert not found_in(done.stdout + done.stderr), (arguments, found_in(done.stdout + done.stderr))

    call("run", file, *overrides, "--backbone", "local")
    variables["IN_CLEAR"] = IN_CLEAR
    call("run", file, *overrides, clear, "--backbone", "local", "--resume", "astuner.trainer_common.total_steps=2")
    call("run", file, *overrides, clear, "--backbone", "debug", code=None)
    call("config", file, *overrides, clear, code=None)
    call("run", file, *overrides, f"astuner.nonsense.api_key={TYPED}", "--backbone", "local", code=2)
    call("doctor", run, code=None)
    call("report", run)
    call("export", run, "--to", "jsonl", "--out", str(tmp_path / "out.jsonl"))

    looked_at = 0
    for path in tmp_path.rglob("*"):
        if path.is_file() and path.stem.partition(".")[0] != "flow":  # the code, and what Python makes of it
            looked_at += 1
            assert not found_in(path.read_bytes()), (path, found_in(path.read_bytes()))
    assert looked_at > 20
    rows: list[dict[str, Any]] = [*rows_of(tmp_path / "run")]
    for reason in ("workflow_failed", "judge_failed"):
        assert any(row["stop_reason"] == reason and "(removed: a secret)" in row["error"] for row in rows)
    assert not found_in(json.dumps(rows, default=str))

    command = [sys.executable, "-m", "astuner", "view", run, "--json", "--no-browser", "--port", "0"]
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = ""
            while not said.endswith("}\n"):
                said += process.stdout.readline() or pytest.fail("the viewer ended")
            told = json.loads(said)
            for answer in answers(told["url"].partition("#")[0]):
                looked_at += 1
                assert not found_in(answer)
        finally:
            process.kill()
