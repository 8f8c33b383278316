"""The routes that existing clients of the older environment services speak, unchanged, with a few additions.

All share one body: ``env_type``, ``task_id``, ``instance_id``, ``messages`` (on ``/step`` the action) and ``params``.
Added: ``params.request_id`` makes a step happen at most once; ``params.task`` brings a task's text along; a create with
the id of a living instance replaces it; ``params.details`` asks ``/evaluate`` for everything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from astuner_env.manager.manager import Manager
from astuner_env.manager.refusal import Refusal
from astuner_env.server import body as fields
from astuner_env.server.answers import is_waiting, success

Handler = Callable[[web.Request], Awaitable[web.Response]]


class Compat:
    """The handlers."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    def routes(self) -> list[web.RouteDef]:
        handlers = (self.get_env_profile, self.create, self.step, self.evaluate, self.get_info, self.release)
        return [web.post(f"/{handler.__name__}", _older(handler)) for handler in handlers]

    async def get_env_profile(self, request: web.Request) -> web.Response:
        body = await fields.read(request)
        environment = self._manager.environment(fields.text(body, "env_type"))
        params = fields.mapping(body, "params")
        split = fields.text(params, "split", "train")
        others = {key: value for key, value in params.items() if key != "split"}
        return success((await self._manager.tasks(environment, split, others))["tasks"])

    async def create(self, request: web.Request) -> web.Response:
        body = await fields.read(request)
        params = fields.mapping(body, "params")
        environment = self._manager.environment(fields.text(body, "env_type"))
        task = fields.task_of(fields.mapping(params, "task"), fields.task_id(body))
        wanted_id = fields.instance_id(body.get("instance_id"), required=False)
        others = {key: value for key, value in params.items() if key != "task"}
        instance, first = await self._manager.create(
            environment, task, others, wanted_id, is_wanted=lambda: is_waiting(request)
        )
        own = {"instance_id": instance.id, "task_id": instance.task_id, "at_most_once": True}
        return success(
            {
                "state": first["messages"],
                "observation": first["observation"],
                "info": {**first["info"], **own},
                "reward": first["reward"],
                "is_terminated": first["terminated"] or first["truncated"],
            }
        )

    async def step(self, request: web.Request) -> web.Response:
        body, instance_id = await self._asked(request)
        action = {"role": "assistant", "content": "", **fields.mapping(body, "messages")}
        request_id = fields.request_id(fields.mapping(body, "params"))
        result = await self._manager.step(instance_id, action, request_id)
        flags = {key: result[key] for key in ("terminated", "truncated")}
        return success(
            {
                "state": [{"tool_calls": [], **message} for message in result["messages"]],
                "observation": result["observation"],
                "reward": result["reward"],
                "is_terminated": any(flags.values()),
                "info": {**result["info"], **flags},
            }
        )

    async def evaluate(self, request: web.Request) -> web.Response:
        body, instance_id = await self._asked(request)
        params = fields.mapping(body, "params")
        result = await self._manager.evaluate(instance_id)
        if params.get("details"):
            return success(result)
        return success(float(result["success"]) if params.get("sparse") else result["score"])

    async def get_info(self, request: web.Request) -> web.Response:
        _, instance_id = await self._asked(request)
        return success(await self._manager.describe(instance_id))

    async def release(self, request: web.Request) -> web.Response:
        body = await fields.read(request)
        released = await self._manager.release(fields.known_instance(body.get("instance_id")))
        return success(None, ok=released)

    async def _asked(self, request: web.Request) -> tuple[dict[str, Any], str]:
        body = await fields.read(request)
        return body, fields.known_instance(body.get("instance_id"))


def _older(handler: Handler) -> Handler:
    """On these routes an unknown instance has always been a 400."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await handler(request)
        except Refusal as e:
            if e.code == "unknown_instance":
                e.status = 400
            raise

    return answer
