"""The FrozenLake example: the agent crosses over the service, the model is as it says, and a control does not cheat."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from astuner import Task, WorkflowTask, load_config
from astuner.chat.codec import ChatCodec
from astuner.contracts.types import Episode, SamplingParams, StopReason
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import FakeEngine, make_tokenizer

pytest.importorskip("gymnasium", reason="FrozenLake is gymnasium's")
pytest.importorskip("agentscope", reason="the example's agent is an AgentScope agent")

from astuner_env.worlds.frozen_lake import DIRECTIONS, FrozenLake, make_map

REPOSITORY = Path(__file__).parents[4]
EXAMPLE = REPOSITORY / "examples" / "frozen_lake"
TOKENIZER = make_tokenizer()


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"frozen_lake_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def play(say: Callable[[str], str], task_id: str = "5x5:1000000") -> Episode:
    """One episode of the example, its environment in this process and its model ``say``."""
    overrides = ["astuner.task_reader.type=environment", "astuner.task_reader.environment.env_type=frozen_lake"]
    config = load_config(EXAMPLE / "frozen_lake.yaml", overrides)
    task = WorkflowTask(task=Task(task_id=task_id, env_type="frozen_lake"), episode_id="e", group_id="g")
    models = one_model(FakeEngine(say, TOKENIZER), ChatCodec(TOKENIZER))
    return asyncio.run(EpisodeRunner(config).run(task, models, SamplingParams(max_tokens=100)))


def last_seen(prompt: str) -> dict[str, str]:
    """What is around, by direction, in the newest observation of a prompt."""
    around = prompt.rpartition("left: ")[2].partition(". Goal")[0]
    return dict(part.split(": ") for part in f"left: {around}".split(", "))


def walker(prompt: str) -> str:
    """Goes right or down where that is safe."""
    around = last_seen(prompt)
    return next((f"[{way}]" for way in ("right", "down", "left", "up") if around[way] in ("ice", "goal")), "[up]")


def crossed_by_walker() -> str:
    """A held-out lake that `walker` crosses."""
    params = {"size": 5, "view": "neighbours", "max_steps": 20}
    for task in FrozenLake.tasks("validation", params):
        lake = FrozenLake(params)
        seen = lake.reset(task)
        while not seen.is_over:
            seen = lake.step({"content": walker(seen.observation)})
        if lake.evaluate().is_success:
            return task.task_id
    raise AssertionError("none")


def test_an_agent_that_looks_where_it_goes_gets_the_reward() -> None:
    prompts: list[str] = []

    def say(prompt: str) -> str:
        prompts.append(prompt)
        return walker(prompt)

    episode = play(say, crossed_by_walker())
    assert (episode.stop_reason, episode.reward, episode.error) == (StopReason.COMPLETED, 1.0, "")
    assert episode.output is not None
    assert episode.output.metadata == {"end": "You reached the goal."}
    assert episode.output.metrics["moves"] == len(prompts) >= 8
    assert "Cross the frozen lake" in prompts[0]
    assert prompts[1].startswith(prompts[0])  # a conversation that only grows
    assert prompts[0].count("left: ") == 1


def test_falling_and_running_out_of_moves_are_rewarded_with_nothing() -> None:
    def jump(prompt: str) -> str:
        around = last_seen(prompt)
        return next((f"[{way}]" for way in DIRECTIONS if around[way] == "hole"), walker(prompt))

    beside_a_hole = next(
        f"5x5:{seed}"
        for seed in range(1_000_000, 1_000_256)
        if "H" in (tiles := make_map(5, 0.8, seed))[0][1] + tiles[1][0]
    )
    episode = play(jump, beside_a_hole)
    assert (episode.stop_reason, episode.reward) == (StopReason.COMPLETED, 0.0)
    assert episode.output is not None
    assert episode.output.metadata == {"end": "You fell into a hole."}
    lost = play(lambda prompt: "I am lost.")
    assert (lost.stop_reason, lost.reward) == (StopReason.COMPLETED, 0.0)
    assert lost.output is not None
    assert lost.output.metrics == {"moves": 20, "unreadable": 1.0}


def test_the_model_fits_the_environment_and_knows_its_format() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(EXAMPLE / "tiny_skater")
    params = module(EXAMPLE / "make_model.py").params()
    shown = FrozenLake(params).reset(Task(task_id="5x5:7")).as_messages
    ids = tokenizer.apply_chat_template(shown, add_generation_prompt=True, return_dict=False)
    assert len(ids) < 100
    assert max(len(tokenizer.encode(f"[{way}]")) for way in DIRECTIONS) <= 3
    assert sum(file.stat().st_size for file in (EXAMPLE / "tiny_skater").iterdir()) < 600_000


def test_the_model_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model = module(EXAMPLE / "make_model.py")
    monkeypatch.setattr(make_model, "BATCH", 4)
    loss = make_model.make_model(tmp_path, seed=1, steps=2, count=8)
    assert 0 < loss < 20
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in (EXAMPLE / "tiny_skater").iterdir()}


@pytest.mark.slow
def test_it_trains_over_the_service(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "astuner", "run", str(EXAMPLE / "frozen_lake.yaml")]
    command += ["--with", "frozen_lake", "--backbone", "local", f"astuner.experiment_dir={tmp_path}"]
    command += ["astuner.trainer_common.total_steps=2", "astuner.data.max_validation_tasks=8"]
    command += ["astuner.rollout.num_repeat=4", "astuner.data.train_batch_size=2"]
    environ = {**os.environ, "ASTUNER_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "frozen_lake" / "metrics.jsonl").read_text()
    rows: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines()]
    steps = [row for row in rows if "rollout/episodes" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/errored_frac"] == 0 and row["merge/exact_frac"] == 1 for row in steps)
    assert [row["val/tasks"] for row in rows if "val/success" in row] == [8, 8]
    assert "the environment service (frozen_lake)" in done.stderr
