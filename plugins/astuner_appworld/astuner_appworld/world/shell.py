"""Run model-written code in a process with AppWorld's execution but without a world.

`apis` is a proxy that sends each call to the instance, which forwards it to the process of the apps. The shell's
process has no database, no data folder and no other open file. Where the kernel supports it, the process can read only
Python's own files. Code can harm only this process: at worst, its variables are lost.

Code with names that no solution needs is refused before it runs, with a message to the agent. This check does not
protect the answers. It replaces confusing errors with a clear message, and it is the only protection on kernels without
confinement. Hostile text can exhaust a parser, so the check runs in this process.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import ast
import contextlib
import os
import random
import re
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from astuner_appworld.world.apps import told, unfit
from astuner_sandbox.isolation.confine import Confinement, confine

_MODULES = """array bisect calendar collections contextlib copy csv datetime difflib enum fractions functools heapq
itertools json math numbers operator pendulum pprint random re string textwrap time typing uuid"""
MODULES = frozenset(_MODULES.split())
"""Modules that may be imported: computation without access to the machine."""

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


def main(channel: Any, facts: Mapping[str, Any], confinement: Confinement, require: bool) -> None:
    """Serve ``channel``: the first message starts the shell, later messages contain code to run."""
    _forget_the_rest(facts["folder"])
    channel.recv()
    try:
        shell = _shell_world(channel, facts)
        _be_alone()
        level = confine(confinement, require=require)
    except Exception as e:
        channel.send({"failed": told(e)})
        return
    channel.send({"ready": str(level), "missing": [str(part) for part in level.missing]})
    while True:
        message = channel.recv()
        code = message.get("code")
        if isinstance(code, str):  # other messages are late answers to abandoned calls
            channel.send({"output": shell.run(code)})


class _Wire:
    """Channel for API calls, one at a time, only from the thread that runs the code and only while it runs."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._owner = threading.get_ident()
        self.running = False

    def call(self, app: str, api: str, arguments: dict[str, Any]) -> Any:
        if threading.get_ident() != self._owner or not self.running:
            raise RuntimeError("apis can only be called by the code of the current step, and not from a thread")
        from fastapi.encoders import jsonable_encoder

        plain = jsonable_encoder(arguments)
        why = unfit(plain)  # checked again by the apps, because code can bypass this check
        if why is not None:
            raise ValueError(f"apis.{app}.{api} was not called: {why}.")
        with _alarm_waits():  # a timeout inside a message would leave an incomplete message
            self._channel.send({"call": {"app": app, "api": api, "arguments": plain}})
            answer = self._channel.recv()
        if "error" in answer:
            raise Exception(answer["error"])  # the class that AppWorld raises here
        return answer.get("value")


def _shell_world(channel: Any, facts: Mapping[str, Any]) -> Any:
    """Return an object with AppWorld's `execute` for a shell without a world."""
    from appworld import AppWorld
    from appworld.apps.api_lib import set_local_date_and_time
    from appworld.common import safety_guard
    from IPython.terminal.embed import InteractiveShellEmbed
    from traitlets.config.loader import Config

    safety_guard.ALLOWED_MODULE_NAMES.discard("appworld")
    wire = _Wire(channel)

    class Requests:
        """Replacement for AppWorld's call counter; the process of the apps counts the calls."""

        def reset_request_count(self) -> None:
            return None

    class ShellWorld(AppWorld):  # type: ignore[misc]
        def __init__(self) -> None:
            self.remote_environment_url = None
            self.raise_on_unsafe_syntax = self.null_patch_unsafe_execution = True
            self.safety_guard = safety_guard.SafetyGuard()
            self.requester = Requests()
            self.num_interactions, self.max_interactions = 0, sys.maxsize
            self.timeout_seconds = facts["timeout"]
            self.output_db_home_path_on_disk = ""
            self.environment_io: list[dict[str, str]] = []
            config = Config()
            config.HistoryManager.enabled = False
            hook = sys.excepthook
            self.shell = InteractiveShellEmbed(config=config)
            sys.excepthook = hook
            self.shell.ast_node_interactivity = "none"
            self.shell.run_cell(_preamble())
            self.shell.user_ns["apis"] = _apis(wire, facts["apis"])
            set_local_date_and_time(datetime.fromisoformat(facts["datetime"]))
            random.seed(facts["seed"])

        def _save_state(self, directory: str) -> None:
            """Do nothing: the process of the apps saves the state."""

        def save_logs(self) -> None:
            self.environment_io.clear()

        def run(self, code: str) -> str:
            refused = objection(code) if facts["check_code"] else None
            if refused is not None:
                return refused
            wire.running = True
            try:
                return str(self.execute(code))
            finally:
                wire.running = False

    return ShellWorld()


def _preamble() -> str:
    """Return the code that imports modules for the agent's code and replaces `print` and `input`."""
    from appworld.environment import TRUE_AVAILABLE_IMPORTS

    lines = [line for line in TRUE_AVAILABLE_IMPORTS.splitlines() if "ApiCollection" not in line]
    lines = [line for line in lines if "Requester" not in line]
    return "\n".join(lines) + _PRINT


_PRINT = """
def print(*args, **kwargs):
    if not kwargs and len(args) == 1 and isinstance(args[0], (list, tuple, dict)):
        text = json.dumps(args[0], default=str)
        builtins.print(json.dumps(args[0], default=str, indent=1) if len(text) >= 100 else text)
    else:
        builtins.print(*args, **kwargs)

def input(*args, **kwargs):
    raise Exception("input() is not available: nobody answers questions. Decide for yourself.")
"""


def _apis(wire: _Wire, names: Mapping[str, list[str]]) -> Any:
    """Return the `apis` object for model-written code, with the package's errors for unknown names."""
    from appworld.common.utils import CustomErrorMessageMunch

    def one(app: str, api: str) -> Any:
        def call(**arguments: Any) -> Any:
            return wire.call(app, api, arguments)

        return call

    apis = CustomErrorMessageMunch.build("No app named '{key}' found.")
    for app, its in names.items():
        apis[app] = CustomErrorMessageMunch.build("No API named '{key}' found in the " + app + " app.")
        for api in its:
            apis[app][api] = one(app, api)
    return apis


def _forget_the_rest(folder: str) -> None:
    """Detach the process from logs, environment variables and folders."""
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.environ.clear()
    os.environ.update(PATH="", HOME=folder, LANG="C.UTF-8")


def _be_alone() -> None:
    """Check that no other thread exists, because confinement applies only to the calling thread."""
    tasks = "/proc/self/task"
    others = len(os.listdir(tasks)) - 1 if os.path.isdir(tasks) else threading.active_count() - 1
    if others:
        raise RuntimeError(f"{others} other threads are running before the shell is confined")


@contextlib.contextmanager
def _alarm_waits() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def objection(code: str) -> str | None:
    """Return why ``code`` is refused, or None. Code that does not parse is harmless; Python reports the error."""
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
    """Return whether a string contains a special name, which a format string could use to read attributes."""
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
