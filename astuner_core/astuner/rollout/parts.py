"""From the config to the things it names: workflow, judge, task reader.

One rule for all of them: the target is called with its provider's validated section when it declares one; a class
of the user's own that insists on one argument gets the whole config (the seeds' judges do).  Whoever takes
``helper_models`` is given the experiment's.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from astuner.errors import AstunerError, ConfigError, PluginError
from astuner.helper_models import HelperModels
from astuner.registry import is_code

if TYPE_CHECKING:
    from astuner.config import Config


_HELPERS = "helper_models"
"""The parameter by which a constructor asks for them."""


def workflow_factory(config: Config, disabled_plugins: Sequence[str] = ()) -> Callable[[], Any]:
    """A function that makes a fresh workflow for every episode.

    A plain function ``(task, model)`` in the style of agentscope.tuner is accepted as a workflow too.
    """
    reference = config.astuner.rollout.workflow
    if not reference:
        raise ConfigError(
            "astuner.rollout.workflow is required: a registered name, module->Class or path/to/file.py->Class"
        )
    target = config.resolve("workflow", reference, disabled_plugins)
    if inspect.isfunction(target):
        return lambda: _FunctionWorkflow(target)
    if not hasattr(target, "execute"):
        raise PluginError(f"the workflow {reference!r} has no method execute(workflow_task, model_tuner)")
    arguments = _arguments(target, config.section("workflow", reference), config)
    helpers = _helpers(target, config)
    return lambda: target(*arguments, **helpers)


def mistakes(config: Config, disabled_plugins: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """What is wrong with the parts that a config names, all at once, and what could not be tried here.

    A registered judge is made, and asks nobody; it is made without the keys of helper models that are not in this
    environment, since the machine that checks a file need not be the one that runs it.  A judge of the person's own
    code is only imported: its constructor may do anything, such as loading a model.
    """
    reference = config.astuner.task_judge.judge
    tries: list[Callable[[], Any]] = []
    if config.astuner.rollout.workflow:
        tries.append(lambda: workflow_factory(config, disabled_plugins))
    if reader := config.astuner.task_reader.type:
        tries.append(lambda: config.resolve("task reader", reader, disabled_plugins))
    notes = []
    if reference and is_code(reference):
        tries.append(lambda: config.resolve("judge", reference, disabled_plugins))
        notes.append(f"task_judge.judge: {reference} was imported and not made; only a run does that")
    elif reference:
        helpers, absent = _without_absent_keys(config)
        section = config.section("judge", reference)
        tries.append(lambda: make_judge(config, reference, section, disabled_plugins, helpers))
        notes += absent
    problems: list[str] = []
    for attempt in tries:
        try:
            attempt()
        except AstunerError as e:
            problems += problems_of(e)
    return problems, notes


def problems_of(error: AstunerError) -> Sequence[str]:
    """The mistakes that an error tells of, one by one."""
    return error.problems if isinstance(error, ConfigError) else (str(error),)


def _without_absent_keys(config: Config) -> tuple[HelperModels, list[str]]:
    """The helper models, as if those whose key is not in the environment needed none; and a note on each of these."""
    sections, notes = dict(config.astuner.helper_models), []
    for name, section in sections.items():
        if section.api_key_env and not os.environ.get(section.api_key_env, "").strip():
            sections[name] = section.model_copy(update={"api_key_env": None})
            notes.append(
                f"astuner.helper_models.{name}.api_key_env: {section.api_key_env} is not set in this environment; a "
                "run that asks this model needs it"
            )
    return HelperModels(sections, scope=f"{config.run_dir.absolute()}#check"), notes


def source_of(config: Config, kind: str, reference: str, disabled_plugins: Sequence[str] = ()) -> str:
    """What ``reference`` is and where it comes from, for the plan: a file, or a module."""
    target = config.resolve(kind, reference, disabled_plugins)
    if is_code(reference):
        return f"{target.__name__} from {inspect.getsourcefile(target)}"
    return f"{reference} ({target.__module__}.{target.__name__})"


def build_judge(config: Config, disabled_plugins: Sequence[str] = ()) -> Any:
    """The judge, or None when the experiment has none."""
    reference = config.astuner.task_judge.judge
    if not reference:
        return None
    return make_judge(config, reference, config.section("judge", reference), disabled_plugins)


def make_judge(
    config: Config,
    reference: str,
    section: Any,
    disabled_plugins: Sequence[str] = (),
    helper_models: HelperModels | None = None,
) -> Any:
    """A judge; one that takes ``experiment`` (the whole config) or ``disabled_plugins`` by keyword alone, or
    ``helper_models``, is told.

    :param section: its checked section; None where it has no model.
    :param helper_models: for one that is asked by another judge; None: the experiment's.
    """
    target = config.resolve("judge", reference, disabled_plugins)
    known = inspect.signature(target).parameters
    extra: dict[str, Any] = {"experiment": config, "disabled_plugins": disabled_plugins}
    extra = {n: value for n, value in extra.items() if n in known and known[n].kind is inspect.Parameter.KEYWORD_ONLY}
    if _HELPERS in known:
        extra[_HELPERS] = helper_models or HelperModels.of(config)
    judge = target(*_arguments(target, section, config), **extra)
    if not hasattr(judge, "judge") and not hasattr(judge, "compute_reward"):
        raise PluginError(f"the judge {reference!r} has no method judge(workflow_task, output)")
    return judge


def build_task_reader(config: Config, disabled_plugins: Sequence[str] = (), *, dry_run: bool = False) -> Any:
    """The task reader; one that takes ``base_dir``, ``on_bad_line``, ``experiment`` (the whole config), ``dry_run``,
    ``helper_models`` or ``disabled_plugins`` is told."""
    reference = config.astuner.task_reader.type
    if not reference:
        raise ConfigError("astuner.task_reader.type is required, for example jsonl or huggingface")
    target = config.resolve("task reader", reference, disabled_plugins)
    known = inspect.signature(target).parameters
    extra = {
        "base_dir": config.base_dir,
        "on_bad_line": config.astuner.data.on_bad_line,
        "experiment": config,
        "disabled_plugins": disabled_plugins,
        "dry_run": dry_run,
    }
    arguments = _arguments(target, config.section("task reader", reference), config)
    extra = {name: value for name, value in extra.items() if name in known}
    return target(*arguments, **extra, **_helpers(target, config, part="tasks"))


def _arguments(target: Any, section: Any, config: Config) -> tuple[Any, ...]:
    """What ``target`` is called with; looked up once, since reading a signature costs as much as a short episode."""
    if section is not None:
        return (section,)
    parameters = inspect.signature(target).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.default is p.empty and p.kind in positional and p.name != _HELPERS]
    return (config,) if len(required) == 1 else ()


def _helpers(target: Any, config: Config, part: str = "") -> dict[str, HelperModels]:
    """The helper models, as a keyword for a ``target`` that takes them."""
    if _HELPERS not in inspect.signature(target).parameters:
        return {}
    return {_HELPERS: HelperModels.of(config, part=part)}


class _FunctionWorkflow:
    """``async def workflow(task: dict, model) -> WorkflowOutput``, as agentscope.tuner spells it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def execute(self, workflow_task: Any, model_tuner: Any) -> Any:
        task = workflow_task.task
        row = {"task_id": task.task_id, **task.metadata}
        if task.env_type:  # what its environment says first is in no row
            row = {"main_query": task.main_query, "init_messages": list(task.init_messages), **row}
        returned = self._function(row, model_tuner)
        return await returned if inspect.isawaitable(returned) else returned
