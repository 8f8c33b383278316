"""From the config to the things it names: workflow, judge, task reader.

One rule for all of them: the target is called with its provider's validated section when it declares one; a class
of the user's own that insists on one argument gets the whole config (the seeds' judges do).  Whoever takes
``helper_models`` is given the experiment's, by the part of that name (`astuner.contracts.parts`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import AstunerError, ConfigError, PluginError
from astuner.contracts.judge import GroupJudge
from astuner.plugins import registry
from astuner.plugins.registry import is_code
from astuner.plugins.user_code import close_name, place, written_at

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.contracts.parts import HelperModelsPart


_HELPERS = "helper_models"
"""The parameter by which a constructor asks for them."""


def workflow_factory(config: Config) -> Callable[[], Any]:
    """A function that makes a fresh workflow for every episode.

    A plain function ``(task, model)`` in the style of agentscope.tuner is accepted as a workflow too.
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
    arguments = _arguments(target, config.section("workflow", reference), config)
    helpers = _helpers(target, config, f"the workflow {reference!r}")
    return lambda: target(*arguments, **helpers)


def source_of(config: Config, kind: str, reference: str) -> str:
    """What ``reference`` is and where it comes from, for the plan: a file, or a module."""
    target = config.resolve(kind, reference)
    if is_code(reference):
        return f"{target.__name__} from {inspect.getsourcefile(target)}"
    return f"{reference} ({target.__module__}.{target.__name__})"


def build_judge(config: Config) -> Any:
    """The judge, or None when the experiment has none."""
    reference = config.astuner.task_judge.judge
    if not reference:
        return None
    return make_judge(config, reference, config.section("judge", reference))


def make_judge(
    config: Config,
    reference: str,
    section: Any,
    helper_models: HelperModelsPart | None = None,
) -> Any:
    """A judge; one that takes ``experiment`` (the whole config) by keyword alone, or ``helper_models``, is told.

    :param section: its checked section; None where it has no model.
    :param helper_models: for one that is asked by another judge; None: the experiment's.
    """
    target = config.resolve("judge", reference)
    known = inspect.signature(target).parameters
    extra: dict[str, Any] = {"experiment": config}
    extra = {n: value for n, value in extra.items() if n in known and known[n].kind is inspect.Parameter.KEYWORD_ONLY}
    if helper_models is not None and _HELPERS in known:
        extra[_HELPERS] = helper_models
    else:
        extra |= _helpers(target, config, f"the judge {reference!r}")
    if isinstance(target, type):
        _check_judge(target)  # before it is made, for Python refuses what is abstract in words of its own
    judge = _made(f"the judge {reference!r}", target, *_arguments(target, section, config), **extra)
    _check_judge(type(judge))
    return judge


def _made(what: str, target: Any, *arguments: Any, **named: Any) -> Any:
    """:raises PluginError: its constructor raised, as a stranger's may."""
    try:
        return target(*arguments, **named)
    except AstunerError:
        raise
    except Exception as e:
        raise PluginError(f"{what} cannot be made: {type(e).__name__}: {e}{place(e)}") from e


def _check_judge(judge: type) -> None:
    if issubclass(judge, GroupJudge):
        _check_method(judge, ("judge_group",), ("attempts",))
    else:
        _check_method(judge, ("judge", "compute_reward"), ("workflow_task", "output"))


def _check_method(target: Any, names: Sequence[str], arguments: Sequence[str]) -> None:
    """Whether a class has a method, by one of its ``names`` (the first is today's), that takes ``arguments``.

    :raises PluginError: not so; says where its own method is that was meant.
    """
    abstract: frozenset[str] = getattr(target, "__abstractmethods__", frozenset())
    name = next((name for name in names if callable(getattr(target, name, None)) and name not in abstract), None)
    if name is None:
        wanted = f"{names[0]}({', '.join(('self', *arguments))})"
        own = [method for method, value in vars(target).items() if inspect.isfunction(value)]
        hint = close_name(names[0], own)
        meant = hint.removeprefix("; did you mean ").rstrip("?")
        at = written_at(getattr(target, meant) if hint else target)
        hint = f"; {meant} is close: call it {names[0]}" if hint else f"; write def {wanted}"
        raise PluginError(f"{at}: {target.__name__} has no method {wanted}{hint}")
    static = isinstance(inspect.getattr_static(target, name), (staticmethod, classmethod))
    _check_arguments(getattr(target, name), f"{target.__name__}.{name}", arguments if static else ("self", *arguments))


def _check_arguments(function: Any, name: str, arguments: Sequence[str]) -> None:
    """:raises PluginError: the function cannot be called with as many."""
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments)
    except ValueError:
        return  # it does not say what it takes
    except TypeError:
        raise PluginError(
            f"{written_at(function)}: {name} takes {signature}; it is called with {', '.join(arguments)}, so write "
            f"def {function.__name__}({', '.join(arguments)})"
        ) from None


def build_task_reader(config: Config, *, dry_run: bool = False) -> Any:
    """The task reader; one that takes ``base_dir``, ``on_bad_line``, ``experiment`` (the whole config), ``dry_run``
    or ``helper_models`` is told."""
    reference = config.astuner.task_reader.type
    if not reference:
        raise ConfigError("astuner.task_reader.type is required, for example jsonl or huggingface")
    target = config.resolve("task reader", reference)
    known = inspect.signature(target).parameters
    extra = {
        "base_dir": config.base_dir,
        "on_bad_line": config.astuner.data.on_bad_line,
        "experiment": config,
        "dry_run": dry_run,
    }
    arguments = _arguments(target, config.section("task reader", reference), config)
    extra = {name: value for name, value in extra.items() if name in known}
    helpers = _helpers(target, config, f"the task reader {reference!r}", part="tasks")
    return _made(f"the task reader {reference!r}", target, *arguments, **extra, **helpers)


def _arguments(target: Any, section: Any, config: Config) -> tuple[Any, ...]:
    """What ``target`` is called with; looked up once, since reading a signature costs as much as a short episode."""
    if section is not None:
        return (section,)
    parameters = inspect.signature(target).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in positional and p.name != _HELPERS]
    if len(required) > 1:
        names = ", ".join(p.name for p in required)
        raise PluginError(
            f"{written_at(target.__init__)}: {target.__name__}.__init__ requires {names}; it is called with nothing "
            "(or, where it takes one argument, with the whole config), so give the others defaults"
        )
    return (config,) if len(required) == 1 else ()


def _helpers(target: Any, config: Config, what: str, part: str = "") -> dict[str, HelperModelsPart]:
    """The helper models, as a keyword for a ``target`` that takes them.

    :raises MissingDependency: it takes them, and no package that is on brings them.
    """
    if _HELPERS not in inspect.signature(target).parameters:
        return {}
    found: type[HelperModelsPart] = registry.part(config.plugins, _HELPERS, wanted_by=f"{what} takes {_HELPERS} and")
    return {_HELPERS: found.of(config, part=part)}


class _FunctionWorkflow:
    """``async def workflow(task: dict, model) -> WorkflowOutput``, as agentscope.tuner spells it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    async def execute(self, workflow_task: Any, model_tuner: Any) -> Any:
        task = workflow_task.task
        row = {"task_id": task.task_id, **task.metadata}
        if task.env_type:  # what its environment says first is in no row
            row = {"main_query": task.main_query, "init_messages": list(task.init_messages), **row}
        returned = self.function(row, model_tuner)
        return await returned if inspect.isawaitable(returned) else returned
