"""Test the path from traces of agents to tasks: AgentScope's own tracing (1.x or 2.x) and a run's telemetry."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from astuner import run
from astuner.testing import ScriptedModel

from ._traces import collecting, prepared

pytestmark = pytest.mark.slow

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent" / "math_agent.yaml"


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer))


def content(message: dict[str, Any]) -> str:
    parts = message["content"] or ""
    return parts if isinstance(parts, str) else str(parts[0]["text"])


def adds(body: dict[str, Any]) -> Any:
    """Call the tool for a sum and repeat its result; ignore the clock that AgentScope 2.x adds to a question."""
    role, text = [found for m in body["messages"] if "<current-time>" not in (found := (m["role"], content(m)))[1]][-1]
    if role == "tool":
        return f"The sum is {text}."
    numbers = [int(n) for n in re.findall(r"\d+", text)]
    if len(numbers) != 2:
        return "You are welcome."
    call = {"name": "add", "arguments": json.dumps({"a": numbers[0], "b": numbers[1]})}
    called = {"id": f"c{numbers[0]}", "type": "function", "function": call}
    said = {"role": "assistant", "content": None, "tool_calls": [called]}
    choice = {"index": 0, "finish_reason": "tool_calls", "message": said}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = {"id": f"r{numbers[0]}", "object": "chat.completion", "created": 1, "model": "m"}
    return 200, {**whole, "choices": [choice], "usage": usage}


def test_an_agentscope_agents_users_become_tasks(tmp_path: Path) -> None:
    pytest.importorskip("agentscope")
    major = metadata.version("agentscope").partition(".")[0]
    program = PROGRAMS / f"traced_agent{major}.py"
    path = tmp_path / "traces.sqlite"
    with collecting(path) as collector, ScriptedModel(adds) as model:
        questions = ["2 + 3?", "10 + 4?", "Thanks!"]
        done = subprocess.run(
            [sys.executable, str(program), model.base_url, f"{collector.url}/v1/traces", *questions],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert post(f"{collector.url}/feedback", {"response_id": "r10", "rating": -1, "correction": "14"})["seen"]
    first, second, third = prepared(path, turns="every").train
    assert [t.main_query for t in (first, second, third)] == ["2 + 3?", "10 + 4?", "Thanks!"]
    assert [dict(m) for m in first.init_messages] == [{"role": "system", "content": "You add numbers."}]
    call, result = second.init_messages[2:4]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"]) == {"a": 2, "b": 3}
    assert (result["role"], result["content"], result["tool_call_id"]) == ("tool", "5", call["tool_calls"][0]["id"])
    assert [t.metadata["trace"]["answer"] for t in (first, second, third)] == [
        "The sum is 5.", "The sum is 14.", "You are welcome.",
    ]  # fmt: skip
    assert [t.metadata.get("answer") for t in (first, second, third)] == [None, "14", None]
    assert [t.main_query for t in prepared(path).train] == ["Thanks!"]  # one conversation: the last question


def test_traces_of_a_run_are_collected_corrected_and_trained_on(tmp_path: Path) -> None:
    """Our own telemetry, the collector, feedback, and a training step on what came of it."""
    pytest.importorskip("torch")
    pytest.importorskip("agentscope")
    path = tmp_path / "traces.sqlite"
    plain = [f"astuner.experiment_dir={tmp_path}", "astuner.trainer_common.logger=[jsonl]"]
    with collecting(path) as collector:
        told = [f"astuner.telemetry.otlp_endpoint={collector.url}", "astuner.telemetry.content=true"]
        run(EXAMPLE, [*plain, *told, "astuner.debug.debug_first_n_tasks=3"], backbone="debug")
        found = prepared(path).train
        assert len(found) == 3
        for task in found:
            assert task.init_messages[0]["role"] == "system"
            trace = task.metadata["trace"]
            assert (trace["model"], bool(trace["answer"])) == ("tiny-calculator", True)
            assert post(f"{collector.url}/feedback", {"trace_id": trace["trace_id"], "correction": "7"})["seen"]
    again = [
        *plain,
        "astuner.experiment_name=again",
        "astuner.task_reader.type=tracing",
        f"astuner.task_reader.tracing.sources=[{path}]",
        "astuner.task_reader.tracing.require_answer=true",
        "astuner.data.train_batch_size=3",
        "astuner.rollout.num_repeat=2",
        "astuner.trainer_common.total_steps=1",
    ]
    result = run(EXAMPLE, again, backbone="local")
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "reward/mean" in row][-1] == 1
