"""The process that holds a world: the real `AppWorld`, its databases and its apps. No model-written code runs in it.

It answers one message at a time: start, call one API, end the step.  Invariant: the outside can do to the world what
the public APIs do, with JSON for arguments, and nothing else.  The state of every step is written to a folder of its
own, so that one that fails half-way leaves the state before it as it was.
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
"""Characters of one call's arguments, as JSON. What a call carries is held several times on its way to a database."""
_LONGEST_ANSWER = 4 << 20
"""Characters of what one call returns, as JSON; the shell's wire carries no more than twice that."""
_NOT_FOR_AGENTS = frozenset(("client", "track", "show", "_app_name", "_api_name", "_system_datetime"))
"""Parameters of the package's requester that would get around its limits, its log or its clock."""


def main(channel: Any, root: str, task_id: str, options: Mapping[str, Any]) -> None:
    """Serve ``channel`` until its other end is gone."""
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
        except Exception as e:  # the referee says so in the service's log; this process has no log of its own
            answer = {"failed": told(e)}
        channel.send(answer)


def _answer(world: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    asked = message["ask"]
    if asked == "call":
        return _call(world, message)
    if asked == "start":
        return _facts(world)
    if asked == "end":
        # the state, where an evaluation of the experiment reads it, as the package writes it after every execution
        outputs = Path(world.output_directory).parents[2]
        world._save_state(str(outputs / message["experiment"] / "tasks" / world.task_id / "dbs"))
        return {"completed": bool(world.task_completed())}
    raise ValueError(f"no such message: {asked!r}")


def unfit(arguments: Mapping[str, Any]) -> str | None:
    """Why a call's arguments cannot be passed on, or None.

    NaN and the infinities are no JSON: the package takes them, and fails later, when nobody can be told any more.
    """
    try:
        length = len(json.dumps(arguments, allow_nan=False))
    except (ValueError, TypeError, RecursionError) as e:
        return f"its arguments are not JSON: {e}"
    if length > _LONGEST_ARGUMENTS:
        return f"its arguments are too large: {length} characters, and {_LONGEST_ARGUMENTS} are allowed"
    return None


def told(error: Exception) -> str:
    """An error and the places it came through, on one line, for another process to repeat."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = ", ".join(f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
    return f"{type(error).__name__}: {error} ({places})"


def _make(task_id: str, options: Mapping[str, Any]) -> Any:
    from appworld import AppWorld
    from appworld.apps import get_all_apps
    from appworld.common.utils import import_apis_module
    from fastapi_login.secrets import to_secret

    # The apps sign their access tokens with a word that everybody can read in the package; not in this world.
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
        "apis": {app: sorted(world.apis[app].keys()) for app in world.apis.keys()},  # noqa: SIM118  (it hides some)
    }


def _call(world: Any, message: Mapping[str, Any]) -> dict[str, Any]:
    """One public API: its value, or what went wrong as text."""
    from fastapi.encoders import jsonable_encoder

    app, api, arguments = message["app"], message["api"], message["arguments"]
    if message.get("first"):
        world.requester.reset_requests()  # the count is of one step, and nobody reads the log
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
