"""The contract between ASTuner and its plugins.

A plugin is a module named by an entry point in the group ``astuner``:

    [project.entry-points.astuner]
    acme = "astuner_acme.plugin"

It imports ``hookimpl`` from ``astuner`` and implements any of the functions
below.  Every one of them *describes* what the plugin offers, by returning a
mapping from a name to a :class:`Provider`.  Nothing is imported, opened or
started until an experiment asks for that name, so a plugin module stays cheap:
it must not import torch, ray, vllm, verl or trinity, directly or indirectly.

Names are unique per kind.  When two plugins register the same name, neither
wins: the bare name is refused and ``plugin/name`` says which one is meant.

A hook may gain parameters in a minor release (pluggy passes only the ones an
implementation names) and loses them only in a major one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """An environment, and how the environment service runs it.

    The service never imports ``target``: an interpreter of the environment's own does, once, and every instance is
    forked from that.  A plain `Provider` has these defaults.
    """

    splits: tuple[str, ...] = ("train", "validation")
    """The splits it has, as ``tasks`` knows them."""
    python: str = ""
    """Which Python it needs, e.g. ``>=3.11,<3.14``, when its packages cannot live beside ASTuner's: then
    ``astuner env setup`` makes it an interpreter of its own.  Empty: the one that the service runs on."""
    packages: tuple[str, ...] = ()
    """What ``astuner env setup`` installs into that interpreter, as requirements."""
    lent: tuple[str, ...] = ()
    """Import packages of the service's interpreter that the other one borrows, the target's own above all; they may
    import nothing but each other, the standard library and what that interpreter has."""
    preload: tuple[str, ...] = ()
    """``"package.module"`` to import, or ``"package.module:function"`` to call, before the first fork. No threads."""
    setup: str = ""
    """A subclass of `astuner_env.environment_setup.EnvironmentSetup` as ``"package.module:Class"``, for what else
    ``astuner env setup`` and ``astuner env doctor`` do."""
    create_timeout: float = 120.0
    """Seconds until an instance that is still being made is killed."""
    step_timeout: float = 60.0
    """Seconds until a step without an answer is killed, with its instance."""
    evaluate_timeout: float = 120.0
    """Seconds until an evaluation without an answer is killed, with its instance."""
    memory_mb: int = 256
    """What one instance takes; with the machine's memory it decides how many run at once."""


@dataclass(frozen=True, kw_only=True)
class LossProvider(Provider):
    """A loss, and what its paper means by it beside the formula. A plain `Provider` implies nothing."""

    implies: Mapping[str, object] = field(default_factory=dict)
    """Keys below ``astuner.trainer_common.algorithm`` -> the values they have unless somebody writes them."""


# ---------------------------------------------------------------------------
# Where tasks come from
# ---------------------------------------------------------------------------


@hookspec
def register_task_readers() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Task readers, chosen by ``astuner.task_reader.type``.

    Each target is a :class:`~astuner.TaskReader`: built with its own section,
    ``astuner.task_reader.<name>``, it yields :class:`~astuner.Task` objects for
    the splits ``train`` and ``validation``.

    A data generator is a task reader too: one that reads a few seed tasks or
    documents and yields more of them.

    Example::

        @hookimpl
        def register_task_readers():
            return {
                "jsonl": Provider(
                    target="astuner.builtin.jsonl:JsonlTaskReader",
                    summary="one JSON object per line",
                    config="astuner.builtin.jsonl:JsonlConfig",
                )
            }
    """


# ---------------------------------------------------------------------------
# What happens to a task
# ---------------------------------------------------------------------------


@hookspec
def register_workflows() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Workflows, chosen by ``astuner.rollout.workflow``.

    Each target is a subclass of :class:`~astuner.Workflow`.  A workflow that
    lives in the user's own project needs no plugin: the config may also say
    ``"my_module->MyWorkflow"`` or ``"path/to/workflow.py->MyWorkflow"``.
    """


@hookspec
def register_judges() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Judges, chosen by ``astuner.task_judge.judge``.

    Each target is a subclass of :class:`~astuner.Judge`: it looks at one
    finished task and its :class:`~astuner.WorkflowOutput` and returns a
    :class:`~astuner.JudgeOutput`.  One of ``astuner.contracts.judge.GroupJudge`` looks
    at all attempts at a task together.  Where the section decides which of the
    two it is, the target is a function that makes the judge.  A judge is asked only when the workflow left
    ``reward`` empty.  It may be called many times at once, so it keeps no state
    about the task at hand.
    """


@hookspec
def register_output_checks() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Checks on what the model wrote, listed by ``astuner.rollout.compute_madness_checklist``.

    Each target is a plain function: it is given an ``OutputView`` (from ``astuner.contracts.output_check``: one reply,
    and the tools that were offered for it) and returns what is wrong in words, or None.  It is asked about every reply
    while the other episodes wait, so it takes time in proportion to the text, and keeps no state.

    It takes no options: a provider of this kind has no ``config``.  A check of the user's own needs no plugin:
    ``"my_module->my_check"`` or ``"path/to/checks.py->my_check"``.
    """


@hookspec
def register_environments() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Environments, chosen by a task's ``env_type``.

    Each target is a subclass of :class:`~astuner.Environment`: one instance serves one episode.  Actions and
    observations are plain data, so that an instance can live in a process of its own.  Return an
    :class:`~astuner.EnvironmentProvider` to say how the environment service runs it.
    """


@hookspec
def register_services() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Environment services, started by ``astuner run --with NAME``.

    Each target is a subclass of :class:`~astuner.Service`: it knows how to
    start a server such as AppWorld, how to tell that it answers, and how to
    stop it again, also when the run is interrupted.
    """


@hookspec
def register_chat_families() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """How families of models write turns, reasoning and tool calls.

    Each target is a :class:`~astuner.contracts.chat_family.Family`.  Nobody names one: which a chat template belongs to
    is found out by rendering with it; the core's own ChatML comes first.
    """


# ---------------------------------------------------------------------------
# What learns, and who watches
# ---------------------------------------------------------------------------


@hookspec
def register_backbones() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Backbones, chosen by ``astuner run --backbone NAME``.

    Each target is a subclass of :class:`~astuner.Backbone`: it turns the
    ``astuner.*`` settings into the engine's own, runs episodes with the engine's
    model and updates its weights from the samples.

    Engines pin their own torch and vllm, so a provider names the distributions
    it cannot live with in ``conflicts``; ASTuner refuses to start when one of
    them is installed and says which environment to use instead.
    """


@hookspec
def register_losses() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Policy losses, chosen by ``astuner.trainer_common.algorithm.loss``.

    Each target is a function of one :class:`~astuner.contracts.objective.LossInput` that returns the loss of each
    token. It is called in the trainer's processes, on every backbone. One of the user's own needs no plugin:
    ``"path/to/losses.py->my_loss"``. Return a :class:`~astuner.contracts.hookspecs.LossProvider` to say which other
    keys follow from its name; a provider of this kind has no ``config``.
    """


@hookspec
def register_advantages() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Advantage estimators, chosen by ``astuner.trainer_common.algorithm.adv_estimator``.

    Each target is a function of one :class:`~astuner.contracts.objective.Compared` that returns an advantage for each
    reward. Who is compared with whom, and what a token weighs, is the same for all of them. One of the user's own needs
    no plugin: ``"path/to/advantages.py->my_estimator"``; a provider of this kind has no ``config``.
    """


@hookspec
def register_log_sinks() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Log sinks, chosen by ``astuner.trainer_common.logger``.

    Each target is a subclass of :class:`~astuner.LogSink`.  A sink that raises
    is reported once and left out of the rest of the run; it never stops it.
    """


@hookspec
def register_subscribers() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Subscribers, told what happens in every run while the plugin is installed and on.

    Each target is a :class:`~astuner.contracts.events.Subscriber`, whose ``for_run`` says which of it, if any, a run is
    to have. Unlike log sinks, nobody names them; ``-p no:NAME`` turns the plugin off.
    """


@hookspec
def register_sentinel_rules() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Rules that watch a run beside the sentinel's own, listed by ``astuner.trainer_common.sentinel.rules``.

    Each target is a subclass of ``astuner.contracts.sentinel_rule.Rule``: it is shown the numbers of one step after
    another, and says what is wrong in words, if anything is.  It takes no options.  A rule of the user's own needs no
    plugin: ``"my_module->MyRule"`` or ``"path/to/rules.py->MyRule"``.
    """


@hookspec
def register_commands() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Commands, listed under "Commands from plugins" in ``astuner --help``.

    Each target is a :class:`typer.Typer`; ``summary`` is its help line, and the
    target itself is imported only when the command is run.

    What commands share (``FILE``, ``KEY=VALUE``, ``--run-dir``, ``--json``, which
    plugins are on) is in ``astuner.contracts.commands``.
    """


@hookspec
def register_diagnoses() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Checks of a machine, made by ``astuner doctor`` whenever the plugin is installed.

    Each target is a function without parameters that returns the
    :class:`~astuner.contracts.diagnosis.Finding` objects about what its plugin needs:
    drivers, packages beside its own, free memory. What is no fault of the
    machine as it is (no GPU, where one is optional) is ``ok`` or ``warn``. It
    takes seconds at most and imports no package that it reports on.
    """


@hookspec
def register_parts() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Parts that the core itself asks for and leaves to packages, under names that it fixes.

    The names are those of ``astuner.contracts.parts.PARTS``; each target is a subclass of the class that is there for
    its name, which says when it is made and what it is asked.  A part is imported when something first needs it, so an
    experiment works without those that it does not use.  Another package may bring one instead of ours, with ours
    turned off.

    Example::

        @hookimpl
        def register_parts():
            return {
                "endpoint": Provider(
                    target="acme_gateway.endpoint:Endpoint",
                    summary="an episode's model over HTTP",
                )
            }
    """


# ---------------------------------------------------------------------------
# Questions with one answer
# ---------------------------------------------------------------------------


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
def register_config_keys() -> Mapping[str, Provider]:  # type: ignore[empty-body]
    """Keys below ``astuner`` that a package adds, whatever else of it an experiment uses.

    The name is the key without ``astuner.``; each target is a :class:`~astuner.contracts.section.Section` with one
    field, of the key's last part, whose model, default and docstring are the key's.  `Config.keys_of` gives the package
    its values.

    Example::

        @hookimpl
        def register_config_keys():
            return {"telemetry": Provider(target="acme.settings:TelemetryKeys", summary="who else is told")}
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
"""What a plugin can register, and the hook that lists it."""
