"""AgentScope Studio: which conversations it gets, in the protocol of AgentScope's own client, and what happens when it
is down."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner import RunDir, run
from astuner.builtin.console import JsonlSink
from astuner.contracts.events import EpisodeEnded, StepEnded
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.runs.run import RunWriter
from astuner.testing import fake_config
from astuner_trackers import studio
from tests.receivers import Studio, serving

EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent" / "math_agent.yaml"
BEGAN = 1_700_000_000.0


@pytest.fixture
def server() -> Iterator[Studio]:
    with serving(Studio()) as receiver:
        assert isinstance(receiver, Studio)
        yield receiver


def turn(index: int, **more: Any) -> Turn:
    said = Generation(
        prompt_ids=(1,), response_ids=(2, 3), logprobs=(0.0, 0.0), finish_reason=FinishReason.STOP, policy_version=7
    )
    fields: dict[str, Any] = {"agent": "solver", "continues": None, "started": BEGAN + index, "seconds": 0.25}
    return Turn(index=index, generation=said, **fields | more)


def conversation() -> tuple[Turn, ...]:
    """Asked, a tool called, its result, an answer; asked again; then a branch that repeats all of it."""
    call = {"id": "c1", "type": "function", "function": {"name": "calculator", "arguments": '{"expression": "7 * 3"}'}}
    odd = {"id": "c2", "type": "function", "function": {"name": "calculator", "arguments": "7 * 3"}}
    system, asked = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many pens?"}
    thinks = {"role": "assistant", "content": "", "reasoning_content": "Multiply.", "tool_calls": [call, odd]}
    results = ({"role": "tool", "tool_call_id": "c1", "content": "21"}, {"role": "tool", "tool_call_id": "c2"})
    answer = {"role": "assistant", "content": "21"}
    again = {"role": "user", "name": "Mia", "content": "Sure?"}
    history = (system, asked, thinks, *results, answer, again)
    return (
        turn(0, request=(system, asked), message=thinks),
        turn(1, request=results, message=answer, continues=0),
        turn(2, request=(again,), message={"role": "assistant", "content": "Yes."}, continues=1),
        turn(3, request=history, message={"role": "assistant", "content": "No."}, branch_reason="the tools changed"),
    )


def episode(name: str = "t1-0", reward: float | None = 1.0, **more: Any) -> Episode:
    fields: dict[str, Any] = {
        "workflow_task": WorkflowTask(
            task=Task(task_id="pens", main_query="How many pens?"),
            episode_id=name,
            group_id=name.rpartition("-")[0],
            split=more.pop("split", Split.TRAIN),
            attempt=int(name.rpartition("-")[2]),
        ),
        "turns": conversation(),
        "output": WorkflowOutput(),
        "verdict": None if reward is None else JudgeOutput(reward=reward),
        "reward_source": "judge",
        "stop_reason": StopReason.COMPLETED if reward is not None else StopReason.TIMED_OUT,
        "error": "" if reward is not None else "too slow",
        "seconds": 5.0,
        "started": BEGAN - 0.5,
    }
    return Episode(**fields | more)


class Run:
    def __init__(self, folder: Path, text: str) -> None:
        self.dir = RunDir(folder / "run")
        self.dir.start(keep=False)
        config = fake_config(folder, f"  project_name: pens\n  telemetry: {{{text}}}\n")
        self.name = config.experiment_name
        self.books = RunWriter(config, self.dir, [JsonlSink()], total_steps=2)  # which has Studio's sink by itself

    @property
    def notes(self) -> list[str]:
        return self.dir.log.read_text().splitlines() if self.dir.log.exists() else []


def shown(server: Studio) -> list[tuple[str, str, Any]]:
    """(name, role, content) of every message, in the order that Studio sorts them."""
    messages = sorted((push["msg"] for push in server.messages), key=lambda m: m["timestamp"])
    return [(m["name"], m["role"], [b.get("text", b) for b in m["content"]]) for m in messages]


def test_an_episode_is_a_run_with_its_messages_in_replies(server: Studio, tmp_path: Path) -> None:
    one = Run(tmp_path, f"studio_url: '{server.url}'")
    one.books.publish(EpisodeEnded(step=3, episode=episode()))
    one.books.close()
    assert one.notes == []
    (registered,) = server.runs.values()
    assert registered["project"] == f"pens - {one.name}"
    assert registered["name"] == "step 3, reward 1, pens"
    assert registered["status"] == "done"
    thought = {"type": "thinking", "thinking": "Multiply."}
    call = {"type": "tool_use", "id": "c1", "name": "calculator", "input": {"expression": "7 * 3"}}
    odd = {"type": "tool_use", "id": "c2", "name": "calculator", "input": {"arguments": "7 * 3"}}
    result = {"type": "tool_result", "id": "c1", "name": "calculator", "output": "21"}
    assert shown(server) == [
        ("system", "system", ["Be brief."]),
        ("user", "user", ["How many pens?"]),
        ("solver", "assistant", [thought, call, odd]),
        ("system", "system", [result]),
        ("system", "system", [{**result, "id": "c2", "output": ""}]),
        ("solver", "assistant", ["21"]),
        ("Mia", "user", ["Sure?"]),
        ("solver", "assistant", ["Yes."]),
        ("astuner", "system", ["solver branches: the tools changed"]),
        ("solver", "assistant", ["No."]),
        ("astuner", "system", ["completed, reward 1 (judge)"]),
    ]
    replies: dict[str, list[str]] = {}
    for push in server.messages:
        replies.setdefault(f"{push['replyName']} {push['replyRole']}", []).append(push["replyId"])
    assert len(set(replies["solver assistant"])) == 2  # what it says to the user's first message, and to the second
    assert replies["solver assistant"][:4] == replies["solver assistant"][:1] * 4  # with the results of its tools
    said = next(push["msg"] for push in server.messages if push["msg"]["name"] == "solver")
    assert said["metadata"] == {
        "turn": 0, "tokens": 2, "finish_reason": "stop", "policy_version": 7, "trained": True,
    }  # fmt: skip


def test_first_attempts_of_each_step_and_validation_are_sent_and_no_more(server: Studio, tmp_path: Path) -> None:
    one = Run(tmp_path, f"studio_url: '{server.url}', studio_episodes: 2")
    one.books.publish(EpisodeEnded(step=1, episode=episode("t1-1")))
    one.books.publish(EpisodeEnded(step=1, episode=episode("t1-0", turns=())))  # nothing was said
    for step in (1, 2):
        for group in ("a", "b", "c"):
            one.books.publish(EpisodeEnded(step=step, episode=episode(f"{group}{step}-0")))
    one.books.publish(EpisodeEnded(step=2, episode=episode("v-0", reward=None, split=Split.VALIDATION)))
    one.books.publish(StepEnded(step=1, metrics={"reward/mean": 1.0}))
    one.books.close()
    assert one.notes == []
    names = [run["name"] for run in server.runs.values()]
    assert names == ["step 1, reward 1, pens"] * 2 + ["step 2, reward 1, pens"] * 2 + ["validation 2, timed_out, pens"]
    assert [run.partition("-")[2] for run in server.runs] == ["a1-0", "b1-0", "a2-0", "b2-0", "v-0"]
    assert ["timed_out: too slow"] in [content for _, _, content in shown(server)]


def test_two_runs_of_an_experiment_are_kept_apart(server: Studio, tmp_path: Path) -> None:
    for _ in range(2):
        one = Run(tmp_path, f"studio_url: '{server.url}'")
        one.books.publish(EpisodeEnded(step=1, episode=episode()))
        one.books.close()
    assert len(server.runs) == 2


SCRIPT = """
import asyncio, sys
import agentscope
from agentscope.agent import AgentBase
from agentscope.message import Msg, TextBlock, ToolResultBlock, ToolUseBlock

class Speaker(AgentBase):
    name = "solver"
    async def reply(self, *args, **kwargs):
        call = ToolUseBlock(type="tool_use", id="c1", name="calculator", input={"expression": "7 * 3"})
        await self.print(Msg("solver", [call], "assistant"), True)
        result = ToolResultBlock(type="tool_result", id="c1", name="calculator", output="21")
        await self.print(Msg("system", [result], "system"), True)
        message = Msg("solver", [TextBlock(type="text", text="21")], "assistant")
        await self.print(message, True)
        return message

agentscope.agent.StudioUserInput = lambda **options: None  # it connects by socket.io, for users who type
agentscope.agent.UserAgent.override_class_input_method = classmethod(lambda cls, method: None)
agentscope.init(project="pens", name="theirs", studio_url=sys.argv[1], tracing_url=sys.argv[1] + "/v1/traces")
asyncio.run(Speaker()())
"""


def shape(value: Any) -> Any:
    """Which fields there are, and of which types; of a block, by its type."""
    if isinstance(value, dict):
        open_ended = ("input", "metadata")
        return {name: "object" if name in open_ended else shape(item) for name, item in sorted(value.items())}
    return [shape(item) for item in value] if isinstance(value, list) else type(value).__name__


@pytest.mark.slow
def test_requests_have_the_shape_of_agentscopes_own(server: Studio, tmp_path: Path) -> None:
    installed = pytest.importorskip("agentscope", minversion="1.0.18").__version__
    if not installed.startswith("1."):
        pytest.skip("AgentScope 2.x has no client of Studio; `make test-agentscope-1` runs this test")
    theirs = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.url], capture_output=True, text=True, check=False, timeout=120
    )
    assert theirs.returncode == 0, theirs.stderr
    (run_of_theirs,) = server.runs.values()
    their_blocks = {push["msg"]["content"][0]["type"]: push for push in server.messages}
    assert set(their_blocks) == {"text", "tool_use", "tool_result"}
    their_headers = [headers for path, headers, _ in server.requests if path.startswith("/trpc/")]
    count = len(server.requests)
    server.messages.clear()

    one = Run(tmp_path, f"studio_url: '{server.url}'")
    one.books.publish(EpisodeEnded(step=1, episode=episode()))
    one.books.close()
    assert one.notes == []
    (run_of_ours,) = (r for r in server.runs.values() if r is not run_of_theirs)
    assert shape(run_of_ours) == shape(run_of_theirs)
    for push in server.messages:
        assert (push.pop("name"), push.pop("role")) == (push["replyName"], push["replyRole"])  # for older Studios
        (first, *others) = push["msg"]["content"]
        if not others:
            assert shape(push) == shape(their_blocks[first["type"]])
    ours = [headers for _, headers, _ in server.requests[count:]]
    assert {h["content-type"] for h in ours} == {h["content-type"] for h in their_headers} == {"application/json"}


def test_a_studio_that_is_down_is_reported_once_and_tried_again_later(
    server: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio, "PAUSE", 0.0)
    server.status = 500
    one = Run(tmp_path, f"studio_url: '{server.url}', studio_episodes: 9")
    for number in range(3):
        one.books.publish(EpisodeEnded(step=1, episode=episode(f"t{number}-0")))
    while server.answered < 3:
        time.sleep(0.01)
    server.status = 200
    one.books.publish(EpisodeEnded(step=1, episode=episode("t3-0")))
    one.books.close()
    (note,) = one.notes
    assert "AgentScope Studio did not accept an episode" in note
    assert "500" in note
    assert [name.partition("-")[2] for name in server.runs] == ["t3-0"]


def test_after_a_failure_there_is_a_pause(server: Studio, tmp_path: Path) -> None:
    server.status = 500
    one = Run(tmp_path, f"studio_url: '{server.url}', studio_episodes: 9")
    for number in range(5):
        one.books.publish(EpisodeEnded(step=1, episode=episode(f"t{number}-0")))
    one.books.close()
    assert len(server.requests) == 1
    assert len(one.notes) == 1


def test_a_studio_that_hangs_or_is_slow_holds_up_nobody_for_long(
    server: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studio, "TIMEOUT", 0.3)
    server.hang = True
    one = Run(tmp_path, f"studio_url: '{server.url}'")
    one.books.publish(EpisodeEnded(step=1, episode=episode()))
    one.books.close()
    assert "gave no answer within 0.3 s" in one.notes[0]
    server.hang = False
    server.released.set()
    monkeypatch.setattr(studio, "LONGEST", 0.0)
    one = Run(tmp_path, f"studio_url: '{server.url}'")
    one.books.publish(EpisodeEnded(step=1, episode=episode()))
    one.books.close()
    assert "took 0 s for 0 messages" in one.notes[0]


def test_conversations_that_leave_the_machine_in_clear_are_announced(tmp_path: Path) -> None:
    one = Run(tmp_path, "studio_url: 'http://studio.example:3000'")
    one.books.close()
    assert "http://studio.example:3000 unencrypted" in one.notes[0]


def test_a_real_run_of_an_agentscope_agent(server: Studio, tmp_path: Path) -> None:
    pytest.importorskip("agentscope", minversion="2")  # as the example requires
    pytest.importorskip("torch")
    result = run(
        EXAMPLE,
        [
            f"astuner.experiment_dir={tmp_path}",
            f"astuner.telemetry.studio_url={server.url}",
            "astuner.debug.debug_first_n_tasks=2",
            "astuner.trainer_common.logger=[jsonl]",
        ],
        backbone="debug",
    )
    log = (result.run_dir / "run.log").read_text()
    assert "Studio" not in log
    assert len(server.runs) == 2
    transcripts = [json.loads(line) for line in (result.run_dir / "episodes" / "debug.jsonl").read_text().splitlines()]
    for written in transcripts:
        (name,) = (name for name in server.runs if name.endswith(f"-{written['episode_id']}"))
        mine = [push["msg"] for push in server.messages if push["runId"] == name]
        said = [m for m in mine if m["role"] == "assistant"]
        assert len(said) == len(written["turns"])
        texts = [b["text"] for m in mine for b in m["content"] if b["type"] == "text"]
        assert any(written["query"] in text for text in texts)
        assert f"reward {written['reward']:g}" in texts[-1]
