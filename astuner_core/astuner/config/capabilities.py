"""The capability contract: a key that a person wrote is honoured, or refused by name.

Keys that the core itself honours work with every backbone and are listed here; for the rest a backbone says what it
honours (`astuner.contracts.backbone.Capabilities`).  The most specific entry decides.

`broken` is about several keys: combinations that make no sense together, each key being fine alone.  It looks at
values only, so the same holds for defaults, files and overrides.
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
"""Advantage estimators that compare the episodes of a group with each other."""

EXTERNAL_ONLY = ("base_url", "name", "api_key_env", "temperature", "timeout")
"""Keys of an agent that are for an external model."""
POLICY_ONLY = ("policy", "train")
"""Keys of an agent that are for a policy of the run."""
_POLICY_NAME = re.compile(r"(?!resume$)[A-Za-z0-9][A-Za-z0-9_-]*")
"""A policy's name is that of its folder in a checkpoint, where ``resume`` is taken, and stands in metrics."""


def broken(settings: AstunerSection) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """What holds whatever the backbone, and does not: keys below ``astuner.`` that do not go together, the one to blame
    first; what is wrong with it, and what to write instead; and whether that is wasteful rather than wrong."""
    rollout, common = settings.rollout, settings.trainer_common
    if (least := rollout.min_group_size) > (size := rollout.num_repeat):
        yield (
            ("rollout.min_group_size", "rollout.num_repeat"),
            f"is {least}, more than the {size} episodes of a group (astuner.rollout.num_repeat), so every group "
            f"would be dropped; write at most {size}",
            False,
        )
    if common.algorithm.use_kl_in_reward and common.use_kl_loss:
        yield (
            ("trainer_common.algorithm.use_kl_in_reward", "trainer_common.use_kl_loss"),
            "is on, and so is astuner.trainer_common.use_kl_loss: KL to the reference goes into the reward or the "
            "loss; turn one off",
            False,
        )
    if (attempts := rollout.val_kwargs.num_repeat) > 1 and rollout.val_kwargs.temperature == 0:
        yield (
            ("rollout.val_kwargs.num_repeat", "rollout.val_kwargs.temperature"),
            f"is {attempts}, but astuner.rollout.val_kwargs.temperature is 0 (greedy): the attempts at a "
            "validation task will be the same unless its environment varies; write a temperature above 0",
            True,
        )


def broken_by_training(config: Config) -> Iterator[tuple[str, str]]:
    """What holds for backbones that train, and does not: the key below ``astuner.`` to blame, and what is wrong."""
    settings = config.astuner
    size, estimator = settings.rollout.num_repeat, settings.trainer_common.algorithm.adv_estimator
    if settings.rollout.temperature == 0:
        yield (
            "rollout.temperature",
            "is 0, and greedy decoding leaves nothing to learn from; write a value above 0, e.g. 1.0",
        )
    if size == 1 and estimator in GROUP_ESTIMATORS:
        yield (
            "rollout.num_repeat",
            f"is 1, but the advantage {estimator} compares the episodes of a group with each other, so it would always "
            "be 0; write 2 or more, or astuner.trainer_common.algorithm.adv_estimator: reinforce_plus_plus",
        )
    why = getattr(config.section("workflow", settings.rollout.workflow), "no_groups", "")
    if size > 1 and why:
        yield (
            "rollout.num_repeat",
            f"is {size}, but {why}, so they are no attempts at one task to compare; write "
            "astuner.rollout.num_repeat: 1 and astuner.trainer_common.algorithm.adv_estimator: reinforce_plus_plus",
        )
    trained = policies_of(settings.agents, only_trained=True)
    if not trained:
        yield (
            "agents",
            "has no agent that trains; write train: true for one of them, or measure them as they are with: astuner "
            "eval CONFIG --checkpoint base",
        )
    for name, policy in settings.policies.items():
        if trained and policy.lora is not None and name not in trained:
            yield f"policies.{name}.lora", f"would be ignored, since no agent trains the policy {name}; remove it"


def check_together(settings: AstunerSection, tree: Tree, report: Report) -> None:
    """Report what is `broken`, after each key was checked alone; not of keys that are wrong by themselves."""
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
    """The policies that speak for agents, in the order of the config; one that nobody has named if there are none."""
    if not agents:
        return (DEFAULT_POLICY,)
    speaking = [a for a in agents.values() if a.model == "policy" and (a.train or not only_trained)]
    return tuple(dict.fromkeys(a.policy for a in speaking))


def _wrong_agents(settings: AstunerSection, tree: Tree) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with ``astuner.agents`` and ``astuner.policies``: the key below ``astuner``, and the message."""
    agents = settings.agents
    for name, agent in agents.items():
        key = ("agents", name)
        external = agent.model == "external"
        misplaced = (
            f"is for an external model, and a policy speaks for {name}; write model: external beside it, or remove it"
        )
        if external:
            misplaced = f"would be ignored, since an external model speaks for {name} and is never trained; remove it"
        for field in POLICY_ONLY if external else EXTERNAL_ONLY:
            if tree.is_written(("astuner", *key, field)) and getattr(agent, field) is not None:
                yield (*key, field), misplaced
        if not external and not _POLICY_NAME.fullmatch(agent.policy):
            yield (
                (*key, "policy"),
                f"is {agent.policy!r}; it names a folder in checkpoints and stands in metrics, so write letters, "
                "digits, - and _ (and not `resume`, which is taken)",
            )
    spoken = policies_of(agents)
    for name in settings.policies:
        if name not in spoken:
            named = f"they name {', '.join(spoken)}" if agents else f"there are none, so the policy is {DEFAULT_POLICY}"
            hint = did_you_mean(name, spoken, "; name it as some agent's policy, or remove it")
            yield ("policies", name), f"is the policy of no agent in astuner.agents ({named}){hint}"


CORE = frozenset(TABLES["core"])
"""Keys below ``astuner.`` (a section covers all keys below it) that the core honours whatever the backbone."""

TRAINING: tuple[str, ...] = tuple(TABLES["training"])
"""Keys and sections for training, and for training at scale, that a backbone which does not train has no use for."""

DEBUG = "debug"
"""The section, and the name, of the one backbone whose own keys are below ``astuner.``."""


def check_capabilities(config: Config, capabilities: Capabilities) -> tuple[str, ...]:
    """Whether the chosen backbone honours every key that was written.

    :returns: notes: sections that this backbone has no use for.
    :raises ConfigError: the keys it would ignore, each with what to write instead and who honours it, and the
        combinations of keys with which nothing could be trained.
    """
    manager, backbone = config.plugins, config.astuner.backbone
    report = Report(str(config.path))
    data = Tree(config.as_dict())
    for root, _, key in (name.partition(".") for name in sorted(config.written)):
        value = data.get((root, *key.split(".")))
        if root != "astuner" or _is_added(key, manager) or honours(capabilities, key, value):
            continue
        if _is_below(key, DEBUG):
            report.note(f"astuner.{DEBUG} is for the {DEBUG} backbone and is not used by {backbone!r}")
        elif not capabilities.trains and _longest(key, TRAINING):
            report.note(f"the backbone {backbone!r} does not train, so training keys are not used")
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
                f"astuner.agents speak with {len(policies)} policies ({', '.join(policies)}), and the backbone "
                f"{backbone!r} has one; give all of them the same policy"
            )
            text += f", or use --backbone {' or '.join(able)}" if able else ""
            report.problem(config.place("astuner.agents"), text)
    report.raise_problems()
    return tuple(report.notes)


def honours(capabilities: Capabilities, key: str, value: Any) -> bool:
    """Whether a backbone, or the core for it, honours ``value`` of ``key`` (dotted, below ``astuner.``)."""
    if key.startswith("rollout.") and key.split(".")[1] not in Rollout.model_fields:  # a workflow's own
        return True  # it runs the same on every backbone
    if key in capabilities.only:
        return any(value == allowed and type(value) is type(allowed) for allowed in capabilities.only[key])
    refused = _longest(key, capabilities.instead.keys() - capabilities.only.keys())
    return len(_longest(key, CORE | capabilities.honours)) > len(refused)


def honoured_by(key: str, value: Any, manager: PluginManager) -> list[str]:
    """The installed backbones that honour ``value`` of ``key``; those that cannot be imported here are left out."""
    added = _is_added(key, manager)
    return [name for name, capabilities in _backbones(manager) if added or honours(capabilities, key, value)]


def _is_added(key: str, manager: PluginManager) -> bool:
    """Whether a package adds the key, and so honours it, whatever the backbone."""
    return any(_is_below(key, name) for _, name, _ in manager.offers("config key"))


def _backbones(manager: PluginManager) -> Iterator[tuple[str, Capabilities]]:
    """The installed backbones that can be imported here: the name to write, and what they can do."""
    for offer in registry.offers(manager, "backbone"):
        with contextlib.suppress(PluginError):
            yield offer.full_name, registry.resolve(manager, "backbone", offer.full_name).capabilities


def _refusal(backbone: str, capabilities: Capabilities, key: str, value: Any, manager: PluginManager) -> str:
    allowed = capabilities.only.get(key)
    if allowed is not None:
        choices = " or ".join("null" if choice is None else f"{choice}" for choice in allowed)
        text = f"astuner.{key}: {value!r} is not possible with the backbone {backbone!r}, only {choices}"
    else:
        text = f"astuner.{key} would be ignored by the backbone {backbone!r}; remove it"
    instead = capabilities.instead.get(_longest(key, capabilities.instead))
    others = [name for name in honoured_by(key, value, manager) if name != backbone]
    return "; ".join([text, *([instead] if instead else []), *([f"honoured by {', '.join(others)}"] if others else [])])


def _is_below(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _longest(key: str, sections: Iterable[str]) -> str:
    return max((section for section in sections if _is_below(key, section)), key=len, default="")
