"""The names of numbers: each is known once, and a backbone that calls them otherwise is told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner.config.schema import Optim, TrainerCommon
from astuner.contracts.events import StepEnded
from astuner.contracts.types import Sample
from astuner.rollout.metrics import derived
from astuner.runs.run import TrainingRun
from astuner.runs.tasks import read_tasks
from astuner.testing import check_metrics, fake_config
from astuner_objectives.schedule import learning_rate, mean_learning_rate
from astuner_objectives.step import kl_from_rollout
from astuner_ray.training.updates import Updates
from astuner_testing.metrics import find, metrics, required
from tests.table import table


def step(**more: float) -> dict[str, Any]:
    """A row with everything that a step of the local backbone has."""
    names = (*required("step", "local"), *required("update", "local"))
    return {"step": 1, "time": 1.7e9, **dict.fromkeys(names, 0.5), "nothing_learnable": 0.0, **more}


def validation(**more: float) -> dict[str, Any]:
    return {"step": 1, "time": 1.7e9, **dict.fromkeys(required("validation", "local"), 0.5), **more}


def without(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {n: value for n, value in row.items() if n != name}


def test_every_name_is_there_once_and_says_what_it_is() -> None:
    names = [metric.name for metric in metrics()]
    assert len(set(names)) == len(names)
    for metric in metrics():
        assert metric.meaning.strip() == metric.meaning != ""
        assert "  " not in metric.meaning, metric.name
        assert set(metric.backbones) <= {"local", "verl", "trinity"}


@table(
    ("logged", "name"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/wolf/mean", "reward/<role>/mean"),
        ("policy/wolf/kl/ref", "kl/ref"),
        ("judge/parts/style", "judge/<name>"),
        ("val/success/pass@16", "val/success/pass@<k>"),
        ("merge/branches/rewritten", "merge/branches/<reason>"),
    ],
)
def test_a_logged_name_is_found(logged: str, name: str) -> None:
    metric = find(logged)
    assert metric is not None
    assert metric.name == name


@table("logged", ["reward", "critic/rewards/mean", "val/success/pass@many", "clip_frac/", "policy/x"])
def test_what_nobody_knows_is_not_found(logged: str) -> None:
    assert find(logged) is None


def test_the_names_of_the_field_are_on_every_backbone() -> None:
    of_the_field = {
        "reward/mean", "kl", "entropy", "clip_frac", "response_length/mean", "policy_staleness", "grad_norm", "lr",
        "throughput/tokens_per_s", "time/step", "time/train", "time/save", "tokens/trained",
    }  # fmt: skip
    for backbone in ("local", "verl", "trinity", "somebody's"):
        assert of_the_field <= {*required("step", backbone), *required("update", backbone)}
    assert "engine/requests" in required("step", "local")
    assert "engine/requests" not in required("step", "verl")


def test_what_follows_from_other_numbers() -> None:
    given = {
        "staleness/mean": 2.0, "clip_frac/low": 0.25, "clip_frac/high": 0.5,
        "policy/a/clip_frac/low": 0.125, "policy/a/clip_frac/high": 0.125, "workflow/staleness/mean": 9.0,
        "policy/b/clip_frac/low": 1.0,
    }  # fmt: skip
    assert derived(given) == {"policy_staleness": 2.0, "clip_frac": 0.75, "policy/a/clip_frac": 0.25}


def test_an_experiment_logs_what_follows(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(
        "from astuner import Workflow\nclass Agent(Workflow):\n    def execute(self, workflow_task, model_tuner): ...\n"
    )
    (tmp_path / "tasks.jsonl").write_text('{"main_query": "2 + 2?"}\n')
    config = fake_config(
        tmp_path,
        '  rollout: {workflow: "agent.py->Agent"}\n'
        "  task_reader: {type: jsonl, jsonl: {training: {file_path: tasks.jsonl}}}\n"
        "  trainer_common: {total_steps: 1}\n",
    )
    from astuner.builtin.console import JsonlSink
    from astuner.runs.run_dir import RunDir

    run_dir = RunDir(tmp_path / "run")
    run_dir.start()
    experiment = TrainingRun(config, run_dir, read_tasks(config), sinks=[JsonlSink()])
    experiment.publish(StepEnded(step=1, metrics={"clip_frac/low": 0.25, "clip_frac/high": 0.5}))
    experiment.close()
    (row,) = run_dir.read_metrics()
    assert row["clip_frac"] == 0.75


def test_kl_is_between_the_policy_that_spoke_and_the_one_that_is_trained() -> None:
    """Over all of a small vocabulary, weighed as it was drawn, the estimate is the divergence itself."""
    rollout = torch.tensor([0.5, 0.3, 0.2]).log()
    trained = torch.tensor([0.4, 0.4, 0.2]).log()
    estimate = kl_from_rollout(trained, rollout)
    assert (estimate >= 0).all()
    truth = float((rollout.exp() * (rollout - trained)).sum())
    assert float((rollout.exp() * estimate).sum()) == pytest.approx(truth, rel=1e-5)
    assert not kl_from_rollout(rollout, rollout).any()


def test_the_rate_of_a_step_is_the_mean_over_its_optimizer_steps() -> None:
    optim = Optim(lr=1.0, lr_warmup_steps=4)
    assert mean_learning_rate(optim, 2, 4, None) == pytest.approx((0.75 + 1 + 1 + 1) / 4)
    assert mean_learning_rate(optim, 0, 1, None) == learning_rate(optim, 0, None)


def test_what_an_update_is_given() -> None:
    one = Sample(
        episode_id="e", group_id="g", agent="a", input_ids=(1, 2, 3), loss_mask=(0, 1, 1), logprobs=(0.0, -0.5, -0.5),
        policy_version=0, reward=1.0,
    )  # fmt: skip
    common = TrainerCommon(ppo_epochs=2, optim=Optim(lr=1.0))
    updates = Updates(common, total_steps=10)
    assert updates.metrics(1, [one], 1) == {"nothing_learnable": 1, "tokens/trained": 0}, "no advantage, no gradient"
    assert updates.metrics(2, [replace(one, advantage=1.0), one], 1) == {
        "nothing_learnable": 0, "tokens/trained": 8, "tokens/raw": 12, "lr": 1.0,
    }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- the conformance


def test_a_backbone_that_logs_all_of_them_passes() -> None:
    nothing = {n: v for n, v in step(nothing_learnable=1.0).items() if n not in set(required("update", "local"))}
    check_metrics([validation(), step(), nothing, step(**{"local/own": 1.0, "kl/ref": 0.0})], backbone="local")
    several = {f"policy/a/{n}" if n in ("loss", "kl", "nothing_learnable") else n: v for n, v in step().items()}
    check_metrics([several], backbone="local")


@table(
    ("row", "says"),
    [
        (step(**{"rewards/mean": 1.0}), "Did you mean reward/mean"),
        (step(**{"actor/ppo_kl": 1.0}), "below local/"),
        (step(**{"verl/actor/ppo_kl": 1.0}), "is not a metric of local"),
        (step(**{"queue/batches": 1.0}), "is not a metric of local"),
        (without(step(), "kl"), "the update of step 1 lacks kl"),
        (without(step(), "reward/mean"), "step 1 lacks reward/mean"),
        (without(validation(), "val/tasks"), "the validation after step 1 lacks val/tasks"),
        (step(loss=float("nan")), "must be a finite number"),
        (step(nothing_learnable=1.0), "rows of a run that learns"),
    ],
)
def test_what_a_backbone_does_otherwise_is_said(row: dict[str, Any], says: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(says)):
        check_metrics([row], backbone="local")
