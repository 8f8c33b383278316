"""The check of an experiment: its own workflow, its own tokenizer and templates, a scripted model.

No weights are loaded, no judge is asked, no external model is called, and no length limit applies; but the agent's
tools are its real ones, called with made-up arguments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from astuner import make_codec
from astuner.chat.codec import ChatCodec
from astuner.config import Config
from astuner.contracts.errors import AstunerError, ConfigError
from astuner.contracts.judge import Judge
from astuner.contracts.types import JudgeOutput, Split, Task, WorkflowOutput, WorkflowTask
from astuner.rollout.agents import AgentRegistry
from astuner.rollout.models import PolicyModel, sampling_for
from astuner.rollout.runner import EpisodeRunner
from astuner.runs.tasks import read_tasks
from astuner_record.token_check.frameworks import frameworks_in_use
from astuner_record.token_check.report import EpisodeFound, Report, VariantFound, facts_of, look_at
from astuner_record.token_check.scenarios import SCENARIOS, Scenario
from astuner_record.token_check.scripted import CONTEXT, Ear, ListeningCodec, ScriptedEngine
from astuner_record.token_check.tokenizers import read_tokenizer

OWN = "the tokenizer's own"
REPLIES = 64
"""Model calls of one episode, after which the check ends it."""


class NoJudge(Judge):
    """Gives every episode the same verdict."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        return JudgeOutput(reward=0.0)


def check_config(
    config: Config,
    *,
    templates: Sequence[Path] = (),
    tools: Sequence[bool] = (),
    scenarios: Sequence[str] = (),
    tasks: int = 1,
) -> Report:
    """Run the experiment's workflow on its first tasks against the scripted model.

    :param templates: Jinja files to try beside the experiment's own chat template.
    :param tools: with tools, without, or both; as the experiment says by default.
    :param scenarios: names of `SCENARIOS`; all by default.
    :param tasks: how many of the training tasks.
    :raises ConfigError: the experiment, or the name of a scenario, is wrong.
    """
    chosen = [find_scenario(name) for name in scenarios] or list(SCENARIOS.values())
    first = read_tasks(config).train[:tasks]
    if not first:
        raise ConfigError(f"{config.path}: the task reader yields no training tasks, so there is nothing to run")
    quiet = _quiet(config)
    on_or_off = list(tools) or [not config.astuner.rollout.disable_tool_calls]
    variants = []
    for template, with_tools in product([None, *templates], on_or_off):
        variant = _with_template(quiet, template, with_tools)
        name = str(template) if template else config.astuner.model.chat_template or OWN
        try:
            codecs = _codecs(variant)
        except ConfigError as e:
            if template is None:
                raise
            unusable = EpisodeFound(name="every scenario", ended="unusable", error=str(e))
            variants.append(VariantFound(template=name, tools=with_tools, episodes=(unusable,)))
            continue
        codec = next(iter(codecs.values()))
        episodes = asyncio.run(_run_all(variant, codecs, first, chosen))
        variants.append(
            VariantFound(template=name, tools=with_tools, facts=facts_of(codec.template), episodes=tuple(episodes))
        )
    return Report(
        target=str(config.path),
        model=config.astuner.model.path,
        frameworks=tuple(frameworks_in_use()),
        variants=tuple(variants),
    )


def find_scenario(name: str) -> Scenario:
    """:raises ConfigError: there is none of this name."""
    if name not in SCENARIOS:
        raise ConfigError(f"--scenario {name}: there is no such scenario; there are {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


def _quiet(config: Config) -> Config:
    """The experiment without what costs time or money and has nothing to do with tokens."""
    a = config.astuner
    agents = {
        role: agent if agent.model == "policy" else agent.model_copy(update={"model": "policy", "train": False})
        for role, agent in a.agents.items()
    }
    rollout = {"max_retries": 0, "compute_madness_checklist": [], "max_response_length_in_one_turn": CONTEXT}
    lengths = {"max_prompt_length": None, "max_response_length": None}
    quiet = a.model_copy(
        update={
            "agents": agents,
            "rollout": a.rollout.model_copy(update=rollout),
            "data": a.data.model_copy(update=lengths),
            "task_judge": a.task_judge.model_copy(update={"judge": f"{__name__}->{NoJudge.__name__}"}),
        }
    )
    return replace(config, astuner=quiet)


def _with_template(config: Config, template: Path | None, tools: bool) -> Config:
    a = config.astuner
    update: dict[str, Any] = {"rollout": a.rollout.model_copy(update={"disable_tool_calls": not tools})}
    if template is not None:
        update["model"] = a.model.model_copy(update={"chat_template": str(template.resolve())})
    return replace(config, astuner=a.model_copy(update=update))


def _codecs(config: Config) -> dict[str, ChatCodec]:
    """Policy -> codec; policies that start from the same model share it."""
    by_path: dict[str, ChatCodec] = {}
    found = {}
    for policy in AgentRegistry.of(config.astuner).policies:
        path = config.locate_model(policy=policy)
        if path not in by_path:
            by_path[path] = make_codec(config, read_tokenizer(path, config.astuner.model.revision))
        found[policy] = by_path[path]
    return found


async def _run_all(
    config: Config,
    codecs: dict[str, ChatCodec],
    tasks: Sequence[Task],
    scenarios: Sequence[Scenario],
) -> list[EpisodeFound]:
    runner = EpisodeRunner(config)
    runner.prepare()
    try:
        return [
            await _run_one(runner, codecs, scenario, n, task, named=len(tasks) > 1)
            for scenario in scenarios
            for n, task in enumerate(tasks)
        ]
    finally:
        await runner.close()


async def _run_one(
    runner: EpisodeRunner, codecs: dict[str, ChatCodec], scenario: Scenario, number: int, task: Task, *, named: bool
) -> EpisodeFound:
    """One episode; a workflow that fails is part of what is found."""
    ear = Ear()
    engines, models = {}, {}
    for policy, codec in codecs.items():
        listening = ListeningCodec(codec, ear)
        engines[policy] = ScriptedEngine(listening, ear, scenario, most=REPLIES)
        models[policy] = PolicyModel(engines[policy], listening)
    name = f"{scenario.name}-{number}"
    workflow_task = WorkflowTask(task=task, episode_id=name, group_id=name, split=Split.TRAIN)
    label = (task.task_id or str(number)) if named else ""
    template = next(iter(codecs.values())).template
    try:
        episode = await runner.run(workflow_task, models, sampling_for(runner.config, Split.TRAIN))
    except AstunerError as e:  # no other episode would fare better, says the runner; another scenario may
        return EpisodeFound(
            name=scenario.name,
            task=label,
            turns=look_at(ear.asked, {}, template),
            ended="unusable",
            error=str(e),
        )
    agents = {turn.index: turn.agent for turn in episode.turns}
    notes = dict.fromkeys(note for engine in engines.values() for note in engine.notes)
    return EpisodeFound(
        name=scenario.name,
        task=label,
        turns=look_at(ear.asked, agents, template),
        ended=episode.stop_reason.value,
        error=episode.error,
        notes=tuple(notes),
    )
