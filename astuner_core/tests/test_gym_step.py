"""`model_tuner.gym_step`: the environment of the task, opened before the workflow, closed whatever happens."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Episode, SamplingParams, StopReason, Task, WorkflowTask
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from tests.table import table

TOKENIZER = make_tokenizer()
WORLD = """
from pathlib import Path
from astuner import Environment, Workflow, WorkflowOutput
from astuner.contracts.environment import StepResult
LOG = Path(__file__).with_name("log")
def note(text):
    with LOG.open("a") as file:
        file.write(text + "\\n")
class Count(Environment):
    @classmethod
    def tasks(cls, split, params):
        return iter(())
    def reset(self, task):
        note(f"reset {task.task_id}")
        self.left = 2
        return StepResult(observation="go")
    def step(self, action):
        if action["content"] == "break":
            raise RuntimeError("broken")
        note(f"step {action['role']} {action['content']}")
        self.left -= 1
        return StepResult(observation=f"{self.left} left", reward=0.5, terminated=self.left == 0, info={"n": self.left})
    def evaluate(self):
        return 1.0
    def close(self):
        note("close")
class Mine(Workflow):
    async def execute(self, workflow_task, model_tuner):
"""


def play(folder: Path, body: str, env_type: str = "mine.py->Count", settings: str = "") -> tuple[Episode, list[str]]:
    lines = "".join(f"        {line}\n" for line in body.splitlines())
    (folder / "mine.py").write_text(WORLD + lines)
    config = fake_config(folder, "  rollout:\n    workflow: mine.py->Mine\n    max_retries: 0\n" + settings)
    task = WorkflowTask(task=Task(task_id="t1", env_type=env_type), episode_id="e", group_id="g")
    models = one_model(FakeEngine(["left"], TOKENIZER), ChatCodec(TOKENIZER))
    episode = asyncio.run(EpisodeRunner(config).run(task, models, SamplingParams(max_tokens=50)))
    log = folder / "log"
    return episode, log.read_text().splitlines() if log.exists() else []


def test_the_seeds_loop(tmp_path: Path) -> None:
    episode, log = play(
        tmp_path,
        "said, total = '', 0.0\n"
        "for _ in range(5):\n"
        "    reply = (await model_tuner.chat([{'role': 'user', 'content': 'go'}])).message if not said else {}\n"
        "    said = reply.get('content', said)\n"
        "    obs, reward, terminate, info = model_tuner.gym_step(action={'content': said, 'role': 'assistant'})\n"
        "    total += reward\n"
        "    if terminate: break\n"
        "    if model_tuner.context_overflow: break\n"
        "return WorkflowOutput(reward=total, metadata={'obs': obs, 'info': info})\n",
    )
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.COMPLETED, 1.0, "")
    assert episode.output is not None
    assert episode.output.metadata == {"obs": "0 left", "info": {"n": 0, "terminated": True, "truncated": False}}
    assert log == ["reset t1", "step assistant left", "step assistant left", "close"]


@pytest.mark.parametrize(
    ("content", "heard"),
    [
        ("[{'type': 'text', 'text': 'a'}, {'type': 'thinking'}, {'type': 'text', 'text': 'b'}]", "a\nb"),
        ("[__import__('types').SimpleNamespace(type='text', text='of 2.x')]", "of 2.x"),
        ("None", ""),
    ],
    ids=["1.x", "2.x", "nothing"],
)
def test_agentscopes_blocks_are_text(tmp_path: Path, content: str, heard: str) -> None:
    _, log = play(
        tmp_path, f"await model_tuner.gym_step_async({{'content': {content}}})\nreturn WorkflowOutput(reward=0.0)\n"
    )
    assert "\n".join(log) == f"reset t1\nstep assistant {heard}\nclose"


SLOW = """
import time
class Slow(Count):
    def __init__(self, config=None):
        note("made")
    def step(self, action):
        while not LOG.with_name("go").exists():
            time.sleep(0.02)
        return super().step(action)
"""


def test_an_environment_that_is_stuck_does_not_hold_up_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner.rollout.runner.GRACE_SECONDS", 0.2)
    (tmp_path / "slow.py").write_text(WORLD.partition("class Mine")[0] + SLOW)
    body = "await model_tuner.gym_step_async({'content': 'x'})\nreturn WorkflowOutput(reward=0.0)\n"
    episode, log = play(tmp_path, body, "slow.py->Slow", "    episode_timeout: 0.3\n")
    assert (episode.stop_reason, log) == (StopReason.TIMED_OUT, ["made", "reset t1"])
    (tmp_path / "go").touch()
    deadline = time.monotonic() + 10
    while "close" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "log").read_text().splitlines()[-1] == "close"  # in the end it is given back all the same


@table(
    ("action", "env_type", "reason", "complaint"),
    [
        ("{'content': 'break'}", "mine.py->Count", StopReason.ENVIRONMENT_FAILED, "in step: RuntimeError: broken"),
        ("{'content': 'x'}", "", StopReason.ENVIRONMENT_FAILED, "has no env_type"),
        ("{'content': 'x'}", "nowhere", StopReason.ENVIRONMENT_FAILED, "unknown environment 'nowhere'"),
        ("'left'", "mine.py->Count", StopReason.WORKFLOW_FAILED, "gym_step takes an assistant message"),
    ],
)
def test_a_failing_environment_is_never_a_reward(
    tmp_path: Path, action: str, env_type: str, reason: StopReason, complaint: str
) -> None:
    episode, log = play(
        tmp_path,
        f"try:\n    model_tuner.gym_step({action})\nexcept Exception as e:\n    if isinstance(e, TypeError): raise\n"
        "return WorkflowOutput(reward=1.0)\n",
        env_type,
    )
    assert (episode.stop_reason, episode.reward) == (reason, None)
    assert complaint in episode.error
    assert log in ([], ["reset t1", "close"])
