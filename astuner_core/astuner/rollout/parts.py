"""Build the objects that a config names: workflow, judge, task reader, and output checks (`build`).

A class is built by its ``from_config(section, context)`` (`astuner.contracts.building`). A class without this method,
for example of an older plugin, gets arguments by the names of its constructor's parameters (`_as_before`).

The output checks of an experiment are combined into one check of every reply. Invariant: a check returns an answer or
the episode ends with `JudgeFailed`; a broken check never counts as passed.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.contracts.building import BuildContext, Built
from astuner.contracts.errors import AmbiguousName, AstunerError, ConfigError, JudgeFailed, PluginError, UnknownName
from astuner.contracts.interrupt import let_the_person_stop
from astuner.contracts.judge import GroupJudge, Judge
from astuner.contracts.output_check import Check, OutputView
from astuner.contracts.types import Task
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins
from astuner.plugins.registry import is_code
from astuner.plugins.user_code import close_name, written_at
from astuner.rollout.endings import story
from astuner.rollout.threads import contained

if TYPE_CHECKING:
    from astuner.config import Config

_FIRST = ("workflow_task", "task", "WorkflowTask", "Task")
"""Names and types of the first parameter of workflows and judges."""
_SECOND = ("output", "response", "WorkflowOutput", "completion", "model_tuner", "model", "tuner", "ModelTuner")
"""Names and types of their second parameter."""

BY_NAME: Mapping[str, Callable[[BuildContext], Any]] = {
    "config": lambda context: context.config,  # only for a required parameter of a class without a section
    "experiment": lambda context: context.config,
    "helper_models": lambda context: context.helper_models,
    "base_dir": lambda context: context.base_dir,
    "on_bad_line": lambda context: context.config.astuner.data.on_bad_line,
    "dry_run": lambda context: context.dry_run,
}
"""Parameter name -> argument for constructors of classes without ``from_config``."""


def build(kind: str, reference: str, section: Any, context: BuildContext) -> Any:
    """Build the object that ``reference`` names.

    :param section: Its validated section; None if it has no section model.
    :raises PluginError: It cannot be found, imported or built, or its constructor requires unknown arguments.
    """
    return _made(kind, reference, context.config.resolve(kind, reference), section, context)


def workflow_factory(config: Config) -> Callable[[], Any]:
    """Return a function that creates a workflow for every episode.

    A plain function ``(task, model)`` in the style of agentscope.tuner is also accepted.
    """
    reference = config.astuner.rollout.workflow
    if not reference:
        raise ConfigError(
            "astuner.rollout.workflow is required: a registered name, module->Class or path/to/file.py->Class"
        )
    target = config.resolve("workflow", reference)
    if inspect.isfunction(target):
        _check_arguments(target, target.__name__, ("task", "model"))
        return lambda: _FunctionWorkflow(target)
    _check_method(target, ("execute",), ("workflow_task", "model_tuner"))
    context = BuildContext(config=config, name=f"the workflow {reference!r}")
    return _maker(target, config.section("workflow", reference), context)


def source_of(config: Config, kind: str, reference: str) -> str:
    """Return what ``reference`` names and its file or module, for the plan."""
    target = config.resolve(kind, reference)
    if is_code(reference):
        return f"{target.__name__} from {written_at(target).rpartition(':')[0] or 'this process'}"
    return f"{reference} ({target.__module__}.{target.__name__})"


def build_judge(config: Config) -> Any:
    """Return the judge, or None if the experiment has none."""
    reference = config.astuner.task_judge.judge
    if not reference:
        return None
    return make_judge(reference, config.section("judge", reference), BuildContext(config=config))


def make_judge(reference: str, section: Any, context: BuildContext) -> Any:
    """Build a judge and check its methods.

    Functions ``(workflow_task, output)``, and ``(task, response)`` as in agentscope.tuner, are also accepted.
    """
    target = context.config.resolve("judge", reference)
    if inspect.isfunction(target) and _is_judge_function(target):
        parameters = ("workflow_task", "output")
        if not {*parameters} & {*inspect.signature(target).parameters}:
            parameters = ("task", "response")
        _check_arguments(target, target.__name__, parameters)
        ask: Callable[..., Any] = target
        if parameters == ("task", "response"):
            ask = wraps(target)(lambda workflow_task, output: target(_row(workflow_task.task), output.response))
        return type(target.__name__, (Judge,), {"judge": staticmethod(ask)})()
    if isinstance(target, type):
        _check_judge(target)  # before building, because Python's error for abstract classes is less clear
    judge = _made("judge", reference, target, section, context)
    _check_judge(type(judge))
    return judge


def build_task_reader(config: Config, *, dry_run: bool = False) -> Any:
    """Build the task reader."""
    reference = config.astuner.task_reader.type
    if not reference:
        raise ConfigError("astuner.task_reader.type is required, for example jsonl or huggingface")
    context = BuildContext(config=config, dry_run=dry_run, purpose="tasks")
    return build("task reader", reference, config.section("task reader", reference), context)


def _made(kind: str, reference: str, target: Any, section: Any, context: BuildContext) -> Any:
    what = f"the {kind} {reference!r}"
    try:
        return _maker(target, section, replace(context, name=what))()
    except AstunerError:
        raise
    except BaseException as e:  # user constructors may raise anything
        let_the_person_stop(e)
        raise PluginError(story(f"{what} cannot be built: it", e)) from e


def _maker(target: Any, section: Any, context: BuildContext) -> Callable[[], Any]:
    """Return a function that builds the object for every episode. The signature is inspected only once: it is slow."""
    own = getattr(target, "from_config", None)
    if own is not None and getattr(own, "__func__", None) is not Built.from_config.__func__:  # type: ignore[attr-defined]
        return partial(own, section, context)
    return _as_before(target, section, context)


def _as_before(target: Any, section: Any, context: BuildContext) -> Callable[[], Any]:
    """Return a builder that passes the section first, if there is one, and other arguments by name (`BY_NAME`).

    :raises PluginError: The constructor requires other names; the message has a solution.
    """
    parameters = list(inspect.signature(target).parameters.values())
    if section is not None:
        parameters = parameters[1:]
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if unknown := [name for name in required if name not in BY_NAME]:
        names = ", ".join(unknown)
        raise PluginError(
            f"{written_at(getattr(target, '__init__', target))}: {target.__name__} requires {names}, which ASTuner "
            f"does not pass. Add a default, or add to the class: @classmethod def from_config(cls, section, context): "
            f"return cls({', '.join(f'{name}=…' for name in unknown)}), where context.config is the experiment"
        )
    wanted = [p.name for p in parameters if p.name in BY_NAME and (p.name != "config" or p.name in required)]
    given = {name: BY_NAME[name](context) for name in wanted}
    return partial(target, **given) if section is None else partial(target, section, **given)


def _check_judge(judge: type) -> None:
    if issubclass(judge, GroupJudge):
        _check_method(judge, ("judge_group",), ("attempts",))
    else:
        _check_method(judge, ("judge", "compute_reward"), ("workflow_task", "output"))


def _check_method(target: Any, names: Sequence[str], arguments: Sequence[str]) -> None:
    """Check that a class has a method, under one of its ``names`` (the current one first), that takes ``arguments``.

    :raises PluginError: It does not; the message points to a method with a similar name.
    """
    abstract: frozenset[str] = getattr(target, "__abstractmethods__", frozenset())
    name = next((name for name in names if callable(getattr(target, name, None)) and name not in abstract), None)
    if name is None:
        wanted = f"{names[0]}({', '.join(('self', *arguments))})"
        own = [method for method, value in vars(target).items() if inspect.isfunction(value)]
        hint = close_name(names[0], own)
        meant = hint.removeprefix("; did you mean ").rstrip("?")
        at = written_at(getattr(target, meant) if hint else target)
        hint = f". Rename {meant} to {names[0]}" if hint else f". Add: def {wanted}"
        raise PluginError(f"{at}: {target.__name__} has no method {wanted}{hint}")
    static = isinstance(inspect.getattr_static(target, name), (staticmethod, classmethod))
    _check_arguments(getattr(target, name), f"{target.__name__}.{name}", arguments if static else ("self", *arguments))


def _is_judge_function(function: Any) -> bool:
    """Return whether a function judges, rather than build a judge from arguments that ASTuner passes by name."""
    parameters = inspect.signature(function).parameters
    required = {p.name for p in parameters.values() if p.default is p.empty}
    return [*parameters][:2] == ["task", "response"] or bool(required & {*_FIRST, *_SECOND})


def _check_arguments(function: Any, name: str, arguments: Sequence[str]) -> None:
    """Check that a function accepts the arguments, in this order.

    :raises PluginError: It does not.
    """
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments)
    except ValueError:
        return  # the signature is unknown
    except TypeError:
        why = "but"
    else:
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
        first, second = ([*own[len(arguments) - 2 :], None, None])[:2]
        if len(arguments) < 2 or not (_is_among(first, _SECOND) and _is_among(second, _FIRST)):
            return
        why = "with swapped parameters, because it"
    raise PluginError(
        f"{written_at(function)}: {name} takes {signature}, {why} is called with {', '.join(arguments)}. Change it "
        f"to: def {function.__name__}({', '.join(arguments)})"
    )


def _is_among(parameter: inspect.Parameter | None, names: Collection[str]) -> bool:
    """Return whether a parameter's type, or its name if the type is not one of ASTuner's, is among ``names``."""
    if parameter is None:
        return False
    kind = str(getattr(parameter.annotation, "__name__", parameter.annotation)).rpartition(".")[2]
    return (kind if kind in (*_FIRST, *_SECOND) else parameter.name) in names


class _FunctionWorkflow:
    """A workflow from ``async def workflow(task: dict, model) -> WorkflowOutput``, as in agentscope.tuner."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def execute(self, workflow_task: Any, model_tuner: Any) -> Any:
        returned = self.function(_row(workflow_task.task), model_tuner)
        return await returned if inspect.isawaitable(returned) else returned


def _row(task: Task) -> dict[str, Any]:
    row = {"task_id": task.task_id, **task.metadata}
    if task.env_type:  # the environment's first messages are not part of the data set
        row = {"main_query": task.main_query, "init_messages": list(task.init_messages), **row}
    return row


KEY = "astuner.rollout.compute_madness_checklist"


class OutputChecks:
    """The output checks of an experiment, in order."""

    def __init__(
        self, names: Sequence[str], plugins: PluginManager | None = None, base_dir: Path | None = None
    ) -> None:
        """Find the checks.

        :param names: Names in `rollout.compute_madness_checklist`.
        :param plugins: Active plugins; the installed ones by default.
        :param base_dir: Folder that is searched for user files.
        :raises ConfigError: A name is unknown; the message suggests a similar one.
        :raises astuner.contracts.errors.PluginError: A check cannot be imported, or is not a check.
        """
        self._checks = [(name, _check(name, plugins or load_plugins(), base_dir)) for name in names]

    @classmethod
    def build(cls, config: Config) -> OutputChecks:
        """Return the checks of ``config``; user code is relative to the experiment file. Raises as the constructor.

        Default checks are omitted if their package is not installed.
        """
        names = config.astuner.rollout.compute_madness_checklist
        if KEY not in config.written:
            offered = {name for _, name, _ in config.plugins.offers("output check")}
            names = [name for name in names if name in offered]
        return cls(names, config.plugins, config.base_dir)

    def check(
        self, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None, *, cut_off: bool = False
    ) -> str | None:
        """Return the first complaint about a message, or None.

        :param message: OpenAI-style assistant message.
        :param tools: OpenAI-style descriptions of the offered tools; None if unknown.
        :param cut_off: Whether the reply was ended by a token limit or a stop string.
        :raises astuner.contracts.errors.JudgeFailed: A check raised, or returned neither a string nor None.
        """
        view = OutputView(message, tools, cut_off)
        for name, check in self._checks:
            try:
                complaint = contained(asyncio.CancelledError)(check)(view)
            except Exception as e:  # user code may raise anything; the error ends the episode
                raise JudgeFailed(story(f"the output check {name!r}", e)) from e
            if complaint is not None and not isinstance(complaint, str):
                raise JudgeFailed(
                    f"the output check {name!r} returned {type(complaint).__name__}; it must return a string or None"
                )
            if complaint:
                return complaint
        return None


def _check(name: str, plugins: PluginManager, base_dir: Path | None) -> Check:
    try:
        found = registry.resolve(plugins, "output check", name, base_dir=base_dir)
    except (UnknownName, AmbiguousName) as e:
        raise ConfigError(f"{KEY}: {e}") from e
    if not callable(found) or isinstance(found, type) or inspect.iscoroutinefunction(found):
        raise PluginError(
            f"{KEY}: {name!r} is {found!r}; it must be a plain function of one OutputView that returns a string or None"
        )
    return found  # type: ignore[no-any-return]
