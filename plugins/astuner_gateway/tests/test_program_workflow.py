"""The `program` workflow: a program of any kind, its agents, its answer, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Episode, SamplingParams, StopReason
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.turns import build_samples
from astuner.testing import FakeEngine, fake_config, make_tokenizer, workflow_task
from tests.table import table

TOKENIZER = make_tokenizer()
ASK = """
import json, os, sys, urllib.request
def ask(messages, key=os.environ["OPENAI_API_KEY"]):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body,
                                     {"Authorization": "Bearer " + key, "Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.load(opener.open(request))["choices"][0]["message"]
given = sys.stdin.read()
"""


def play(folder: Path, program: str, replies: Any = ("four",), settings: str = "", **section: Any) -> Episode:
    script = folder / "agent.py"
    script.write_text(ASK + program)
    section = {"argv": [sys.executable, script.name], **section}  # it runs in the experiment file's folder
    yaml = f"  rollout:\n    workflow: program\n    max_retries: 0\n    program: {json.dumps(section)}\n{settings}"
    runner = EpisodeRunner(fake_config(folder, yaml))

    async def once() -> Episode:
        engine = FakeEngine(replies, TOKENIZER)
        try:
            return await runner.run(
                workflow_task(answer="4"), one_model(engine, ChatCodec(TOKENIZER)), SamplingParams(max_tokens=100)
            )
        finally:
            await runner.close()

    return asyncio.run(once())


REWARDED = "{'final_answer': said, 'reward': 1.0, 'metrics': {'calls': 1}}"


def test_its_conversation_is_recorded_and_its_output_is_the_answer(tmp_path: Path) -> None:
    episode = play(
        tmp_path,
        "said = ask([{'role': 'user', 'content': given}])['content']\nprint('a log line')\n"
        f"print(json.dumps({REWARDED}))\n",
        output="json",
    )
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.COMPLETED, 1.0, "")
    assert episode.output is not None
    assert episode.output.metadata == {"final_answer": "four"}
    assert episode.output.metrics == {"calls": 1.0}
    (turn,) = episode.turns
    assert turn.request[0]["content"] == "What is 2 + 2?"
    assert build_samples(episode).generated_tokens == len("four") + 1


def test_text_goes_to_the_judge_and_the_reference_answer_does_not_go_to_the_program(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from astuner import Judge, JudgeOutput\n"
        "class Same(Judge):\n"
        "    def judge(self, workflow_task, output):\n"
        "        return JudgeOutput(reward=float(output.metadata['final_answer'] == 'four, and no answer given'))\n"
    )
    program = (
        "task = json.loads(given)\nassert sorted(task) == ['init_messages', 'main_query', 'task_id']\n"
        "print(ask([{'role': 'user', 'content': task['main_query']}])['content'] + ', and no answer given')\n"
    )
    episode = play(tmp_path, program, settings="  task_judge:\n    judge: mine.py->Same\n", input="json")
    assert (episode.reward, episode.reward_source, episode.error) == (1.0, "judge", "")


def test_each_of_its_agents_has_a_key_of_its_own(tmp_path: Path) -> None:
    program = (
        "for name in ('wolf', 'sheep'):\n"
        "    ask([{'role': 'user', 'content': name}], os.environ['ASTUNER_KEY_' + name])\n"
        "print(json.dumps({'reward': {'wolf': 1.0}}))\n"
    )
    agents = "  agents:\n    wolf: {}\n    sheep: {train: false}\n"
    episode = play(tmp_path, program, ["howl", "baa"], agents, agents=["wolf", "sheep"], output="json")
    assert [(t.agent, t.role, t.trained) for t in episode.turns] == [("wolf", "wolf", True), ("sheep", "sheep", False)]
    built = build_samples(episode)
    assert [s.agent for s in built.samples] == ["wolf"]
    assert (built.generated_tokens, built.untrained_tokens) == (len("howl") + 1 + len("baa") + 1, len("baa") + 1)


@table(
    ("program", "section", "complaint"),
    [
        ("sys.exit('I broke')", {}, "ended with exit status 1: I broke"),
        ("sys.exit(os.environ['OPENAI_API_KEY'] + ' ' + os.environ['JUDGE_KEY'])", {}, "exit status 1: *** ***"),
        ("sys.exit('no ' + os.environ.get('HOST_KEY', 'key'))", {}, "exit status 1: no key"),
        (
            "def deep(n):\n    return deep(n - 1) if n else 1 / 0\ndeep(2)",
            {},
            "exit status 1: ZeroDivisionError: division by zero; output before it: Traceback",
        ),
        ("print('no json')", {"output": "json"}, "the last line of"),
        ("sys.stdout.write('x' * 5_000_000)", {}, "wrote more than 4 MiB"),
        ("", {"argv": ["no-such-program-anywhere"]}, "cannot start 'no-such-program-anywhere'"),
    ],
)
def test_what_goes_wrong_is_said(
    tmp_path: Path, program: str, section: dict[str, Any], complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "my-judges-key")
    monkeypatch.setenv("HOST_KEY", "for ASTuner alone")
    agents = (
        "  agents:\n    default: {}\n"
        "    host: {model: external, name: x, base_url: 'http://127.0.0.1:9/v1', api_key_env: HOST_KEY}\n"
    )
    episode = play(tmp_path, program, settings=agents, **section)
    assert episode.stop_reason is StopReason.WORKFLOW_FAILED
    assert complaint in episode.error


def test_a_refusal_that_ends_a_program_is_told_in_its_own_words(tmp_path: Path) -> None:
    episode = play(tmp_path, "ask([{'role': 'user', 'content': given, 'audio': {'id': 'a'}}])")
    assert episode.stop_reason is StopReason.WORKFLOW_FAILED
    assert "messages[0].audio is" in episode.error
    told = (
        "import urllib.error\n"
        "try:\n    ask([{'role': 'robot', 'content': given}])\n"
        "except urllib.error.HTTPError as e:\n"
        "    raise RuntimeError('Error code: 400 - ' + e.read().decode() + ', deep in a framework') from e\n"
    )
    episode = play(tmp_path, told)
    assert episode.error.startswith("messages[0].role is")


def test_an_answer_counts_though_a_child_holds_the_output_open(tmp_path: Path) -> None:
    program = (
        "import subprocess\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(json.dumps({'reward': 1.0}))\n"
    )
    episode = play(tmp_path, program, output="json")
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.COMPLETED, 1.0, "")


def test_nothing_it_started_outlives_the_episode(tmp_path: Path) -> None:
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    episode = play(tmp_path, program, settings="    episode_timeout: 2.0\n")
    assert episode.stop_reason is StopReason.TIMED_OUT
    deadline = time.monotonic() + 10
    left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if _alive(pid)]
        time.sleep(0.05)
    assert not left


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
