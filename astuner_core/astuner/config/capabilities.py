"""Check that the selected backbone implements every key of an experiment.

Invariant: a key in an experiment file either takes effect or is an error that names the key. The core implements some
keys for every backbone (`CORE`). For all others, a backbone declares its support in
`astuner.contracts.backbone.Capabilities`. The most specific entry decides.

`broken` checks combinations of keys that are valid separately. It reads values only, so it treats defaults, files and
overrides alike.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from astuner.config.checking import TABLES
from astuner.config.loaded import Config
from astuner.config.schema import AgentSection, AstunerSection, Rollout
from astuner.contracts.backbone import Capabilities
from astuner.contracts.errors import PluginError
from astuner.contracts.places import Report, Tree, did_you_mean
from astuner.contracts.types import DEFAULT_POLICY
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager

GROUP_ESTIMATORS = ("grpo", "dr_grpo", "rloo")
"""Advantage estimators that compare the episodes of a group."""

EXTERNAL_ONLY = ("base_url", "name", "api_key_env", "temperature", "timeout")
"""Keys of an agent that apply to external models only."""
POLICY_ONLY = ("policy", "train")
"""Keys of an agent that apply to policies of the run only."""
_POLICY_NAME = re.compile(r"(?!resume$)[A-Za-z0-9][A-Za-z0-9_-]*")
"""Valid policy names. The name is a folder in checkpoints (where ``resume`` is reserved) and part of metric names."""


def broken(settings: AstunerSection) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Yield combinations of keys that are invalid with every backbone.

    :returns: The keys, below ``astuner.``, with the key to report first; a message; and whether the combination is only
        wasteful, which is a note instead of an error.
    """
    rollout, common = settings.rollout, settings.trainer_common
    if (least := rollout.min_group_size) > (size := rollout.num_repeat):
        yield (
            ("rollout.min_group_size", "rollout.num_repeat"),
            f"is {least}, but astuner.rollout.num_repeat is {size}, so every group would be dropped; set it to at most "
            f"{size}",
            False,
        )
    if common.algorithm.use_kl_in_reward and common.use_kl_loss:
        yield (
            ("trainer_common.algorithm.use_kl_in_reward", "trainer_common.use_kl_loss"),
            "and astuner.trainer_common.use_kl_loss are both true, but the KL term belongs either in the reward or in "
            "the loss; set one of them to false",
            False,
        )
    if (attempts := rollout.val_kwargs.num_repeat) > 1 and rollout.val_kwargs.temperature == 0:
        yield (
            ("rollout.val_kwargs.num_repeat", "rollout.val_kwargs.temperature"),
            f"is {attempts}, but astuner.rollout.val_kwargs.temperature is 0 (greedy), so all episodes of a validation "
            "task will be identical unless the environment varies; set a temperature above 0",
            True,
        )


def broken_by_training(config: Config) -> Iterator[tuple[str, str]]:
    """Yield settings that are invalid for training: the key to report, below ``astuner.``, and a message."""
    settings = config.astuner
    size, estimator = settings.rollout.num_repeat, settings.trainer_common.algorithm.adv_estimator
    if settings.rollout.temperature == 0:
        yield (
            "rollout.temperature",
            "is 0 (greedy), so the episodes of a group would be identical and nothing could be learned; set a value "
            "above 0, e.g. 1.0",
        )
    if size == 1 and estimator in GROUP_ESTIMATORS:
        yield (
            "rollout.num_repeat",
            f"is 1, but the advantage estimator {estimator} compares the episodes of a group, so all advantages would "
            "be 0; set 2 or more, or use astuner.trainer_common.algorithm.adv_estimator: reinforce_plus_plus",
        )
    why = getattr(config.section("workflow", settings.rollout.workflow), "no_groups", "")
    if size > 1 and why:
        yield (
            "rollout.num_repeat",
            f"is {size}, but {why}, so the episodes of a group cannot be compared; set "
            "astuner.rollout.num_repeat: 1 and astuner.trainer_common.algorithm.adv_estimator: reinforce_plus_plus",
        )
    trained = policies_of(settings.agents, only_trained=True)
    if not trained:
        yield (
            "agents",
            "trains no agent; set train: true for at least one agent, or evaluate without training: astuner "
            "eval CONFIG --checkpoint base",
        )
    for name, policy in settings.policies.items():
        if trained and policy.lora is not None and name not in trained:
            yield f"policies.{name}.lora", f"has no effect, because no agent trains the policy {name}; remove it"


def check_together(settings: AstunerSection, tree: Tree, report: Report) -> None:
    """Report `broken` combinations of keys, except combinations with a key that is already reported."""
    wrong = report.wrong
    for keys, why, only_note in broken(settings):
        names = [f"astuner.{key}" for key in keys]
        if wrong.intersection(names):
            continue
        place = next((p for n in names if (p := tree.places.get(tuple(n.split("."))))), None)
        if only_note:
            report.note(f"{names[0]} {why}", place)
        else:
            report.problem(place, f"{names[0]} {why}")
    if not any(name.startswith(("astuner.agents", "astuner.policies")) for name in wrong):
        for key, message in _wrong_agents(settings, tree):
            report.problem(tree.place(("astuner", *key)), f"astuner.{'.'.join(key)} {message}")


def policies_of(agents: Mapping[str, AgentSection], *, only_trained: bool = False) -> tuple[str, ...]:
    """Return the policies of ``agents`` in the order of the config, or only the default policy without agents."""
    if not agents:
        return (DEFAULT_POLICY,)
    speaking = [a for a in agents.values() if a.model == "policy" and (a.train or not only_trained)]
    return tuple(dict.fromkeys(a.policy for a in speaking))


def _wrong_agents(settings: AstunerSection, tree: Tree) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield errors in ``astuner.agents`` and ``astuner.policies``: the key below ``astuner`` and a message."""
    agents = settings.agents
    for name, agent in agents.items():
        key = ("agents", name)
        external = agent.model == "external"
        misplaced = (
            f"applies to external models, but agent {name} uses a policy; set model: external for it, or remove the key"
        )
        if external:
            misplaced = f"has no effect, because agent {name} uses an external model, which is never trained; remove it"
        for field in POLICY_ONLY if external else EXTERNAL_ONLY:
            if tree.is_written(("astuner", *key, field)) and getattr(agent, field) is not None:
                yield (*key, field), misplaced
        if not external and not _POLICY_NAME.fullmatch(agent.policy):
            yield (
                (*key, "policy"),
                f"is {agent.policy!r}, but a policy name is used for folders and metrics; use only letters, digits, - "
                "and _ (`resume` is reserved)",
            )
    spoken = policies_of(agents)
    for name in settings.policies:
        if name not in spoken:
            named = f"used: {', '.join(spoken)}" if agents else f"without agents, the policy is {DEFAULT_POLICY}"
            hint = did_you_mean(name, spoken, "; set it as the policy of an agent, or remove it")
            yield ("policies", name), f"is not used by any agent in astuner.agents ({named}){hint}"


CORE = frozenset(TABLES["core"])
"""Keys below ``astuner.`` that the core implements for every backbone. A section covers all keys below it."""

TRAINING: tuple[str, ...] = tuple(TABLES["training"])
"""Keys and sections for training, which backbones that do not train ignore."""

DEBUG = "debug"
"""Name and section of the only backbone whose own keys are below ``astuner.``."""


def check_capabilities(config: Config, capabilities: Capabilities) -> tuple[str, ...]:
    """Check that the selected backbone supports every key set in the experiment.

    :returns: Notes about sections that this backbone does not use.
    :raises ConfigError: The experiment sets unsupported keys (each with the alternative and the backbones that support
        it) or combinations of keys that cannot train.
    """
    manager, backbone = config.plugins, config.astuner.backbone
    report = Report(str(config.path))
    data = Tree(config.as_dict())
    for root, _, key in (name.partition(".") for name in sorted(config.written)):
        value = data.get((root, *key.split(".")))
        if root != "astuner" or _is_added(key, manager) or honours(capabilities, key, value):
            continue
        if _is_below(key, DEBUG):
            report.note(f"astuner.{DEBUG} applies to the {DEBUG} backbone only; the backbone {backbone!r} ignores it")
        elif not capabilities.trains and _longest(key, TRAINING):
            report.note(f"the backbone {backbone!r} does not train and ignores training keys")
        else:
            text = _refusal(backbone, capabilities, key, value, manager)
            report.problem(config.origins[f"astuner.{key}"], text)
    if capabilities.trains:
        for key, message in broken_by_training(config):
            report.problem(config.place(f"astuner.{key}"), f"astuner.{key} {message}")
        policies = policies_of(config.astuner.agents)
        if not capabilities.policies and len(policies) > 1:
            able = [name for name, other in _backbones(manager) if other.policies and name != backbone]
            text = (
                f"astuner.agents uses {len(policies)} policies ({', '.join(policies)}), but the backbone {backbone!r} "
                "supports one; set the same policy for all agents"
            )
            text += f", or use --backbone {' or '.join(able)}" if able else ""
            report.problem(config.place("astuner.agents"), text)
    report.raise_problems()
    return tuple(report.notes)


def honours(capabilities: Capabilities, key: str, value: Any) -> bool:
    """Return whether a backbone, or the core for it, supports ``value`` of ``key`` (dotted, below ``astuner.``)."""
    if key.startswith("rollout.") and key.split(".")[1] not in Rollout.model_fields:  # section of a workflow
        return True  # workflows do not depend on the backbone
    if key in capabilities.only:
        return any(value == allowed and type(value) is type(allowed) for allowed in capabilities.only[key])
    refused = _longest(key, capabilities.instead.keys() - capabilities.only.keys())
    return len(_longest(key, CORE | capabilities.honours)) > len(refused)


def honoured_by(key: str, value: Any, manager: PluginManager) -> list[str]:
    """Return the installed backbones that support ``value`` of ``key`` and can be imported."""
    added = _is_added(key, manager)
    return [name for name, capabilities in _backbones(manager) if added or honours(capabilities, key, value)]


def _is_added(key: str, manager: PluginManager) -> bool:
    """Return whether a package adds the key; such keys work with every backbone."""
    return any(_is_below(key, name) for _, name, _ in manager.offers("config key"))


def _backbones(manager: PluginManager) -> Iterator[tuple[str, Capabilities]]:
    """Yield the name and capabilities of each installed backbone that can be imported."""
    for offer in registry.offers(manager, "backbone"):
        with contextlib.suppress(PluginError):
            yield offer.full_name, registry.resolve(manager, "backbone", offer.full_name).capabilities


def _refusal(backbone: str, capabilities: Capabilities, key: str, value: Any, manager: PluginManager) -> str:
    allowed = capabilities.only.get(key)
    if allowed is not None:
        choices = " or ".join("null" if choice is None else f"{choice}" for choice in allowed)
        text = f"astuner.{key}: the backbone {backbone!r} supports only {choices}, not {value!r}"
    else:
        text = f"astuner.{key} is not supported by the backbone {backbone!r}; remove it"
    instead = capabilities.instead.get(_longest(key, capabilities.instead))
    others = [name for name in honoured_by(key, value, manager) if name != backbone]
    return "; ".join(
        [text, *([instead] if instead else []), *([f"supported by {', '.join(others)}"] if others else [])]
    )


def _is_below(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _longest(key: str, sections: Iterable[str]) -> str:
    return max((section for section in sections if _is_below(key, section)), key=len, default="")
