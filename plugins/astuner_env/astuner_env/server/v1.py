"""The typed routes: they answer with the fields of `StepResult` and `Evaluation`; an unknown instance is a 404."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from aiohttp import web

from astuner_env.manager.manager import Manager
from astuner_env.manager.served import ServedEnvironment
from astuner_env.server import body as fields
from astuner_env.server.answers import is_waiting, json

_LARGEST_PAGE = 1000


@dataclass(frozen=True)
class V1:
    """The handlers.

    :param capacity: how the number of instances came about.
    """

    manager: Manager
    capacity: str

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/info", self.info),
            web.get("/v1/environments", self.environments),
            web.get("/v1/environments/{environment}", self.environment),
            web.get("/v1/environments/{environment}/tasks", self.tasks),
            web.post("/v1/instances", self.create),
            web.get("/v1/instances/{instance}", self.instance),
            web.post("/v1/instances/{instance}/step", self.step),
            web.post("/v1/instances/{instance}/evaluate", self.evaluate),
            web.get("/v1/instances/{instance}/info", self.describe),
            web.delete("/v1/instances/{instance}", self.release),
        ]

    async def info(self, request: web.Request) -> web.Response:
        room = self.manager.room()
        return json(
            {
                "service": "astuner-env",
                "version": version("astuner-env"),
                "environments": sorted(self.manager.environments),
                "active": room.active,
                "max_instances": room.size,
                "capacity": self.capacity,
                "waiting": room.waiting,
                "idle_ttl": self.manager.idle_ttl,
            }
        )

    async def environments(self, request: web.Request) -> web.Response:
        return json({"environments": [_shown(e) for e in self.manager.environments.values()]})

    async def environment(self, request: web.Request) -> web.Response:
        return json(_shown(self.manager.environment(request.match_info["environment"])))

    async def tasks(self, request: web.Request) -> web.Response:
        environment = self.manager.environment(request.match_info["environment"])
        offset = fields.number(request.query, "offset", 0, 10**8)
        limit = fields.number(request.query, "limit", 100, _LARGEST_PAGE)
        split = request.query.get("split", "train")
        page = await self.manager.tasks(environment, split, {}, offset=offset, limit=limit)
        return json({**page, "split": split, "offset": offset, "limit": limit})

    async def create(self, request: web.Request) -> web.Response:
        body = await fields.read(request)
        environment = self.manager.environment(fields.text(body, "environment"))
        task = fields.task_of(fields.mapping(body, "task"), fields.task_id(body))
        wanted_id = fields.instance_id(body.get("instance_id"), required=False)
        params = fields.mapping(body, "params")
        instance, first = await self.manager.create(
            environment, task, params, wanted_id, is_wanted=lambda: is_waiting(request)
        )
        own = {"instance_id": instance.id, "environment": environment.name, "task_id": instance.task_id}
        return json({**own, **first}, status=201)

    async def instance(self, request: web.Request) -> web.Response:
        return json(self.manager.status(_id(request)))

    async def step(self, request: web.Request) -> web.Response:
        body = await fields.read(request)
        action = {"role": "assistant", "content": "", **fields.mapping(body, "action")}
        return json(await self.manager.step(_id(request), action, fields.request_id(body)))

    async def evaluate(self, request: web.Request) -> web.Response:
        await fields.read(request, may_be_empty=True)
        return json(await self.manager.evaluate(_id(request)))

    async def describe(self, request: web.Request) -> web.Response:
        return json(await self.manager.describe(_id(request)))

    async def release(self, request: web.Request) -> web.Response:
        if not await self.manager.release(_id(request)):
            self.manager.instance(_id(request))  # says why there is none
        return json({"released": True})


def _id(request: web.Request) -> str:
    return fields.known_instance(request.match_info["instance"])


def _shown(environment: ServedEnvironment) -> dict[str, Any]:
    return {
        "name": environment.name,
        "summary": environment.summary,
        "splits": list(environment.splits),
        "create_timeout": environment.create_timeout,
        "step_timeout": environment.step_timeout,
        "evaluate_timeout": environment.evaluate_timeout,
        "memory_mb": environment.memory_mb,
    }
