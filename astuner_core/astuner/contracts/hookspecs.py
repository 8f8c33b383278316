"""The contract between ASTuner and its plugins.

A plugin is a module or package named by an entry point in the group ``astuner``:

    [project.entry-points.astuner]
    acme = "astuner_acme"

A plugin describes everything it provides with one :class:`Provider` per name. Write fixed providers in the file
``plugin.toml`` next to the module (or in the package). If a provider must be computed, import ``hookimpl`` from
``astuner`` and implement the hooks below. A plugin may use both::

    [judge.polite]
    target = "astuner_acme.judges:Polite"
    summary = "rewards polite answers"

A table's name is the kind (one of `KINDS`, with ``_`` for a space) and the name of the provided object. Its keys are
the fields of `Provider`, or of `EnvironmentProvider`, `LossProvider` or `CommandProvider` for these kinds. Write legacy
names of other plugins' objects (`register_aliases`) as lists in ``[aliases.KIND]``.

Nothing is imported, opened or started until an experiment uses a name. Keep the plugin's module light: it must not
import torch, ray, vllm, verl or trinity, directly or indirectly.

Names are unique per kind. If two plugins register the same name, ASTuner rejects the bare name; ``plugin/name`` selects
one of them.

A hook may gain parameters in a minor release (pluggy passes only the parameters that an implementation declares) and
loses them only in a major release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pluggy import HookimplMarker, HookspecMarker

PROJECT = "astuner"

hookspec = HookspecMarker(PROJECT)
hookimpl = HookimplMarker(PROJECT)
"""Decorator that marks a function of a plugin as the implementation of a hook."""


@dataclass(frozen=True, kw_only=True)
class Provider:
    """Description of one object that a plugin provides, available without importing it."""

    target: str
    """Import path, as ``"package.module:attribute"``."""
    summary: str = ""
    """One line for ``astuner plugins``, without a full stop."""
    config: str | None = None
    """Pydantic class of its section, as ``"package.module:Class"``.

    The section of a task reader, judge or workflow is next to the key that selects it (``astuner.task_reader.<name>``,
    ``astuner.task_judge.<name>``, ``astuner.rollout.<name>``). A service uses ``astuner.services.<name>``, a backbone
    the section with its name next to ``astuner`` (its root section). A log sink receives the class's default values.
    Other kinds do not use the class. Checking an experiment imports the class, so its module must not import torch or
    other large packages.
    """
    requires: tuple[str, ...] = ()
    """Modules that ``target`` needs. ASTuner checks that they exist without importing them (for ``a.b``, it imports
    ``a``)."""
    install: str = ""
    """Command to run if a module in ``requires`` is missing."""
    conflicts: tuple[str, ...] = ()
    """Distributions that cannot be installed in the same Python environment."""
    aliases: tuple[str, ...] = ()
    """Legacy names of the object, each a name or ``"package.module->Name"``."""


@dataclass(frozen=True, kw_only=True)
class EnvironmentProvider(Provider):
    """An environment and how the environment service runs it. A plain `Provider` uses these defaults.

    The service never imports ``target``. A separate interpreter imports it once and forks every instance.
    """

    splits: tuple[str, ...] = ("train", "validation")
    """Splits that ``tasks`` accepts."""
    python: str = ""
    """Python version for packages that do not support ASTuner's, e.g. ``>=3.11,<3.14``.

    `astuner env setup` creates this interpreter. Empty: ASTuner's Python.
    """
    packages: tuple[str, ...] = ()
    """Requirements that ``astuner env setup`` installs into that interpreter."""
    lent: tuple[str, ...] = ()
    """Packages of the service's Python that this interpreter may import, usually the package that contains ``target``.

    A lent package must import only packages that are installed in this interpreter.
    """
    preload: tuple[str, ...] = ()
    """Modules to import (``"package.module"``) or functions to call (``"package.module:function"``) before the first
    fork. They must not start threads."""
    setup: str = ""
    """An `EnvironmentSetup`, as ``"package.module:Class"``, with further steps of `astuner env setup` and `doctor`."""
    create_timeout: float = 120.0
    """Seconds to create an instance; after that, the service kills it."""
    step_timeout: float = 60.0
    """Seconds for a step; after that, the service kills the instance."""
    evaluate_timeout: float = 120.0
    """Seconds for an evaluation; after that, the service kills the instance."""
    memory_mb: int = 256
    """Typical memory of one instance. Together with the machine's memory, it limits the number of instances."""
    max_memory_mb: int = 0
    """Memory at which the service ends an instance with all its processes. 0: four times ``memory_mb``, at least
    1024."""
    max_processes: int = 32
    """Number of processes at which the service ends an instance."""


@dataclass(frozen=True, kw_only=True)
class LossProvider(Provider):
    """A loss and the settings that its paper combines with it. A plain `Provider` implies no settings."""

    implies: Mapping[str, object] = field(default_factory=dict)
    """Keys below ``astuner.trainer_common.algorithm`` -> values to use unless the experiment sets them."""


@dataclass(frozen=True, kw_only=True)
class CommandProvider(Provider):
    """A command. A plain `Provider` is listed in ``astuner --help``."""

    hidden: bool = False
    """Whether to omit the command from ``astuner --help``, for legacy names. It still runs."""


def is_hidden(provider: Provider) -> bool:
    """Return whether ``astuner --help`` omits this command."""
    return isinstance(provider, CommandProvider) and provider.hidden


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
"""Kind -> the hook that registers it. ``hooks.yaml`` describes each kind."""


def _listing(hook: str) -> Callable[[], Mapping[str, Provider]]:
    def offered() -> Mapping[str, Provider]:  # type: ignore[empty-body]
        """Return a plugin's providers of one kind, by name."""

    offered.__name__ = offered.__qualname__ = hook
    return hookspec(offered)


globals().update({hook: _listing(hook) for hook in KINDS.values()})


@hookspec(firstresult=True)
def locate_model(path: str) -> str | None:
    """Return the local folder of the model ``path``, or None.

    The first result that is not None wins. If all plugins return None, ASTuner uses an existing folder as is and treats
    any other value as a Hugging Face name.

    :param path: Value of ``astuner.model.path``, e.g. ``Qwen/Qwen2.5-14B-Instruct``.
    """


@hookspec
def list_models() -> Sequence[str]:  # type: ignore[empty-body]
    """Return the model names for which this plugin's ``locate_model`` returns a folder.

    ASTuner lists them in the error message when a model cannot be downloaded.
    """


@hookspec
def register_aliases() -> Mapping[tuple[str, str], Sequence[str]]:  # type: ignore[empty-body]
    """Return a mapping from objects of other plugins, as (kind, name), to their legacy names.

    For example, ``{("task reader", "jsonl"): ("dataset_file",)}``.

    Objects that no plugin registers are ignored. For its own objects, a plugin uses ``Provider.aliases``.
    """
