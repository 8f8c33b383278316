"""OpenTelemetry: what a collector gets of episodes, steps and whole runs, and what one that is down does to a run."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra 'otel'")

from opentelemetry.sdk.trace.export import SpanExportResult

from astuner import Config, RunDir, run
from astuner.builtin.console import JsonlSink
from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import ConfigError
from astuner.contracts.events import EpisodeEnded, RunContext, StepEnded
from astuner.contracts.types import (
    Episode,
    ExternalTurn,
    FinishReason,
    Generation,
    JudgeOutput,
    SamplingParams,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.runs.run import RunWriter
from astuner.testing import FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner_trackers.telemetry import export, run_ids
from astuner_trackers.telemetry.collector import Collector as CollectorAddress
from astuner_trackers.telemetry.collector import timed_out, timeout, why
from astuner_trackers.telemetry.export import LAST_CHANCE, WatchedExporter
from astuner_trackers.telemetry.messages import LONGEST
from astuner_trackers.telemetry.run_ids import RunIds, is_sampled
from astuner_trackers.telemetry.settings import Telemetry
from astuner_trackers.telemetry.sink import OtelSink, Wanted
from tests.receivers import Collector, serving
from tests.table import table

EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent" / "math_agent.yaml"
BEGAN = 1_700_000_000.0
SECRET = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine's own OpenTelemetry is told."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with serving(Collector()) as receiver:
        assert isinstance(receiver, Collector)
        yield receiver


def turn(index: int, agent: str = "solver", **more: Any) -> Turn:
    said = Generation(
        prompt_ids=(1,) * (10 + index),
        response_ids=(2, 3),
        logprobs=(-0.5, -0.5),
        finish_reason=more.pop("finish", FinishReason.STOP),
        policy_version=7,
    )
    fields: dict[str, Any] = {
        "continues": None,
        "request": ({"role": "user", "content": "How many pens?"},),
        "message": {"role": "assistant", "content": "21"},
        "started": BEGAN + index,
        "seconds": 0.25,
    }
    return Turn(index=index, agent=agent, generation=said, **fields | more)


def call(name: str, tool: str, arguments: str) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}


def episode(
    name: str = "t1-0", reward: float | None = 1.0, turns: tuple[Turn, ...] | None = None, **more: Any
) -> Episode:
    """A solver that calls a tool and answers, and a critic from outside."""
    asks = {"role": "assistant", "content": "", "tool_calls": [call("c1", "calculator", '{"expression": "7 * 3"}')]}
    result = {"role": "tool", "tool_call_id": "c1", "content": "twenty-one"}
    critic = ExternalTurn(
        index=2,
        agent="critic",
        role="critic",
        model="big",
        request=({"role": "user", "content": "Is it right?"},),
        message={"role": "assistant", "content": "Yes."},
        prompt_tokens=11,
        completion_tokens=2,
        started=BEGAN + 2,
        seconds=0.5,
    )
    fields: dict[str, Any] = {
        "workflow_task": WorkflowTask(
            task=Task(task_id="pens", main_query="Mia has 7 boxes with 3 pens in each."),
            episode_id=name,
            group_id=name.rpartition("-")[0],
            split=more.pop("split", Split.TRAIN),
            attempt=int(name.rpartition("-")[2]),
        ),
        "turns": (turn(0, message=asks), turn(1, continues=0, request=(result,))) if turns is None else turns,
        "output": None if reward is None else WorkflowOutput(metrics={"tries": 2.0}),
        "verdict": None if reward is None else JudgeOutput(reward=reward, metrics={"length": 3.0}),
        "reward_source": "" if reward is None else "judge",
        "stop_reason": StopReason.COMPLETED if reward is not None else StopReason.MODEL_FAILED,
        "seconds": 4.0,
        "started": BEGAN - 0.5,
        "external": (critic,),
    }
    return Episode(**fields | more)


class Run:
    """A run's books with the sink and nothing else."""

    def __init__(self, folder: Path, text: str) -> None:
        self.config: Config = fake_config(folder, f"  telemetry: {{{text}}}\n  rollout: {{workflow: flow.py->Flow}}\n")
        self.dir = RunDir(folder / "run")
        self.dir.start(keep=False)
        sinks = [] if self.config.astuner.telemetry.otlp_endpoint else [OtelSink()]  # else it is there by itself
        self.books = RunWriter(self.config, self.dir, [JsonlSink(), *sinks], total_steps=2)

    @property
    def notes(self) -> list[str]:
        return self.dir.log.read_text().splitlines() if self.dir.log.exists() else []


def sent(collector: Collector, folder: Path, *episodes: Episode, text: str = "") -> dict[str, dict[str, Any]]:
    """The spans of a run with these episodes in step 3, by name."""
    one = Run(folder, f"otlp_endpoint: '{collector.url}', {text}")
    for each in episodes:
        one.books.publish(EpisodeEnded(step=3, episode=each))
    one.books.close()
    assert one.notes == []
    return {span["name"]: span for span in collector.spans}


def test_an_episode_is_a_trace_of_agents_model_calls_and_tools(collector: Collector, tmp_path: Path) -> None:
    spans = sent(collector, tmp_path, episode())
    root = spans["invoke_workflow flow.py->Flow"]
    solver, critic = spans["invoke_agent solver"], spans["invoke_agent critic"]
    tool = spans["execute_tool calculator"]
    chats = sorted((s for s in collector.spans if s["name"] == "chat fake"), key=lambda s: s["start"])
    outside = spans["chat big"]
    assert len(collector.spans) == 7
    assert {s["trace"] for s in collector.spans} == {root["trace"]}
    assert root["parent"] == b""
    assert {solver["parent"], critic["parent"]} == {root["id"]}
    assert {tool["parent"], *(c["parent"] for c in chats)} == {solver["id"]}
    assert outside["parent"] == critic["id"]
    assert len({s["id"] for s in collector.spans}) == 7

    def times(span: dict[str, Any]) -> tuple[float, float]:
        return round(span["start"] / 1e9 - BEGAN, 3), round(span["end"] / 1e9 - BEGAN, 3)

    assert times(root) == (-0.5, 3.5)
    assert times(solver) == (0, 1.25)
    assert [times(c) for c in chats] == [(0, 0.25), (1, 1.25)]
    assert times(tool) == (0.25, 1)  # from the call to the request that brings the result
    assert times(outside) == (2, 2.5)

    conversation = root["gen_ai.conversation.id"]
    assert conversation.endswith("-t1-0")
    assert {s["gen_ai.conversation.id"] for s in collector.spans} == {conversation}
    assert root["gen_ai.operation.name"] == "invoke_workflow"
    assert root["gen_ai.workflow.name"] == "flow.py->Flow"
    ours = {name.removeprefix("astuner."): value for name, value in root.items() if name.startswith("astuner.")}
    assert ours == {
        "episode.id": "t1-0", "group.id": "t1", "task.id": "pens", "attempt": 0, "split": "train", "step": 3,
        "stop_reason": "completed", "retries": 0, "turns": 3, "reward": 1.0, "reward.source": "judge",
        "success": True, "judge.length": 3.0, "workflow.tries": 2.0,
    }  # fmt: skip
    assert root["events"] == {
        "gen_ai.evaluation.result": {
            "gen_ai.evaluation.name": "reward",
            "gen_ai.evaluation.score.value": 1.0,
            "gen_ai.evaluation.score.label": "pass",
            "astuner.reward.source": "judge",
        }
    }
    assert solver["gen_ai.operation.name"] == "invoke_agent"
    assert (solver["gen_ai.agent.name"], critic["gen_ai.agent.name"]) == ("solver", "critic")
    assert (solver["gen_ai.usage.input_tokens"], solver["gen_ai.usage.output_tokens"]) == (21, 4)
    assert chats[0]["gen_ai.operation.name"] == "chat"
    assert chats[0]["gen_ai.provider.name"] == "astuner"
    assert chats[0]["gen_ai.request.model"] == "fake"
    assert chats[0]["gen_ai.request.temperature"] == 1.0
    assert [c["gen_ai.usage.input_tokens"] for c in chats] == [10, 11]
    assert [c["gen_ai.response.finish_reasons"] for c in chats] == [["tool_call"], ["stop"]]
    assert [c["gen_ai.response.id"] for c in chats] == ["t1-0:0", "t1-0:1"]
    assert chats[1]["astuner.continues"] == 0
    assert chats[1]["astuner.policy.version"] == 7
    assert outside["gen_ai.provider.name"] == "external"
    assert outside["gen_ai.usage.input_tokens"] == 11
    assert "gen_ai.request.temperature" not in outside
    assert tool["gen_ai.tool.name"] == "calculator"
    assert tool["gen_ai.tool.call.id"] == "c1"
    assert {c["kind"] for c in chats} == {3}  # CLIENT
    assert {root["kind"], tool["kind"]} == {1}  # INTERNAL
    (resource,) = collector.resource_spans
    assert resource.scope_spans[0].schema_url == "https://opentelemetry.io/schemas/1.41.0"
    assert collector.resource["service.name"] == "astuner"
    assert collector.resource["astuner.backbone"] == "debug"


def test_what_was_said_is_sent_only_when_that_is_asked_for(collector: Collector, tmp_path: Path) -> None:
    (tmp_path / "silent").mkdir()
    sent(collector, tmp_path / "silent", episode(error="pens are missing"))
    assert b"pens in each" not in collector.requests[0][2]
    for word in (b"How many", b"twenty-one", b"7 * 3", b"Is it right", b"Yes.", b"missing"):
        assert word not in collector.requests[0][2]
    collector.requests.clear()
    spans = sent(collector, tmp_path, episode(error="pens are missing"), text="content: true")
    asked = json.loads(spans["invoke_agent solver"]["gen_ai.input.messages"])
    assert asked == [{"role": "user", "parts": [{"type": "text", "content": "How many pens?"}]}]
    first, second = sorted((s for s in collector.spans if s["name"] == "chat fake"), key=lambda s: s["start"])
    call_part = {"type": "tool_call", "id": "c1", "name": "calculator", "arguments": {"expression": "7 * 3"}}
    answer = [{"role": "assistant", "parts": [call_part], "finish_reason": "tool_call"}]
    assert json.loads(first["gen_ai.output.messages"]) == answer
    response = {"type": "tool_call_response", "id": "c1", "response": "twenty-one"}
    assert json.loads(second["gen_ai.input.messages"]) == [{"role": "tool", "parts": [response]}]
    tool = spans["execute_tool calculator"]
    assert tool["gen_ai.tool.call.arguments"] == '{"expression": "7 * 3"}'
    assert tool["gen_ai.tool.call.result"] == "twenty-one"
    root = spans["invoke_workflow flow.py->Flow"]
    assert root["astuner.query"] == "Mia has 7 boxes with 3 pens in each."
    (query,) = json.loads(root["gen_ai.input.messages"])
    assert query == {"role": "user", "parts": [{"type": "text", "content": root["astuner.query"]}]}
    (last,) = json.loads(root["gen_ai.output.messages"])
    assert last["parts"] == [{"type": "text", "content": "Yes."}]
    assert root["astuner.error"] == "pens are missing"


def test_odd_text_costs_no_span(collector: Collector, tmp_path: Path) -> None:
    long = turn(0, message={"role": "assistant", "content": "x" * (LONGEST + 5), "reasoning_content": "half \ud800"})
    spans = sent(collector, tmp_path, episode(turns=(long,), external=()), text="content: true")
    (message,) = json.loads(spans["chat fake"]["gen_ai.output.messages"])
    thought, text = message["parts"]
    assert thought == {"type": "reasoning", "content": "half \ud800"}
    assert text["content"].endswith("x… [5 more characters]")


def test_a_failed_episode_is_an_error_and_has_no_verdict(collector: Collector, tmp_path: Path) -> None:
    root = sent(collector, tmp_path, episode(reward=None))["invoke_workflow flow.py->Flow"]
    assert root["error"] == root["error.type"] == "model_failed"
    assert root["events"] == {}
    assert "astuner.reward" not in root


def test_turns_without_times_span_the_episode_and_say_so(collector: Collector, tmp_path: Path) -> None:
    bare = turn(0, started=None, seconds=None, branch_reason="tools_changed", lost=True, trained=False)
    spans = sent(collector, tmp_path, episode(turns=(bare,), external=()))
    chat, root = spans["chat fake"], spans["invoke_workflow flow.py->Flow"]
    assert chat["astuner.times_known"] is False
    assert (chat["start"], chat["end"]) == (root["start"], root["end"])
    assert chat["astuner.branch_reason"] == "tools_changed"
    assert (chat["astuner.lost"], chat["astuner.trained"]) == (True, False)


def test_a_branch_that_repeats_its_history_repeats_no_tool(collector: Collector, tmp_path: Path) -> None:
    first = episode().turns
    again = turn(2, branch_reason="history_rewritten", request=(*first[0].request, first[0].message, *first[1].request))
    sent(collector, tmp_path, episode(turns=(*first, again), external=()))
    assert sum(span["name"] == "execute_tool calculator" for span in collector.spans) == 1


def test_validation_says_nothing_of_sampling_that_nobody_wrote_down(collector: Collector, tmp_path: Path) -> None:
    spans = sent(collector, tmp_path, episode(split=Split.VALIDATION))
    assert "gen_ai.request.temperature" not in spans["chat fake"]


def test_a_step_has_a_trace_linked_to_its_episodes_and_metrics(collector: Collector, tmp_path: Path) -> None:
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}/v1/traces', metrics: true")  # the whole address will do
    one.books.publish(EpisodeEnded(step=1, episode=episode("t1-0")))
    one.books.publish(EpisodeEnded(step=1, episode=episode("t1-1")))
    one.books.publish(EpisodeEnded(step=1, episode=episode("v1-0", split=Split.VALIDATION)))
    one.books.publish(StepEnded(step=1, metrics={"reward/mean": 0.5, "time/step": 2.0}))
    one.books.publish(StepEnded(step=1, metrics={"val/reward": 0.75, "time/validation": 1.0}))
    one.books.close()
    assert one.notes == []
    by_id = {s["astuner.episode.id"]: s["trace"] for s in collector.spans if "astuner.episode.id" in s}
    (step,) = (s for s in collector.spans if s["name"] == "train_step")
    (validation,) = (s for s in collector.spans if s["name"] == "validation")
    assert step["links"] == [by_id["t1-0"], by_id["t1-1"]]
    assert validation["links"] == [by_id["v1-0"]]
    assert (step["astuner.step"], step["astuner.metrics.reward.mean"]) == (1, 0.5)
    assert step["end"] - step["start"] == pytest.approx(2e9, rel=1e-6)
    assert collector.metrics["astuner.reward.mean"] == [(0.5, {"step": 1})]
    assert collector.metrics["astuner.val.reward"] == [(0.75, {"step": 1})]


def test_a_share_of_episodes_is_sent_and_every_step(collector: Collector, tmp_path: Path) -> None:
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}', sample: 0.0")
    one.books.publish(EpisodeEnded(step=1, episode=episode()))
    one.books.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    one.books.close()
    assert [span["name"] for span in collector.spans] == ["train_step"]
    ids = RunIds("0" * 16)
    kept = sum(is_sampled(ids.trace(f"t{i}"), 0.25) for i in range(4000))
    assert 850 < kept < 1150
    assert is_sampled((1 << 128) - 1, 1.0)


def test_ids_differ_between_runs_and_not_within_one() -> None:
    one, other = RunIds("1" * 16), RunIds("2" * 16)
    assert one.trace("t1-0") == one.trace("t1-0") != other.trace("t1-0")
    assert one.trace("t1-0") != one.trace("t1-1")


def test_headers_come_from_a_variable_and_are_neither_printed_nor_stored(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_HEADERS", f"authorization=Bearer%20{SECRET},x-tenant=me")
    sent(collector, tmp_path, episode(), text="headers_env: MY_HEADERS")
    headers = collector.requests[0][1]
    assert (headers["authorization"], headers["x-tenant"]) == (f"Bearer {SECRET}", "me")
    collector.status = 401
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}', headers_env: MY_HEADERS")
    one.books.publish(EpisodeEnded(step=1, episode=episode()))
    one.books.close()
    assert "401" in one.notes[0]
    assert SECRET not in "".join(one.notes) + one.config.dump_yaml()


def test_what_a_refusal_says_is_shown_without_the_secrets_that_it_repeats(
    monkeypatch: pytest.MonkeyPatch, collector: Collector, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://me:{SECRET}@127.0.0.1:1/v1/traces")
    one = Run(tmp_path, "sample: 1.0")
    one.books.publish(EpisodeEnded(step=1, episode=episode()))
    one.books.close()
    assert "did not reach the collector at http://127.0.0.1:1/v1/traces: connection refused" in one.notes[0]
    assert "check that it is running, and the variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in one.notes[0]
    assert SECRET not in "".join(one.notes)


def test_the_standard_variables_say_where_when_the_config_does_not(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=you")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=reds")
    one = Run(tmp_path, "metrics: true")
    one.books.publish(EpisodeEnded(step=1, episode=episode()))
    one.books.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    one.books.close()
    assert collector.requests[0][1]["x-tenant"] == "you"
    assert (collector.resource["service.name"], collector.resource["team"]) == ("my-training", "reds")
    assert "astuner.reward.mean" in collector.metrics


# ------------------------------------------------------------------------------------------------- collectors that fail


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.slow
def test_a_collector_that_is_down_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(export, "BATCH", 4)  # several exports, each of which fails
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1.5")
    url = closed_port()
    one = Run(tmp_path, f"otlp_endpoint: '{url}', metrics: true")
    for number in range(3):
        one.books.publish(EpisodeEnded(step=1, episode=episode(f"t{number}-0")))
        one.books.publish(StepEnded(step=1, metrics={"reward/mean": 0.5}))
    one.books.close()
    spans, *others = one.notes
    cause = "connection refused; check that it is running, and astuner.telemetry.otlp_endpoint"
    assert f"{url}/v1/traces does not accept spans: {cause}. " in spans
    (metrics,) = (note for note in others if "does not accept metrics" in note)
    assert f"{url}/v1/metrics does not accept metrics: {cause}. " in metrics
    (lost,) = (note for note in others if "did not reach" in note)
    assert lost.endswith(f"24 of 24 spans did not reach the collector at {url}/v1/traces: {cause}")
    assert len(one.notes) == 3
    assert len(one.dir.read_metrics()) == 3
    assert capfd.readouterr() == ("", "")  # the SDK's own lines are not printed beside ours


def test_a_collector_that_hangs_costs_the_end_of_a_run_one_timeout(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "BATCH", 2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    collector.hang = True
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}'")
    for number in range(8):
        one.books.publish(EpisodeEnded(step=1, episode=episode(f"t{number}-0")))  # never waits
    one.books.close()
    assert "56 of 56 spans did not reach" in one.notes[-1]
    assert re.search(
        r" \(\d+ of them may have arrived: the response was late\): ", one.notes[-1]
    )  # it was sent them, after all
    assert "it did not answer in time" in one.notes[-1]
    assert len(collector.requests) < 20  # of 28 batches: the first that fails while closing is the last


def test_a_collector_that_comes_back_gets_what_comes_then(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "LINGER", 0.05)
    heard, failed = threading.Event(), export.WatchedExporter._failed
    monkeypatch.setattr(export.WatchedExporter, "_failed", lambda *a: (failed(*a), heard.set()))
    collector.status = 400  # refused for good, so not tried again
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}'")
    one.books.publish(EpisodeEnded(step=1, episode=episode("t1-0")))
    while not any(span.get("astuner.episode.id") == "t1-0" for span in collector.spans):
        time.sleep(0.01)  # an answer alone says nothing: the port may get what was meant for another test
    assert heard.wait(30), "the refusal: the end, coming before that is heard, would have the spans sent again"
    collector.status = 200
    one.books.publish(EpisodeEnded(step=1, episode=episode("t2-0")))
    one.books.close()
    later = [s for s in collector.spans if s.get("astuner.episode.id") == "t2-0"]
    assert len(later) == 1
    down, again, lost = one.notes
    assert "does not accept spans: it rejected the data (status 400); check its log" in down
    assert f"{collector.url}/v1/traces accepts spans again" in again
    assert "7 of 14 spans did not reach" in lost
    assert lost.endswith("/v1/traces: for a while, it rejected the data (status 400); check its log")


@table(
    ("line", "told"),
    [
        (
            "Transient error HTTPConnectionPool(host='x', port=9): Max retries exceeded with url: /v1/traces "
            "(Caused by NewConnectionError('<urllib3.connection.HTTPConnection>: [Errno 111] Connection refused'))",
            "connection refused; check that it is running, and --trace",
        ),
        ("Pool: NameResolutionError(Failed to resolve 'nohost')", "unknown host; check --trace"),
        ("Failed to export: code: 401, reason: Unauthorized", "it rejected the key (status 401); check "),
        ("Failed to export: code: 404, reason: Not Found", "it accepts no spans at this path (status 404); check "),
        ("Pool: ('Connection aborted.', RemoteDisconnected('end'))", "it closed the connection"),
        ("Pool(host='x', port=9): Read timed out. (read timeout=10)", "it did not answer in time; check "),
        (
            "Pool: SSLError(CERTIFICATE_VERIFY_FAILED)",
            "its certificate is not trusted, or it does not support TLS; check ",
        ),
        (f"something new with {SECRET} {'x' * 500}", "something new with ***"),
    ],
)
def test_why_a_collector_takes_nothing_is_said_in_our_words(line: str, told: str) -> None:
    to = CollectorAddress("http://x:9/v1/traces", {"k": SECRET}, url_from="--trace", headers_from="--trace-headers-env")
    said = why([line, "gave up"], to)
    assert said.startswith(told)
    assert "check --trace" in said or "check that" in said
    assert not any(word in said for word in ("Pool", "urllib3", SECRET))
    assert len(said) < 250


@table(
    ("lines", "seconds", "late"),
    [
        (["Failed: code: None, reason: Read timed out. (read timeout=10)"], 1.0, True),
        (["Failed to export spans batch due to timeout, max retries or shutdown."], 10.0, True),
        (["Failed to export spans batch due to timeout, max retries or shutdown."], 0.01, False),  # refused at the end
        (["Transient error refused", "Failed to export spans batch due to timeout, max retries"], 10.0, False),
        ([], 10.0, False),
    ],
)
def test_what_no_answer_came_to_is_told_from_what_was_refused(lines: list[str], seconds: float, late: bool) -> None:
    assert timed_out(lines, seconds, 10.0) is late


def test_the_variables_say_how_long_a_request_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timeout("traces") == 10
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3")
    assert timeout("traces") == 3
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1.5")
    assert (timeout("traces"), timeout("metrics")) == (1.5, 3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon")
    assert timeout("traces") == 10


@pytest.mark.parametrize("took", [7, 0], ids=["took the last batch", "was never tried"])
def test_the_end_waits_for_the_answer_of_a_slow_collector(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, took: int
) -> None:
    monkeypatch.setattr(export, "LINGER", 0.01 if took else 600)
    monkeypatch.setattr(export, "FAREWELL", 0.01)  # many times over before the answer comes
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}'")
    if took:
        one.books.publish(EpisodeEnded(step=1, episode=episode("t1-0")))
        while collector.answered < 1 or len(collector.spans) < took:
            time.sleep(0.01)
    collector.hang = True
    one.books.publish(EpisodeEnded(step=1, episode=episode("t2-0")))
    let_go = threading.Timer(0.5, collector.released.set)
    let_go.start()
    one.books.close()
    let_go.join()
    assert one.notes == []
    assert len(collector.spans) == took + 7


def test_the_end_does_not_wait_for_one_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "LINGER", 600)
    monkeypatch.setattr(export, "FAREWELL", 0.3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")  # it would be tried for a minute
    one = Run(tmp_path, f"otlp_endpoint: '{closed_port()}'")
    one.books.publish(EpisodeEnded(step=1, episode=episode("t1-0")))
    one.books.close()
    (lost,) = one.notes
    assert "7 of 7 spans did not reach" in lost
    assert ": connection refused; check that it is running" in lost


@table(("batches", "then"), [(["taken"], 10.0), ([], 10.0), (["refused"], LAST_CHANCE)])
def test_a_batch_at_the_end_has_its_usual_time_unless_the_collector_is_known_to_be_down(
    batches: list[str], then: float
) -> None:
    asked: list[float] = []

    class Exporter:
        def __init__(self, timeout: float) -> None:
            self.timeout = timeout

        def export(self, spans: list[str]) -> Any:
            asked.append(self.timeout)
            return SpanExportResult.SUCCESS if spans == ["taken"] else SpanExportResult.FAILURE

        def shutdown(self) -> None:
            pass

    watched = WatchedExporter(Exporter, CollectorAddress("http://x:9/v1/traces"), lambda text: None, timeout=10.0)
    for batch in batches:
        watched.export([batch])
    watched.end()
    watched.export(["taken"])
    assert asked == [*[10.0] * len(batches), then]


def test_what_is_still_under_way_when_nobody_waits_any_more_may_have_arrived() -> None:
    trying, ended = threading.Event(), threading.Event()

    class Exporter:
        def __init__(self, timeout: float) -> None:
            pass

        def export(self, spans: list[str]) -> Any:
            trying.set()
            assert ended.wait(60)
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            pass

    remarks: list[str] = []
    watched = WatchedExporter(Exporter, CollectorAddress("http://x:9/v1/traces"), remarks.append, timeout=10.0)
    watched.made = 3
    thread = threading.Thread(target=watched.export, args=(["one", "two"],))
    thread.start()
    assert trying.wait(60)
    watched.end()
    assert watched.may_answer
    watched.give_up()
    watched.sum_up()
    ended.set()
    thread.join(60)
    assert "3 of 3 spans did not reach the collector" in remarks[0]
    assert "(2 of them may have arrived: the response was late): it did not answer in time" in remarks[0]


def test_the_end_breaks_off_the_tries_of_a_batch_and_gives_it_one_last_chance() -> None:
    """As after Ctrl-C: nobody waits until the exporter has tried often enough."""
    trying, ended = threading.Event(), threading.Event()
    asked: list[float] = []

    class Exporter:
        def __init__(self, timeout: float) -> None:
            self.timeout = timeout

        def export(self, spans: Any) -> Any:
            asked.append(self.timeout)
            if not ended.is_set():
                trying.set()
                assert ended.wait(60)
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            ended.set()

    remarks: list[str] = []
    watched = WatchedExporter(Exporter, CollectorAddress("http://x:9/v1/traces"), remarks.append, timeout=10.0)
    watched.made = 3
    thread = threading.Thread(target=watched.export, args=(["span"],))
    thread.start()
    assert trying.wait(60)
    watched.end()
    thread.join(60)
    for _ in range(2):
        watched.export(["span"])  # the first that fails is the last
    assert asked == [10.0, 10.0]
    assert remarks == []
    watched.sum_up()
    assert len(remarks) == 1
    assert remarks[0].startswith("3 of 3 spans did not reach the collector at http://x:9/v1/traces: ")


def test_the_processs_own_tracing_is_left_alone(collector: Collector, tmp_path: Path) -> None:
    from opentelemetry import trace

    before = trace._TRACER_PROVIDER
    sent(collector, tmp_path, episode())
    assert trace._TRACER_PROVIDER is before


THEIRS = """
from astuner import Workflow, WorkflowOutput
from opentelemetry.sdk.trace import TracerProvider

tracer = TracerProvider(shutdown_on_exit=False).get_tracer("theirs")

class Flow(Workflow):
    async def execute(self, workflow_task, model_tuner):
        with tracer.start_as_current_span("reply") as span:
            found = span.parent and {"trace": span.context.trace_id, "parent": span.parent.span_id}
        return WorkflowOutput(reward=1.0, metadata={"found": found})
"""


def test_spans_of_the_agents_own_framework_are_in_the_trace_of_their_episode(
    collector: Collector, tmp_path: Path
) -> None:
    (tmp_path / "flow.py").write_text(THEIRS)
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}'")

    def attempt() -> Episode:
        runner, tokenizer = EpisodeRunner(one.config), make_tokenizer()
        models = one_model(FakeEngine([], tokenizer), ChatCodec(tokenizer))
        return asyncio.run(runner.run(workflow_task(), models, SamplingParams(max_tokens=8)))

    while not run_ids._traced:
        time.sleep(0.01)  # until the sink is open
    tried = attempt()
    one.books.publish(EpisodeEnded(step=1, episode=tried))
    one.books.close()
    assert tried.output is not None
    (root,) = collector.spans
    assert tried.output.metadata["found"] == {
        "trace": int.from_bytes(root["trace"], "big"),
        "parent": int.from_bytes(root["id"], "big"),
    }
    later = attempt()
    assert later.output is not None
    assert later.output.metadata["found"] is None  # the run is over


AGENTSCOPE_2 = """
from agentscope.agent import Agent, InjectionConfig
from agentscope.message import UserMsg
from agentscope.middleware import TracingMiddleware
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit
from astuner import Workflow, WorkflowOutput

ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")


def multiply(a: int, b: int) -> str:
    '''Multiply two numbers.'''
    return str(a * b)


class Flow(Workflow):
    async def execute(self, workflow_task, model_tuner):
        agent = Agent(
            name="solver",
            system_prompt="Be brief.",
            model=MODEL,
            toolkit=Toolkit(tools=[FunctionTool(multiply, permission=ALLOWED)]),
            middlewares=[TracingMiddleware()],
            injection_config=InjectionConfig(inject_runtime_state=False),
        )
        await agent.reply(UserMsg("user", workflow_task.task.main_query))
        return WorkflowOutput(reward=1.0)
"""
CALLS_MULTIPLY = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "chats"),
    [("model_tuner", 0), ("model_tuner.as_agentscope_model()", 2)],  # AgentScope traces a ChatModelBase only
)
def test_spans_of_agentscope_2_nest_below_their_episode(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, chats: int
) -> None:
    pytest.importorskip("agentscope", minversion="2")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    (tmp_path / "flow.py").write_text(AGENTSCOPE_2.replace("MODEL", model))
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)  # `set_tracer_provider` works once in a process
    one = Run(tmp_path, f"otlp_endpoint: '{collector.url}'")
    while not run_ids._traced:
        time.sleep(0.01)  # until the sink is open
    tokenizer = make_tokenizer()
    models = one_model(FakeEngine([CALLS_MULTIPLY, "It is 42."], tokenizer), ChatCodec(tokenizer))
    runner = EpisodeRunner(one.config)
    tried = asyncio.run(runner.run(workflow_task(), models, SamplingParams(max_tokens=1000)))
    one.books.publish(EpisodeEnded(step=1, episode=tried))
    one.books.close()

    (root,) = (span for span in collector.spans if not span["parent"])
    assert sum(span["name"].startswith("chat ") for span in collector.spans) == 2
    spans = exporter.get_finished_spans()
    (agent,) = (span for span in spans if span.name == "invoke_agent solver")
    assert agent.parent is not None
    assert agent.parent.span_id == int.from_bytes(root["id"], "big")
    below = [span for span in spans if span is not agent]
    assert sorted(span.name for span in below) == [*["chat astuner"] * chats, "execute_tool multiply"]
    assert all(span.parent is not None and span.parent.span_id == agent.context.span_id for span in below)
    assert {span.context.trace_id for span in spans} == {int.from_bytes(root["trace"], "big")}


# ------------------------------------------------------------------------------------------------------------- settings


@table(
    ("text", "says"),
    [
        ("otlp_endpoint: 'localhost:4318'", "use a URL like http://localhost:4318"),
        (f"otlp_endpoint: 'http://me:{SECRET}@host'", "remove user and password from the URL"),
        (f"headers_env: 'authorization=Bearer {SECRET}'", "use the name of an environment variable"),
        ("sample: 1.5", "should be at most 1"),
        ("studio_url: 'file:///etc/passwd'", "use a URL like"),
    ],
)
def test_mistakes_are_refused_without_repeating_a_secret(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        fake_config(tmp_path, f'  telemetry: {{"{text.partition(":")[0]}":{text.partition(":")[2]}}}\n')
    assert SECRET not in str(refused.value)
    assert "experiment" in str(refused.value)  # the file, with line and column


def test_an_address_is_reason_enough_for_a_sink_and_what_it_lacks_is_said_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wanted(text: str, *loggers: str) -> list[str]:
        logger = f"  trainer_common: {{logger: [{', '.join(loggers)}]}}\n" if loggers else ""
        config = fake_config(tmp_path, f"  telemetry: {{{text}}}\n{logger}")
        Wanted.check(config)
        context = RunContext(
            config=config, run_dir=tmp_path, policies=(), trains=True, publish=lambda e: None, stop=lambda e: None
        )
        return [type(sink).__name__ for sink in Wanted.for_run(context)]

    assert wanted("sample: 0.5") == []
    both = "otlp_endpoint: 'http://h:4318', studio_url: 'http://h:3000'"
    assert wanted(both) == ["OtelSink", "StudioSink"]
    assert wanted(both, "otel") == ["StudioSink"]  # the other one was named
    with pytest.raises(ConfigError, match="environment variable NOT_THERE is not set"):
        wanted("otlp_endpoint: 'http://h', headers_env: NOT_THERE")
    monkeypatch.setenv("NOT_HEADERS", "Bearer abc")
    with pytest.raises(ConfigError, match="NOT_HEADERS contains no headers"):
        wanted("headers_env: NOT_HEADERS", "otel")
    with pytest.raises(ConfigError, match=r"requires astuner\.telemetry\.studio_url"):
        wanted("sample: 0.5", "studio")


def test_the_page_names_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    assert [name for name in Telemetry.model_fields if name not in page] == []


# ----------------------------------------------------------------------------------------------------------- a real run


def test_a_real_run_of_an_agentscope_agent(collector: Collector, tmp_path: Path) -> None:
    pytest.importorskip("agentscope")
    pytest.importorskip("torch")
    run(
        EXAMPLE,
        [
            f"astuner.experiment_dir={tmp_path}",
            f"astuner.telemetry.otlp_endpoint={collector.url}",
            "astuner.telemetry.content=true",
            "astuner.debug.debug_first_n_tasks=2",
            "astuner.trainer_common.logger=[jsonl]",
        ],
        backbone="debug",
    )
    roots = [s for s in collector.spans if not s["parent"]]
    assert len(roots) == 2
    for root in roots:
        inside = [s for s in collector.spans if s["trace"] == root["trace"]]
        chats = sorted((s for s in inside if s["gen_ai.operation.name"] == "chat"), key=lambda s: s["start"])
        tools = [s for s in inside if s["gen_ai.operation.name"] == "execute_tool"]
        assert chats
        assert len(inside) == 2 + len(chats) + len(tools)
        for span in inside:
            assert root["start"] <= span["start"] <= span["end"] <= root["end"] + 1e6
        for chat, next_chat in itertools.pairwise(chats):
            assert chat["end"] <= next_chat["start"]
        question = json.loads(chats[0]["gen_ai.input.messages"])[-1]["parts"][0]["content"]
        assert root["astuner.query"] in question
        assert all(chat["gen_ai.usage.output_tokens"] > 0 for chat in chats)
