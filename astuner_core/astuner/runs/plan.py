"""What a run will do, before it does anything: the batch arithmetic, the parts and where they come from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from astuner.contracts.secrets import without_user
from astuner.rollout.agents import AgentRegistry
from astuner.rollout.parts import source_of
from astuner.runs.tasks import TaskSet, planned_steps

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.config.schema import Agent, Model


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Lines of (what, value), in the order a person reads them."""

    title: str
    lines: Mapping[str, str]

    def __str__(self) -> str:
        width = max(len(name) for name in self.lines)
        return "\n".join([self.title, *(f"  {name:<{width}}  {value}" for name, value in self.lines.items())])


def make_plan(
    config: Config,
    trains: bool,
    of_backbone: Mapping[str, str],
    run_dir: Path,
    tasks: TaskSet,
) -> Plan:
    """Compute the plan: imports the workflow, loads no weights and starts nothing.

    :param of_backbone: the backbone's own lines (`astuner.contracts.backbone.Backbone.plan`).
    """
    a = config.astuner
    common, rollout, data = a.trainer_common, a.rollout, a.data
    train, held_out = len(tasks.train), len(tasks.validation)
    workflow = source_of(config, "workflow", rollout.workflow)  # one that cannot be found or imported shows here
    reader = source_of(config, "task reader", a.task_reader.type)
    judge = "set by the workflow"
    if a.task_judge.judge:
        judge = source_of(config, "judge", a.task_judge.judge)
    lines = {
        "model": _model(a.model),
        "tasks": f"{train} to train on, {held_out or 'none'} held out, from {reader}"
        + (
            ""
            if held_out
            else "; there will be no before and after: name a validation split in the task reader's section"
        ),
        "workflow": workflow,
        "reward": judge,
        "backbone": source_of(config, "backbone", a.backbone),
        **_agents(config),
    }
    if trains:
        draws = math.ceil(data.train_batch_size * rollout.oversample)
        episodes = draws * rollout.num_repeat
        steps = planned_steps(config, train)
        epochs = steps * data.train_batch_size / train if train else 0.0
        a_turn = f"at most {rollout.max_response_length_in_one_turn} a turn"
        most = data.max_response_length or rollout.max_response_length_in_one_turn * (rollout.multi_turn.max_steps or 0)
        known = most and not a.agents  # how many agents an episode has, nobody says
        updates = common.mini_batch_num * common.ppo_epochs
        lines |= {
            "a step": f"{draws} groups x {rollout.num_repeat} attempts = {episodes} episodes, "
            f"{rollout.max_env_worker} at once",
            "tokens": f"up to {episodes * most:,} generated in a step ({a_turn})" if known else a_turn,
            "steps": f"{steps} = {epochs:.3g} epochs of {train} tasks, {updates} optimizer "
            f"step{'s' * (updates > 1)} each = {steps * updates} in all",
            "learning": f"{common.algorithm.loss} loss, {common.algorithm.adv_estimator} advantages, "
            f"{common.algorithm.loss_agg_mode}, {common.optim.optimizer} lr {common.optim.lr:g}",
            "saved": f"every {common.save_freq} steps, validated every {common.test_freq}",
        }
    lines |= of_backbone
    lines["run folder"] = str(run_dir)
    return Plan(title=f"{config.experiment_name} ({config.path})", lines=lines)


def _agents(config: Config) -> dict[str, str]:
    """Who speaks with what, where the config tells agents apart."""
    a = config.astuner
    if not a.agents:
        return {}
    roster = AgentRegistry.of(a)
    speakers = {name: _speaker(agent) for name, agent in a.agents.items()}
    models = {name: config.model_of(name) for name in roster.policies}
    policies = {
        name: _model(model) if name in roster.trained_policies else f"{model.path}, as it is"
        for name, model in models.items()
    }
    return {
        "agents": "; ".join(f"{name}: {text}" for name, text in speakers.items()),
        "policies": "; ".join(f"{name}: {text}" for name, text in policies.items()),
    }


def _speaker(agent: Agent) -> str:
    if agent.model == "external":
        return f"{without_user(str(agent.name))} at {without_user(str(agent.base_url))}, never trained"
    return f"policy {agent.policy}" + ("" if agent.train else ", not trained")


def _model(model: Model) -> str:
    return model.path + (f", LoRA rank {model.lora.rank}" if model.lora.rank else "")
