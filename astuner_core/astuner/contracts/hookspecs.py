"""The contract between ASTuner and its plugins.

A plugin is a module or a package named by an entry point in the group ``astuner``:

    [project.entry-points.astuner]
    acme = "astuner_acme"

What it offers is *described*, kind by kind, as a :class:`Provider` for each name.  Where that is always the same, it
stands in the file ``plugin.toml`` beside the module (or in the package); where it has to be found out, the module
imports ``hookimpl`` from ``astuner`` and implements hooks below, which return it.  Both may be there::

    [judge.polite]
    target = "astuner_acme.judges:Polite"
    summary = "is it polite"

A table is called by the kind (of `KINDS`, with _ for a space) and the name of what is offered; in it are fields of
`Provider`, of an environment those of `EnvironmentProvider`, and of a loss those of `LossProvider`.  Older names of
what others offer (`register_aliases`) are lists, by name, in ``[aliases.KIND]``.

Nothing is imported, opened or started until an experiment asks for that name, so a plugin's module stays cheap:
it must not import torch, ray, vllm, verl or trinity, directly or indirectly.

Names are unique per kind.  When two plugins register the same name, neither
wins: the bare name is refused and ``plugin/name`` says which one is meant.

A hook may gain parameters in a minor release (pluggy passes only the ones an
implementation names) and loses them only in a major one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pluggy import HookimplMarker, HookspecMarker

PROJECT = "astuner"

hookspec = HookspecMarker(PROJECT)
hookimpl = HookimplMarker(PROJECT)


@dataclass(frozen=True, kw_only=True)
class Provider:
    """One thing a plugin offers, described without importing it."""

    target: str
    """Where it lives, as ``"package.module:attribute"``."""
    summary: str = ""
    """One line for ``astuner plugins``; no full stop."""
    config: str | None = None
    """The pydantic model of its own section, as ``"package.module:Class"``.

    The section of a task reader, judge or workflow stands beside the key that chooses it
    (``astuner.task_reader.<name>``, ``astuner.task_judge.<name>``, ``astuner.rollout.<name>``), a service's is
    ``astuner.services.<name>``, a backbone's is the root section of its name; other kinds get the model's defaults.
    The model's module is imported to check a config, so it is as light as the plugin's own.
    """
    requires: tuple[str, ...] = ()
    """Modules that must be importable before ``target`` is; looked for, not imported (of ``a.b``, only ``a`` is)."""
    install: str = ""
    """What to type when one of ``requires`` is missing."""
    conflicts: tuple[str, ...] = ()
    """Distributions that must not be installed next to this one."""
    aliases: tuple[str, ...] = ()
    """Older spellings that still resolve to it, as names or as ``"package.module->Name"``."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentProvider(Provider):
    """An environment, and how the environment service runs it. A plain `Provider` has these defaults.

    The service never imports ``target``: an interpreter of its own does, once, and every instance is forked from that.
    """

    splits: tuple[str, ...] = ("train", "validation")
    """The splits it has, as ``tasks`` knows them."""
    python: str = ""
    """A Python for packages that exclude ASTuner's, as ``>=3.11,<3.14``: `astuner env setup` makes it. Empty: ours."""
    packages: tuple[str, ...] = ()
    """What ``astuner env setup`` installs into that interpreter, as requirements."""
    lent: tuple[str, ...] = ()
    """Packages that the service's interpreter lends it, the target's own above all; they import only what is there."""
    preload: tuple[str, ...] = ()
    """``"package.module"`` to import, or ``"package.module:function"`` to call, before the first fork. No threads."""
    setup: str = ""
    """``"package.module:Class"``: an `EnvironmentSetup`, for what else `astuner env setup` and `doctor` do."""
    create_timeout: float = 120.0
    """Seconds until an instance that is still being made is killed."""
    step_timeout: float = 60.0
    """Seconds until a step without an answer is killed, with its instance."""
    evaluate_timeout: float = 120.0
    """Seconds until an evaluation without an answer is killed, with its instance."""
    memory_mb: int = 256
    """What one instance takes; with the machine's memory it decides how many run at once."""
    max_memory_mb: int = 0
    """Beyond this an instance is ended, with all its processes. 0: four times ``memory_mb``, and at least 1024."""
    max_processes: int = 32
    """Beyond this an instance is ended, with all its processes."""


@dataclass(frozen=True, kw_only=True)
class LossProvider(Provider):
    """A loss, and what its paper means by it beside the formula. A plain `Provider` implies nothing."""

    implies: Mapping[str, object] = field(default_factory=dict)
    """Keys below ``astuner.trainer_common.algorithm`` -> the values they have unless somebody writes them."""


KINDS = {
    "task reader": "register_task_readers",
    "workflow": "register_workflows",
    "judge": "register_judges",
    "output check": "register_output_checks",
    "environment": "register_environments",
    "chat family": "register_chat_families",
    "service": "register_services",
    "backbone": "register_backbones",
    "loss": "register_losses",
    "advantage estimator": "register_advantages",
    "log sink": "register_log_sinks",
    "subscriber": "register_subscribers",
    "sentinel rule": "register_sentinel_rules",
    "command": "register_commands",
    "diagnosis": "register_diagnoses",
    "part": "register_parts",
    "config key": "register_config_keys",
}
"""What a plugin can register, and the hook that lists it; ``hooks.yaml`` says what each is."""


def _listing(hook: str) -> Callable[[], Mapping[str, Provider]]:
    def offered() -> Mapping[str, Provider]:  # type: ignore[empty-body]
        """What a plugin offers of one kind: name -> provider."""

    offered.__name__ = offered.__qualname__ = hook
    return hookspec(offered)


globals().update({hook: _listing(hook) for hook in KINDS.values()})


@hookspec(firstresult=True)
def locate_model(path: str) -> str | None:
    """Return the local folder that holds the model ``path``, or None.

    Stops at the first answer that is not None.  ASTuner itself answers last: a
    folder that exists is its own answer, anything else is a Hugging Face name.

    :param path: what ``astuner.model.path`` says, for example
        ``Qwen/Qwen2.5-14B-Instruct``.
    """


@hookspec
def list_models() -> Sequence[str]:  # type: ignore[empty-body]
    """Return the names that this plugin's ``locate_model`` has a folder for.

    They are what a person is told where a model cannot be downloaded.
    """


@hookspec
def register_aliases() -> Mapping[tuple[str, str], Sequence[str]]:  # type: ignore[empty-body]
    """Older spellings of what other plugins register: the kind and name of it -> what may be written too.

    What is not there has none.  A plugin names those of its own things in ``Provider.aliases``.

    Example::

        @hookimpl
        def register_aliases():
            return {("task reader", "jsonl"): ("dataset_file",)}
    """
