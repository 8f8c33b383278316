"""A look at code before it runs: what no solution needs is refused, and the agent is told so.

This is not what keeps the answers safe: the process that runs the code holds no world and, where the kernel can
confine it, reads no file of AppWorld's data.  It gives a plain answer instead of a puzzling error, and it is what is
left on a kernel that confines nothing.  Hostile text can exhaust a parser, so this runs where the code does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_MODULES = """array bisect calendar collections contextlib copy csv datetime difflib enum fractions functools heapq
itertools json math numbers operator pendulum pprint random re string textwrap time typing uuid"""
MODULES = frozenset(_MODULES.split())
"""What may be imported: what computes, and nothing that reaches the machine."""

_REFUSED_NAMES = """__import__ __builtins__ __loader__ __spec__ __file__ builtins importlib requester get_ipython eval
exec compile globals locals vars open breakpoint exit quit os sys gc ctypes socket subprocess inspect pathlib appworld
ApiCollection Requester"""
_NAMES = frozenset(_REFUSED_NAMES.split())
_REFUSED_ATTRIBUTES = """f_back f_globals f_locals f_builtins f_code tb_frame tb_next gi_frame gi_code cr_frame cr_code
ag_frame ag_code co_consts func_globals mro _requester _getframe attrgetter methodcaller"""
_ATTRIBUTES = frozenset(_REFUSED_ATTRIBUTES.split())
_HARMLESS = frozenset(("__name__", "__doc__", "__len__", "__init__", "__str__", "__repr__", "__main__", "__version__"))
_DYNAMIC = frozenset(("getattr", "setattr", "delattr", "hasattr"))
_DUNDER = re.compile(r"__[a-z]+(?:_[a-z]+)*__")


def objection(code: str) -> str | None:
    """Why ``code`` is not run, or None. Code that does not parse is nobody's danger: Python will say what is wrong."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = next(_objections(tree), None)
    if found is None:
        return None
    return (
        f"This code was not run: {found} is not available here. Use `apis`, plain Python and the modules "
        "collections, datetime, itertools, json, math, pendulum, random and re."
    )


def _objections(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"the module {a.name!r}" for a in node.names if a.name.split(".")[0] not in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.level or (node.module or "").split(".")[0] not in MODULES:
                yield f"the module {'.' * node.level + (node.module or '')!r}"
            yield from (f"the name {a.name!r}" for a in node.names if _is_walk(a.name) or a.name in _ATTRIBUTES)
        elif isinstance(node, ast.Name) and (node.id in _NAMES or _is_walk(node.id)):
            yield f"the name {node.id!r}"
        elif isinstance(node, ast.Attribute) and (node.attr in _ATTRIBUTES or _is_walk(node.attr)):
            yield f"the attribute {node.attr!r}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _names_a_walk(node.value):
            yield "text that names a special attribute"
        elif _has_a_computed_name(node):
            yield "an attribute with a computed name"


def _is_walk(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and len(name) > 4 and name not in _HARMLESS


def _names_a_walk(text: str) -> bool:
    """Also inside a format string, which can read attributes."""
    return any(name not in _HARMLESS for name in _DUNDER.findall(text))


def _has_a_computed_name(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    if not isinstance(node, ast.Call) or not isinstance(called, ast.Name) or called.id not in _DYNAMIC:
        return False
    return len(node.args) < 2 or not _is_plain_name(node.args[1])


def _is_plain_name(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value not in _ATTRIBUTES
        and not _is_walk(node.value)
    )
