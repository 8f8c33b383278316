"""The capability contract: a key that a person wrote is honoured, or refused by name.

Keys that the core itself honours work with every backbone and are listed here; for the rest a backbone says what it
honours (`astuner.contracts.backbone.Capabilities`).  The most specific entry decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from astuner.config.consistency import broken_by_training, policies_of
from astuner.config.loaded import Config
from astuner.config.schema import Rollout
from astuner.contracts.backbone import Capabilities
from astuner.contracts.errors import ConfigError, PluginError
from astuner.contracts.places import Place, Tree
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager

CORE = frozenset(
    {
        "agents",
        "backbone",
        "data",
        "endpoint",
        "env_service",
        "experiment_dir",
        "experiment_name",
        "model.chat_template",
        "model.chat_template_kwargs",
        "model.path",
        "policies",
        "project_name",
        "rollout.agent_madness_reward",
        "rollout.agent_madness_termination",
        "rollout.compute_madness_checklist",
        "rollout.disable_tool_calls",
        "rollout.episode_timeout",
        "rollout.max_env_worker",
        "rollout.max_failed_share",
        "rollout.max_response_length_in_one_turn",
        "rollout.max_retries",
        "rollout.merge_level",
        "rollout.min_group_size",
        "rollout.multi_turn.max_sample_per_task",
        "rollout.multi_turn.max_steps",
        "rollout.num_repeat",
        "rollout.oversample",
        "rollout.temperature",
        "rollout.top_k",
        "rollout.top_p",
        "rollout.truncated_reward",
        "rollout.val_kwargs",
        "rollout.workflow",
        "seed",
        "services",
        "task_judge",
        "task_reader",
        "trainer_common.algorithm.adv_compare",
        "trainer_common.logger",
        "trainer_common.save_episodes",
        "trainer_common.save_tokens",
        "trainer_common.val_pass_n",
        "trainer_common.watts",
    }
)
"""Keys below ``astuner.`` (a section covers all keys below it) that the core honours whatever the backbone."""

TRAINING = (
    "model.lora",
    "trainer_common",
    "rollout.name",
    "rollout.oversample",
    "rollout.num_repeat",
    "rollout.min_group_size",
    "rollout.max_failed_share",
    "rollout.multi_turn.max_sample_per_task",
    "rollout.tensor_model_parallel_size",
    "rollout.multi_turn.expected_steps",
)
"""Keys and sections for training, and for training at scale, that a backbone which does not train has no use for."""

DEBUG = "debug"
"""The section, and the name, of the one backbone whose own keys are below ``astuner.``."""


def check_capabilities(
    config: Config, capabilities: Capabilities, *, plugins: PluginManager | None = None
) -> tuple[str, ...]:
    """Whether the chosen backbone honours every key that was written.

    :returns: notes: sections that this backbone has no use for.
    :raises ConfigError: the keys it would ignore, each with what to write instead and who honours it, and the
        combinations of keys with which nothing could be trained.
    """
    manager = plugins if plugins is not None else config.plugins
    problems: list[tuple[Place, str]] = []
    notes: list[str] = []
    for key, value in _written(config):
        if _is_added(key, manager) or honours(capabilities, key, value):
            continue
        if _is_below(key, DEBUG):
            notes.append(f"astuner.{DEBUG} is for the {DEBUG} backbone and is not used by {config.astuner.backbone!r}")
        elif not capabilities.trains and any(_is_below(key, section) for section in TRAINING):
            notes.append(f"the backbone {config.astuner.backbone!r} does not train, so training keys are not used")
        else:
            place = config.origins[f"astuner.{key}"]
            problems.append((place, _refusal(config.astuner.backbone, capabilities, key, value, manager)))
    if capabilities.trains:
        for key, message in broken_by_training(config.astuner):
            problems.append((config.place(f"astuner.{key}"), message))
        if not capabilities.policies and len(policies_of(config.astuner.agents)) > 1:
            problems.append((config.place("astuner.agents"), _one_policy_only(config, manager)))
    if problems:
        problems.sort(key=lambda p: (not p[0].line, p[0].line, p[0].column))
        raise ConfigError([f"{place}: {message}" for place, message in problems])
    return tuple(dict.fromkeys(notes))


def honours(capabilities: Capabilities, key: str, value: Any) -> bool:
    """Whether a backbone, or the core for it, honours ``value`` of ``key`` (dotted, below ``astuner.``)."""
    if _is_of_a_workflow(key):
        return True  # it runs the same on every backbone
    if key in capabilities.only:
        return any(value == allowed and type(value) is type(allowed) for allowed in capabilities.only[key])
    refused = _nearest(key, capabilities.instead.keys() - capabilities.only.keys())
    return _nearest(key, CORE | capabilities.honours) > refused


def honoured_by(key: str, value: Any, manager: PluginManager) -> list[str]:
    """The installed backbones that honour ``value`` of ``key``; those that cannot be imported here are left out."""
    added = _is_added(key, manager)
    return [name for name, capabilities in _backbones(manager) if added or honours(capabilities, key, value)]


def _is_added(key: str, manager: PluginManager) -> bool:
    """Whether a package adds the key, and so honours it, whatever the backbone."""
    return any(_is_below(key, name) for _, name, _ in manager.offers("config key"))


def _backbones(manager: PluginManager) -> Iterator[tuple[str, Capabilities]]:
    """The installed backbones that can be imported here: the name to write, and what they can do."""
    for plugin, name, _ in manager.offers("backbone"):
        try:
            backbone = registry.resolve(manager, "backbone", f"{plugin.name}/{name}")
        except PluginError:
            continue
        yield registry.offer(manager, "backbone", f"{plugin.name}/{name}").full_name, backbone.capabilities


def _one_policy_only(config: Config, manager: PluginManager) -> str:
    policies, backbone = policies_of(config.astuner.agents), config.astuner.backbone
    able = [name for name, other in _backbones(manager) if other.policies and name != backbone]
    text = (
        f"astuner.agents speak with {len(policies)} policies ({', '.join(policies)}), and the backbone {backbone!r} "
        "has one; give all of them the same policy"
    )
    return f"{text}, or use --backbone {' or '.join(able)}" if able else text


def _written(config: Config) -> Iterator[tuple[str, Any]]:
    data = Tree(config.as_dict())
    for name in sorted(config.written):
        root, _, key = name.partition(".")
        if root == "astuner":
            yield key, data.get(tuple(name.split(".")))


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


def _is_of_a_workflow(key: str) -> bool:
    section, _, rest = key.partition(".")
    return section == "rollout" and bool(rest) and rest.partition(".")[0] not in Rollout.model_fields


def _is_below(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _longest(key: str, sections: Iterable[str]) -> str:
    return max((section for section in sections if _is_below(key, section)), key=len, default="")


def _nearest(key: str, sections: Iterable[str]) -> int:
    return len(_longest(key, sections))
