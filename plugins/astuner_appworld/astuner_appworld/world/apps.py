"""Run the real `AppWorld` with its databases and apps in a process without model-written code.

The process answers one message at a time: start, call one API, end the step. Invariant: other processes can do to the
world only what the public APIs do, with JSON arguments. The state of every step is written to a separate folder, so a
failed write leaves the previous state intact.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import json
import os
import secrets
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner_appworld.world import package
from astuner_appworld.world.roots import EXPERIMENT

_LONGEST_ARGUMENTS = 1 << 20
"""Maximum characters of a call's arguments as JSON. Several copies exist on the way to a database."""
_LONGEST_ANSWER = 4 << 20
"""Maximum characters of a call's result as JSON; the limit of the shell's channel is twice that."""
_NOT_FOR_AGENTS = frozenset(("client", "track", "show", "_app_name", "_api_name", "_system_datetime"))
"""Parameters of the package's requester that would bypass its limits, log or clock."""


def main(channel: Any, root: str, task_id: str, options: Mapping[str, Any]) -> None:
    """Serve ``channel`` until the other end closes it."""
    package.use_root(Path(root))
    os.environ["HOME"] = root
    world: Any = None
    while True:
        try:
            message = channel.recv()
        except EOFError:
            return
        try:
            if message["ask"] == "start":
                world = _make(task_id, options)
            answer = _answer(world, message)
        except Exception as e:  # the parent logs the failure; this process has no log
            answer = {"failed": told(e)}
        channel.send(answer)


def _answer(world: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    asked = message["ask"]
    if asked == "call":
        return _call(world, message)
    if asked == "start":
        return _facts(world)
    if asked == "end":
        # the location that an evaluation of the experiment reads; the package writes it after every execution
        outputs = Path(world.output_directory).parents[2]
        world._save_state(str(outputs / message["experiment"] / "tasks" / world.task_id / "dbs"))
        return {"completed": bool(world.task_completed())}
    raise ValueError(f"unknown message: {asked!r}")


def unfit(arguments: Mapping[str, Any]) -> str | None:
    """Return why a call's arguments cannot be passed on, or None.

    NaN and infinities are not valid JSON. The package accepts them and fails later, too late for an error message.
    """
    try:
        length = len(json.dumps(arguments, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as e:
        return f"its arguments are not JSON: {e}"
    if length > _LONGEST_ARGUMENTS:
        return f"its arguments are too large: {length} characters, and {_LONGEST_ARGUMENTS} are allowed"
    return None


def told(error: Exception) -> str:
    """Return an error and its last three source locations on one line, for another process."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = ", ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__}: {error} ({places})"


def _make(task_id: str, options: Mapping[str, Any]) -> Any:
    from appworld import AppWorld
    from appworld.apps import get_all_apps
    from appworld.common.utils import import_apis_module
    from fastapi_login.secrets import to_secret

    # The package contains the secret that signs the apps' access tokens. Use a random secret instead.
    for name in get_all_apps():
        manager = getattr(import_apis_module(name), "logging_manager", None)
        if manager is not None:
            manager.secret = to_secret({"algorithms": manager.algorithm, "secret": secrets.token_bytes(32)})
    return AppWorld(
        task_id=task_id,
        experiment_name=EXPERIMENT,
        load_ground_truth=False,
        random_seed=options["seed"],
        max_api_calls_per_interaction=options["max_api_calls"],
    )


def _facts(world: Any) -> dict[str, Any]:
    task = world.task
    return {
        "instruction": task.instruction,
        "supervisor": dict(task.supervisor),
        "datetime": task.datetime.isoformat(),
        "apis": {app: sorted(world.apis[app].keys()) for app in world.apis.keys()},  # noqa: SIM118  (iteration hides some)
    }


def _call(world: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """Call a public API and return its value or an error message."""
    from fastapi.encoders import jsonable_encoder

    app, api, arguments = message["app"], message["api"], message["arguments"]
    if message.get("first"):
        world.requester.reset_requests()  # the limit applies per step, and the log is not used
    why = unfit(arguments)
    if why is not None:
        return {"error": f"apis.{app}.{api} was not called: {why}."}
    refused = sorted(_NOT_FOR_AGENTS & set(arguments))
    if refused:
        return {"error": f"apis.{app}.{api} has no parameter {refused[0]!r}."}
    if app not in world.apis.keys() or api not in world.apis[app].keys():  # noqa: SIM118
        return {"error": f"There is no API {api!r} in an app {app!r}."}
    try:
        value = jsonable_encoder(world.apis[app][api](**arguments))
        if len(json.dumps(value)) > _LONGEST_ANSWER:
            return {"error": f"apis.{app}.{api} was called, and what it returned is too large to be passed on."}
        return {"value": value}
    except Exception as e:
        return {"error": (str(e) or type(e).__name__)[:_LONGEST_ANSWER]}
