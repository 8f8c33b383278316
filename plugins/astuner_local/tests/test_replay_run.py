"""`astuner replay` and `astuner diff` on real runs of the tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

import astuner_record.replay.recording as replay_engine
from astuner import run
from astuner.cli import main
from astuner.contracts.types import Episode
from astuner_record.episode_log import EpisodeLog

from .conftest import EXAMPLE, SHORT

CONVERSATION = '''
from pathlib import Path
from astuner import Workflow, WorkflowOutput

class Play(Workflow):
    """Two agents in turn; what the second one hears besides is in a file."""
    async def execute(self, workflow_task, model_tuner):
        hint = (Path(__file__).parent / "hint.txt").read_text()
        said = []
        for n in range(2):
            for agent in ("wolf", "villager"):
                heard = " ".join([workflow_task.task.main_query, *said[-1:], hint if agent == "villager" else ""])
                reply = await model_tuner.chat([{"role": "user", "content": heard}], agent_name=agent)
                said.append(reply.message["content"])
        return WorkflowOutput(reward={"wolf": 1.0, "villager": 0.0})
'''
SETTINGS = """
astuner:
  model: {path: tiny-calculator}
  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}
  rollout:
    workflow: play.py->Play
    max_model_len: 200
    max_response_length_in_one_turn: 8
    compute_madness_checklist: []
  debug: {debug_first_n_tasks: 1}
  agents: {wolf: {}, villager: {}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of the example, measured before and after."""
    folder = tmp_path_factory.mktemp("trained")
    more = ["astuner.trainer_common.total_steps=2", "astuner.trainer_common.val_before_train=true"]
    place = [f"astuner.experiment_dir={folder}", "astuner.experiment_name=run"]
    run(EXAMPLE, [*SHORT, *place, *more], backbone="local")
    return folder / "run"


@pytest.fixture(scope="module")
def two_agents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One conversation of two agents, on the debug backbone."""
    folder = tmp_path_factory.mktemp("talk")
    (folder / "play.py").write_text(CONVERSATION)
    (folder / "hint.txt").write_text("now")
    (folder / "tasks.jsonl").write_text(json.dumps({"question": "Tom has 2 pens.", "answer": "2"}) + "\n")
    (folder / "game.yaml").write_text(SETTINGS)
    run(folder / "game.yaml", [f"astuner.experiment_dir={folder}", "astuner.experiment_name=talk"], backbone="debug")
    return folder / "talk.debug"


@pytest.fixture
def hint(two_agents: Path) -> Iterator[Path]:
    file = two_agents.parent / "hint.txt"
    yield file
    file.write_text("now")


def astuner(*arguments: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in arguments])
    return int(e.value.code or 0)


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> Any:
    assert astuner(*arguments, "--json") == code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def read(folder: str | Path, episode_id: str) -> Episode:
    with EpisodeLog(Path(folder)) as log:
        return log.read(episode_id).episode


def with_turns(folder: Path, *where: str) -> str:
    """An episode that asked a tool and then answered."""
    with EpisodeLog(folder) as log:
        return log.list(["turns=2", "stop_reason=completed", *where])[0].episode_id


@pytest.mark.slow
def test_a_fork_of_a_trained_run_has_the_recorded_tokens_and_goes_on_with_its_newest_model(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = with_turns(trained, "split=train", "step=1")
    found = answer(capsys, "replay", trained, chosen, "--from-turn", 1, "--times", 3)
    assert found["checkpoint"].endswith("checkpoints/step-000002")
    assert [fork["recorded_turns"] for fork in found["forks"]] == [[0]] * 3
    assert all(fork["divergences"] == [] and fork["reward"] is not None for fork in found["forks"])
    original = read(trained, chosen)
    for number in (1, 2, 3):
        fork = read(found["folder"], f"{chosen}.fork{number}")
        assert fork.turns[0].generation == original.turns[0].generation
        assert fork.turns[0].generation.policy_version == 0  # of the weights that spoke then
        assert fork.turns[1].generation.prompt_ids == original.turns[1].generation.prompt_ids
    assert astuner("replay", found["folder"], "--list") == 0  # a folder of forks is a run
    assert f"{chosen}.fork3" in capsys.readouterr().out


def test_a_whole_episode_is_replayed_without_loading_a_model(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_engine, "serve_policies", None)  # would raise
    chosen = with_turns(trained)
    found = answer(capsys, "replay", trained, chosen, "--from-turn", 2)
    assert found["checkpoint"] == "none: all is recorded"
    (fork,) = found["forks"]
    original = read(trained, chosen)
    assert (fork["differs_from_turn"], fork["reward"]) == (None, original.reward)
    again = read(found["folder"], f"{chosen}.fork1")
    assert [t.generation for t in again.turns] == [t.generation for t in original.turns]
    assert [t.message for t in again.turns] == [t.message for t in original.turns]


def test_one_checkpoint_says_what_it_would_say_at_a_turn(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = with_turns(trained)
    options = ("--from-turn", 0, "--to-turn", 1, "--checkpoint", "base", "astuner.rollout.temperature=0.5")
    found = answer(capsys, "replay", trained, chosen, *options)
    (fork,) = found["forks"]
    assert (fork["turns"], fork["stop_reason"], fork["reward"]) == (1, "cancelled", None)
    assert found["checkpoint"] == "base"


def test_the_runs_own_judge_agrees_with_itself(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "replay", trained, "--where", "split=validation")
    assert found["judge"] == "math_answer"
    agreed = found["agreement"]
    assert (agreed["agreement"], agreed["difference"]) == (1.0, 0.0)
    assert agreed["episodes"] == 32  # 16 tasks, before and after


def test_another_judge_of_a_file_disagrees(
    trained: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "never.py").write_text(
        "from astuner import Judge, JudgeOutput\n\n\nclass Never(Judge):\n"
        "    async def judge(self, workflow_task, output):\n        return JudgeOutput(reward=-1.0)\n"
    )
    monkeypatch.chdir(tmp_path)
    found = answer(capsys, "replay", trained, "--where", "split=validation", "--judge", "never.py->Never")
    table = found["agreement"]["table"]
    assert table["both_success"] == table["only_now"] == 0
    assert found["agreement"]["reward_now"] == -1.0


def test_before_and_after_training_on_the_same_tasks(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "diff", trained, trained, "--step-a", 0)
    assert (found["a"][0]["step"], found["b"][0]["step"]) == (0, 2)
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    measured = {row["step"]: row for row in rows if "val/success" in row}
    success, reward = found["measures"]["success"], found["measures"]["reward"]
    assert (success["a"], success["b"]) == (measured[0]["val/success"], measured[2]["val/success"])
    assert (reward["a"], reward["b"]) == (measured[0]["val/reward/mean"], measured[2]["val/reward/mean"])
    assert found["tasks"]["paired"] == 16
    assert sum(found["table"].values()) == 16
    assert len(found["won"]) == found["table"]["only_b"]
    for flip in found["won"]:
        assert read(trained, flip["episodes_b"][0]).is_success


def test_each_agent_gets_its_own_turns_back(two_agents: Path, capsys: pytest.CaptureFixture[str]) -> None:
    original = read(two_agents, "d0000000-0")
    assert [t.agent for t in original.turns] == ["wolf", "villager", "wolf", "villager"]
    found = answer(capsys, "replay", two_agents, "d0000000-0", "--from-turn", 3, "--checkpoint", "base")
    fork = read(found["folder"], "d0000000-0.fork1")
    assert [t.generation for t in fork.turns[:3]] == [t.generation for t in original.turns[:3]]
    assert fork.turns[3].agent == "villager"
    assert fork.turns[3].generation.prompt_ids == original.turns[3].generation.prompt_ids
    assert fork.verdict == original.verdict  # one reward for each


def test_a_workflow_that_hears_something_else_has_left_the_record(
    two_agents: Path, hint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hint.write_text("later")
    options = ("replay", two_agents, "d0000000-0", "--checkpoint", "base", "--from-turn", 3)
    assert astuner(*options) == 1
    shown = capsys.readouterr()
    assert "fork 1 diverged: turn 1 of agent 'villager': the prompt differs from token" in shown.out
    assert "--allow-divergence" in shown.err
    found = answer(capsys, *options, "--allow-divergence")
    (fork,) = found["forks"]
    assert fork["divergences"][0]["turn"] == 1
    assert fork["turns"] == 4
    assert 1 not in fork["recorded_turns"]
    assert 0 in fork["recorded_turns"]
