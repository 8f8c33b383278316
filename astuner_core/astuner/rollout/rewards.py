"""Detect from its source that a workflow never returns a reward."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError
from astuner.contracts.types import WorkflowOutput
from astuner.contracts.workflow import Workflow
from astuner.plugins.registry import is_code
from astuner.plugins.user_code import written_at

if TYPE_CHECKING:
    from astuner.config import Config


_TEXT_METHODS = ("get_text_content", "strip", "join", "format")
"""Methods that return text."""
_MAY_SET_REWARD = re.compile(r"reward|score|evaluat|gym_step", re.I)
"""Signs in the source of a workflow that an episode may get a reward."""


def no_reward(workflow_at: str) -> str:
    """Return instructions for a workflow that returned no reward while no judge is configured.

    :param workflow_at: File and line of the workflow; empty if unknown.
    """
    where = f" ({workflow_at})" if workflow_at else ""
    return (
        f"the workflow{where} returned no reward and no judge is configured. Set astuner.task_judge.judge, or return "
        "WorkflowOutput(reward=…)"
    )


def check_rewards(config: Config) -> None:
    """Check that the workflow or a judge returns rewards.

    :raises ConfigError: No judge is configured, and the workflow's source shows that it never returns a reward.
    """
    reference = config.astuner.rollout.workflow
    if config.astuner.task_judge.judge or not reference:
        return
    target = config.resolve("workflow", reference)
    execute = target if inspect.isfunction(target) else target.execute
    if never_gives_reward(execute):
        raise ConfigError(f"no episode would have a reward: {no_reward(written_at(execute))}")


def may_lack_reward(config: Config) -> str:
    """Return a warning if no judge is configured and the files of the workflow do not mention rewards, or ``""``."""
    reference = config.astuner.rollout.workflow
    if config.astuner.task_judge.judge or not is_code(reference):
        return ""
    target = config.resolve("workflow", reference)
    is_function = inspect.isfunction(target)
    classes = [target] if is_function else [kind for kind in target.__mro__ if kind not in Workflow.__mro__]
    execute = target if is_function else target.execute
    try:
        sources = [inspect.getsource(inspect.getmodule(kind) or kind) for kind in classes]
    except (OSError, TypeError):
        return ""
    if any(_MAY_SET_REWARD.search(source) for source in sources) or not _returns(execute, any):
        return ""
    return f"astuner.task_judge.judge is not set. {no_reward(written_at(execute))}".replace("returned", "may return", 1)


def never_gives_reward(execute: Any) -> bool:
    """Return whether a workflow's function returns only outputs that are created, and remain, without a reward.

    Return False if the source is unavailable or inconclusive, because the output may come from elsewhere.
    """
    return _returns(execute, all)


def _returns(execute: Any, quantifier: Callable[[Iterable[bool]], bool]) -> bool:
    """Return whether ``any`` or ``all`` returned values have no reward."""
    try:
        function = inspect.unwrap(execute)
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) or tree.decorator_list:
        return False
    nodes = list(_own_nodes(tree))
    if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
        return False
    returned = [node.value for node in nodes if isinstance(node, ast.Return)]
    own = function.__code__.co_varnames
    known = {name: value for name, value in function.__globals__.items() if name not in own}
    return bool(returned) and quantifier(
        value is not None
        and (_is_without_reward(value, known) or _is_text(value) or _stays_without_reward(value, tree, known))
        for value in returned
    )


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without nested functions and classes."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            yield node
            yield from _own_nodes(node)


def _is_without_reward(value: ast.AST, known: dict[str, Any]) -> bool:
    """Return whether an expression is ``WorkflowOutput(…)`` without a reward."""
    return (
        isinstance(value, ast.Call)
        and _named(value.func, known) is WorkflowOutput
        and not value.args
        and all(keyword.arg is not None for keyword in value.keywords)
        and all(keyword.arg != "reward" or _is_none(keyword.value) for keyword in value.keywords)
    )


def _is_text(value: ast.AST) -> bool:
    """Return whether an expression is text or None, which is not a reward."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, (str, type(None)))
    is_str = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "str"
    is_join = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _TEXT_METHODS
    is_reply = isinstance(value, ast.Attribute) and value.attr in ("text", "content")
    return isinstance(value, ast.JoinedStr) or is_str or is_join or is_reply


def _stays_without_reward(value: ast.AST, tree: ast.AST, known: dict[str, Any]) -> bool:
    """Return whether an expression is a variable that only holds outputs without a reward and is not passed on."""
    if not isinstance(value, ast.Name):
        return False
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == value.id]
    assigned = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and node.targets[0] in uses
    ]
    harmless = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr != "reward"]
    harmless += [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    stored = [use for use in uses if isinstance(use.ctx, ast.Store)]
    return (
        len(assigned) == len(stored) > 0
        and all(_is_without_reward(each, known) for each in assigned)
        and all(use in harmless for use in uses if use not in stored)
    )


def _named(node: ast.AST, known: dict[str, Any]) -> Any:
    """Return the global that ``WorkflowOutput`` or ``astuner.WorkflowOutput`` refers to, or None for other names."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    return getattr(_named(node.value, known), node.attr, None) if isinstance(node, ast.Attribute) else None


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
