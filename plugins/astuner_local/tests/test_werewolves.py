"""The Werewolves example on its real tiny model: whole games, real training steps, credit for each role."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import astuner.runs.run
from astuner import run
from astuner.contracts.types import Episode, Sample
from astuner.rollout.credit import Scored
from astuner.rollout.turns import SampleSet
from astuner.runs.launch import RunResult
from astuner_objectives.advantages import EPSILON

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "werewolves"
FILES = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
SHORT = (
    "astuner.trainer_common.total_steps=2",
    "astuner.trainer_common.test_freq=100",
    "astuner.trainer_common.val_before_train=false",
    "astuner.trainer_common.save_freq=100",
    "astuner.data.max_validation_tasks=2",
    "astuner.data.train_batch_size=3",
    "astuner.rollout.num_repeat=6",
)


class Seen:
    """What a run cut its episodes into, and what credit the samples got."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cut: list[tuple[Episode, SampleSet]] = []
        self.credited: list[tuple[Sequence[Scored], list[Sample]]] = []
        build, assign = astuner.runs.run.build_samples, astuner.runs.run.assign_credit

        def build_samples(episode: Episode, **options: Any) -> SampleSet:
            self.cut.append((episode, made := build(episode, **options)))
            return made

        def assign_credit(episodes: Sequence[Scored], *args: Any, **options: Any) -> list[Sample]:
            self.credited.append((episodes, samples := assign(episodes, *args, **options)))
            return samples

        monkeypatch.setattr(astuner.runs.run, "build_samples", build_samples)
        monkeypatch.setattr(astuner.runs.run, "assign_credit", assign_credit)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def play(tmp_path: Path, file: str, *more: str, backbone: str = "local") -> RunResult:
    place = [f"astuner.experiment_dir={tmp_path}", "astuner.experiment_name=run"]
    return run(EXAMPLE / file, [*SHORT, *place, *more], backbone=backbone)


def rows(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def advantages(rewards: Sequence[float]) -> list[float]:
    mean, std = statistics.mean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + EPSILON) for reward in rewards]


def check_credit(episodes: Sequence[Scored], samples: Sequence[Sample], rewards: dict[str, dict[str, float]]) -> None:
    """Every sample's advantage is its role's reward, compared with the same role in the games of the same deal.

    :param rewards: episode id -> role -> reward, as the workflow returned them.
    """
    group_of = {e.episode_id: e.group_id for e in episodes}
    for sample in samples:
        games = [e for e, group in group_of.items() if group == sample.group_id]
        expected = advantages([rewards[e][sample.role] for e in games])[games.index(sample.episode_id)]
        assert math.isclose(sample.advantage, expected, abs_tol=1e-9)
        assert sample.reward == rewards[sample.episode_id][sample.role]


@pytest.mark.slow
def test_the_werewolves_train_and_the_village_is_in_no_sample(tmp_path: Path, seen: Seen) -> None:
    play(tmp_path, "werewolves.yaml")
    for episode, made in seen.cut:
        roles = {turn.role: turn.trained for turn in episode.turns}
        assert roles == {"werewolf": True, "villager": False, "seer": False}
        assert {sample.role for sample in made.samples} == {"werewolf"}
        assert len(made.samples) == len({turn.agent for turn in episode.turns if turn.trained})
        trained = sum(sample.trained_tokens for sample in made.samples)
        assert made.generated_tokens == trained + made.untrained_tokens
        assert made.untrained_tokens == sum(len(t.generation.response_ids) for t in episode.turns if not t.trained)
        assert made.dropped_tokens == 0
        for sample in made.samples:
            *_, last = [turn for turn in episode.turns if turn.agent == sample.agent]
            assert sample.input_ids == [*last.generation.prompt_ids, *last.generation.response_ids]
    rewards = {episode.workflow_task.episode_id: episode.output.reward for episode, _ in seen.cut if episode.output}
    assert len({reward["werewolf"] for reward in rewards.values()}) > 1  # else there is nothing to see below
    assert all(-2 <= reward <= 1 for of_roles in rewards.values() for reward in of_roles.values())
    assert all(reward["werewolf"] + reward["villager"] <= 1 for reward in rewards.values())
    for episodes, samples in seen.credited:
        check_credit(episodes, samples, rewards)
    steps = [row for row in rows(tmp_path) if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["merge/exact_frac"] == 1.0
        assert row["success/mean"] == row["workflow/werewolves_win"]
        wasted = row["workflow/werewolf_illegal"] + row["workflow/werewolf_unclear"]
        assert row["reward/werewolf/mean"] == pytest.approx(row["success/mean"] - 2 * wasted)
        assert 0 < row["tokens/trainable"] < row["tokens/generated"]
    assert any(row.get("policy/default/grad_norm", 0) > 0 for row in steps)


@pytest.mark.slow
def test_both_sides_train_with_a_policy_of_their_own(tmp_path: Path, seen: Seen) -> None:
    play(tmp_path, "werewolves_two_policies.yaml", "astuner.trainer_common.total_steps=1")
    rewards = {episode.workflow_task.episode_id: episode.output.reward for episode, _ in seen.cut if episode.output}
    for _, made in seen.cut:
        assert {(sample.role, sample.policy) for sample in made.samples} >= {("werewolf", "pack"), ("seer", "village")}
        assert made.generated_tokens == sum(sample.trained_tokens for sample in made.samples)
        assert made.untrained_tokens == 0
    for episodes, samples in seen.credited:
        check_credit(episodes, samples, rewards)
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    assert {path.name for path in checkpoint.iterdir() if (path / "config.json").is_file()} == {"pack", "village"}


def test_the_debug_backbone_plays_it(tmp_path: Path) -> None:
    result = play(tmp_path, "werewolves.yaml", backbone="debug")
    told = (result.run_dir / "run.log").read_text(encoding="utf-8")
    assert "You are player 1 of 7 in a game of Werewolves" in told
    assert "player_7" in told


@pytest.fixture
def make_model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [*sys.path, str(EXAMPLE)])  # as it is when the script is run
    spec = importlib.util.spec_from_file_location("werewolf_make_model", EXAMPLE / "make_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_model_is_what_the_script_makes(make_model: ModuleType, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    loss = make_model.make_model(tmp_path, steps=2, count=20)
    shipped = EXAMPLE / "tiny_werewolf"
    for name in FILES:
        assert (tmp_path / name).read_text() == (shipped / name).read_text(), name
    assert AutoModelForCausalLM.from_pretrained(shipped).num_parameters() < 200_000
    assert 1 < loss < 7  # ln 512 is 6.2: two steps teach little
