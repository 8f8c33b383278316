"""The process that runs model-written code: AppWorld's own execution, without a world.

`apis` is a stand-in that sends each call to the instance, which has the apps' process answer it.  There is no database,
no data folder and no other open file in this process, and the kernel, where it can, lets it read Python's own files
only.  Whatever the code does to this process, it does to itself: the worst it can achieve is to lose its variables.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from astuner_appworld.world import guard
from astuner_appworld.world.apps import told, unfit
from astuner_sandbox.isolation.confine import Confinement, confine


def main(channel: Any, facts: Mapping[str, Any], confinement: Confinement, require: bool) -> None:
    """Serve ``channel``: a first message starts the shell, every other one is code to run."""
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
        if isinstance(code, str):  # anything else is the late answer to a call that was given up
            channel.send({"output": shell.run(code)})


class _Wire:
    """One API call at a time, from the thread that runs the code, while it runs."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._owner = threading.get_ident()
        self.running = False

    def call(self, app: str, api: str, arguments: dict[str, Any]) -> Any:
        if threading.get_ident() != self._owner or not self.running:
            raise RuntimeError("apis can only be called by the code of the current step, and not from a thread")
        from fastapi.encoders import jsonable_encoder

        plain = jsonable_encoder(arguments)
        why = unfit(plain)  # the apps look again: code can get around this
        if why is not None:
            raise ValueError(f"apis.{app}.{api} was not called: {why}.")
        with _alarm_waits():  # a timeout in the middle of a message would leave half of it
            self._channel.send({"call": {"app": app, "api": api, "arguments": plain}})
            answer = self._channel.recv()
        if "error" in answer:
            raise Exception(answer["error"])  # the class that AppWorld raises here
        return answer.get("value")


def _shell_world(channel: Any, facts: Mapping[str, Any]) -> Any:
    """AppWorld's `execute` on a shell without a world."""
    from appworld import AppWorld
    from appworld.apps.api_lib import set_local_date_and_time
    from appworld.common import safety_guard
    from IPython.terminal.embed import InteractiveShellEmbed
    from traitlets.config.loader import Config

    safety_guard.ALLOWED_MODULE_NAMES.discard("appworld")
    wire = _Wire(channel)

    class Requests:
        """AppWorld resets the count of calls here; the apps' process counts them."""

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
            """The apps' process does."""

        def save_logs(self) -> None:
            self.environment_io.clear()

        def run(self, code: str) -> str:
            refused = guard.objection(code) if facts["check_code"] else None
            if refused is not None:
                return refused
            wire.running = True
            try:
                return str(self.execute(code))
            finally:
                wire.running = False

    return ShellWorld()


def _preamble() -> str:
    """What is imported for the code, without the package's own inner parts, and its `print` and `input`."""
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
    """The object that model-written code calls `apis`, with the package's own errors for what is not there."""
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
    """No log to write to, no variables, an empty folder to stand in."""
    os.chdir(folder)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.environ.clear()
    os.environ.update(PATH="", HOME=folder, LANG="C.UTF-8")


def _be_alone() -> None:
    """Confinement binds the thread that asks for it, so there must be no other yet."""
    tasks = "/proc/self/task"
    others = len(os.listdir(tasks)) - 1 if os.path.isdir(tasks) else threading.active_count() - 1
    if others:
        raise RuntimeError(f"{others} more threads run before the shell is confined")


@contextlib.contextmanager
def _alarm_waits() -> Iterator[None]:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
