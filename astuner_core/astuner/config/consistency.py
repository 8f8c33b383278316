"""Rules over several keys: combinations that can be written, each key being fine alone, and make no sense together.

A rule looks at values only, so the same rules hold for defaults, files and overrides.  One that concerns a key which
is wrong by itself is not asked: its message would be about a value that nobody meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from astuner.config.fields import field_at
from astuner.config.schema import Agent, Astuner
from astuner.contracts.places import Report, Tree, did_you_mean
from astuner.contracts.types import DEFAULT_POLICY

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
"""Advantage estimators that compare the episodes of a group with each other."""

EXTERNAL_ONLY = ("base_url", "name", "api_key_env", "temperature", "timeout")
"""Keys of an agent that are for an external model."""
POLICY_ONLY = ("policy", "train")
"""Keys of an agent that are for a policy of the run."""
_POLICY_NAME = re.compile(r"(?!resume$)[A-Za-z0-9][A-Za-z0-9_-]*")
"""A policy's name is that of its folder in a checkpoint, where ``resume`` is taken, and stands in metrics."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What must hold between some keys below ``astuner.``; the first is the one to blame."""

    keys: tuple[str, ...]
    broken: Callable[..., str]
    """The keys' values -> what is wrong with the first and what to write instead, or an empty string."""
    only_note: bool = False
    """Wasteful rather than wrong."""
    training: bool = False
    """Holds for backbones that train, so it is asked by `astuner.config.capabilities.check_capabilities`."""


RULES: tuple[Rule, ...] = (
    Rule(
        keys=("rollout.min_group_size", "rollout.num_repeat"),
        broken=lambda least, size: (
            f"is {least}, more than the {size} episodes of a group (astuner.rollout.num_repeat), so every group would "
            f"be dropped; write at most {size}"
            if least > size
            else ""
        ),
    ),
    Rule(
        keys=("rollout.temperature",),
        broken=lambda temperature: (
            "is 0, and greedy decoding leaves nothing to learn from; write a value above 0, e.g. 1.0"
            if temperature == 0
            else ""
        ),
        training=True,
    ),
    Rule(
        keys=("trainer_common.algorithm.use_kl_in_reward", "trainer_common.use_kl_loss"),
        broken=lambda in_reward, in_loss: (
            "is on, and so is astuner.trainer_common.use_kl_loss: KL to the reference goes into the reward or the "
            "loss; turn one off"
            if in_reward and in_loss
            else ""
        ),
    ),
    Rule(
        keys=("rollout.val_kwargs.num_repeat", "rollout.val_kwargs.temperature"),
        broken=lambda attempts, temperature: (
            f"is {attempts}, but astuner.rollout.val_kwargs.temperature is 0 (greedy): the attempts at a validation "
            "task will be the same unless its environment varies; write a temperature above 0"
            if attempts > 1 and temperature == 0
            else ""
        ),
        only_note=True,
    ),
    Rule(
        keys=("rollout.num_repeat", "trainer_common.algorithm.adv_estimator"),
        broken=lambda size, estimator: (
            f"is 1, but the advantage {estimator} compares the episodes of a group with each other, so it would always "
            "be 0; write 2 or more, or astuner.trainer_common.algorithm.adv_estimator: reinforce_plus_plus"
            if size == 1 and estimator in GROUP_ESTIMATORS
            else ""
        ),
        training=True,
    ),
    Rule(
        keys=("rollout.num_repeat", "rollout.workflow"),
        broken=lambda size, workflow: (
            f"is {size}, but with the workflow feedback every episode is another conversation, so they are no attempts "
            "at one task to compare; write astuner.rollout.num_repeat: 1 and "
            "astuner.trainer_common.algorithm.adv_estimator: reinforce_plus_plus"
            if size > 1 and workflow in ("feedback", "core/feedback")
            else ""
        ),
        training=True,
    ),
)


def check_together(tree: Tree, report: Report) -> None:
    """Ask every rule that holds whatever the backbone, after each key has been checked alone."""
    wrong = report.wrong
    for rule in RULES:
        names = [f"astuner.{key}" for key in rule.keys]
        if rule.training or wrong.intersection(names):
            continue
        if message := rule.broken(*(_value(tree, name) for name in names)):
            place = next((p for n in names if (p := tree.places.get(tuple(n.split("."))))), None)
            if rule.only_note:
                report.note(f"{names[0]} {message}", place)
            else:
                report.problem(place, f"{names[0]} {message}")
    if not any(name.startswith(("astuner.agents", "astuner.policies")) for name in wrong):
        for key, message in _wrong_agents(tree):
            report.problem(tree.place(("astuner", *key)), f"astuner.{'.'.join(key)} {message}")


def broken_by_training(settings: Astuner) -> Iterator[tuple[str, str]]:
    """The rules for training that ``settings`` break: the key to blame, and the message."""
    for rule in RULES:
        if rule.training and (message := rule.broken(*(_attribute(settings, key) for key in rule.keys))):
            yield rule.keys[0], f"astuner.{rule.keys[0]} {message}"
    trained = policies_of(settings.agents, only_trained=True)
    if not trained:
        yield (
            "agents",
            "astuner.agents has no agent that trains; write train: true for one of them, or measure them as they are "
            "with: astuner eval CONFIG --checkpoint base",
        )
    for name, policy in settings.policies.items():
        if trained and policy.lora is not None and name not in trained:
            yield (
                f"policies.{name}.lora",
                f"astuner.policies.{name}.lora would be ignored, since no agent trains the policy {name}; remove it",
            )


def policies_of(agents: Mapping[str, Agent], *, only_trained: bool = False) -> tuple[str, ...]:
    """The policies that speak for agents, in the order of the config; one that nobody has named if there are none."""
    if not agents:
        return (DEFAULT_POLICY,)
    speaking = [a for a in agents.values() if a.model == "policy" and (a.train or not only_trained)]
    return tuple(dict.fromkeys(a.policy for a in speaking))


def _wrong_agents(tree: Tree) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with ``astuner.agents`` and ``astuner.policies``: the key below ``astuner``, and the message."""
    agents: dict[str, Agent] = _value(tree, "astuner.agents")
    for name, agent in agents.items():
        key = ("agents", name)
        external = agent.model == "external"
        for field in POLICY_ONLY if external else EXTERNAL_ONLY:
            if tree.is_written(("astuner", *key, field)) and getattr(agent, field) is not None:
                yield (*key, field), _misplaced(field, name, external)
        if not external and not _POLICY_NAME.fullmatch(agent.policy):
            yield (
                (*key, "policy"),
                f"is {agent.policy!r}; it names a folder in checkpoints and stands in metrics, so write letters, "
                "digits, - and _ (and not `resume`, which is taken)",
            )
    spoken = policies_of(agents)
    for name in _value(tree, "astuner.policies"):
        if name not in spoken:
            named = f"they name {', '.join(spoken)}" if agents else f"there are none, so the policy is {DEFAULT_POLICY}"
            hint = did_you_mean(name, spoken, "; name it as some agent's policy, or remove it")
            yield ("policies", name), f"is the policy of no agent in astuner.agents ({named}){hint}"


def _misplaced(field: str, agent: str, external: bool) -> str:
    if external:
        return f"would be ignored, since an external model speaks for {agent} and is never trained; remove it"
    return f"is for an external model, and a policy speaks for {agent}; write model: external beside it, or remove it"


def _value(tree: Tree, name: str) -> Any:
    """The value a key will have: as written (``"4"`` is a 4), or its default."""
    key = tuple(name.split("."))
    info = field_at(Astuner, key[1:])
    assert info is not None, name
    assert info.annotation is not None, name
    if not tree.has(key):
        return info.get_default()
    return TypeAdapter[Any](info.annotation).validate_python(tree.get(key))


def _attribute(settings: Any, key: str) -> Any:
    for part in key.split("."):
        settings = getattr(settings, part)
    return settings
