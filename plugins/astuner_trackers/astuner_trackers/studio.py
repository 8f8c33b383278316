"""Log sink `studio`: show some of a run's conversations in AgentScope Studio.

Studio's own client (`agentscope.init(studio_url=…)`) sends every printed message from the agents' event loop, and waits
for the response. This sink sends finished episodes from its own thread, with the same protocol.

A reply is an agent's output for one incoming message: reasoning, tool calls, tool results and the answer. A message
that no agent wrote is its own reply.

An episode is a Studio run. Studio describes a run as "similar to sessions" and shows it as one chat, so a shared run
would mix episodes. All runs of an experiment belong to one Studio project.

The messages match Studio's schemas (`packages/server/src/trpc/router.ts` of agentscope-ai/agentscope-studio at 06e5f1f:
`replyName` and `replyRole`, formerly `name` and `role`) and of the fork lbxcfx/agentscope-studio at 6d337a7 (none of
these). Studio ignores unknown fields, so every message contains all four. The intermediate version 1f1ca5e requires
`registerReply` and is not supported.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from astuner.contracts.log_sink import LogSink
from astuner.contracts.messages import call_id, call_parts, full_key, mapping_of, reasoning_of
from astuner.contracts.types import Episode, ExternalTurn, Split, Turn
from astuner_http.client import HttpError, JsonClient
from astuner_trackers.telemetry import run_ids
from astuner_trackers.telemetry.messages import arguments_of, short, shown
from astuner_trackers.telemetry.settings import Telemetry

TIMEOUT = 10.0
"""Timeout of a request in seconds."""
LONGEST = 45.0
"""Maximum seconds per episode. The rest of the episode is then not sent."""
PAUSE = 60.0
"""Seconds without requests after a failure."""
_NAME = 80
Push = dict[str, Any]
"""Argument of ``pushMessage``: a message, and the reply it belongs to."""


class StudioSink(LogSink):
    """Sends first attempts at the first tasks of a step that end."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        telemetry = Telemetry.model_validate(settings["astuner"]["telemetry"])
        url = telemetry.studio_url
        self._most = telemetry.studio_episodes
        self._client = JsonClient(url, timeout=TIMEOUT)
        self._project = f"{settings['astuner']['project_name']} - {run_name}"
        self._run_dir, self._ids = run_dir, run_ids.begin(run_dir)
        self._chosen: Counter[tuple[int, Split]] = Counter()
        self._again = 0.0
        """Time of the next try after a failure, by `time.monotonic`."""
        self._reported = False
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "http" and not _is_here(parts.hostname or ""):
            self.remark(f"Conversations are sent to {url} unencrypted. Use https:// if Studio supports TLS.")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        return None  # Studio does not display metrics

    def episode(self, step: int, episode: Episode) -> None:
        of = episode.workflow_task
        if of.attempt or not (episode.turns or episode.external) or time.monotonic() < self._again:
            return
        if self._chosen[step, of.split] < self._most:
            self._chosen[step, of.split] += 1
            self._send(step, episode)

    def close(self) -> None:
        self._client.close()
        run_ids.end(self._run_dir)

    def _send(self, step: int, episode: Episode) -> None:
        run, deadline = self._ids.conversation(episode.workflow_task.episode_id), time.monotonic() + LONGEST
        started = episode.started if episode.started is not None else time.time() - episode.seconds
        messages = list(_Conversation(run, episode).messages())
        try:
            self._client.post("/trpc/registerRun", self._registration(run, step, episode, started))
            clock = 0.0
            for number, (when, push) in enumerate(messages):
                if time.monotonic() > deadline:
                    raise HttpError(f"{self._client.base_url} took {LONGEST:g} s for {number} messages", again=True)
                clock = max(clock + 0.001, started if when is None else when)  # Studio sorts by this time
                push["msg"]["timestamp"] = timestamp(clock)
                self._client.post("/trpc/pushMessage", push)
        except HttpError as e:
            self._again = time.monotonic() + PAUSE
            if not self._reported:
                self._reported = True
                self.remark(
                    f"AgentScope Studio did not accept an episode: {e}. The run continues, and sends episodes again "
                    f"that end more than {PAUSE:g} s later."
                )

    def _registration(self, run: str, step: int, episode: Episode, started: float) -> dict[str, Any]:
        """Return the data of a finished run. Studio tracks active runs with a socket, which this sink does not open."""
        of = episode.workflow_task
        reward = episode.stop_reason.value if episode.reward is None else f"reward {episode.reward:g}"
        kind = "step" if of.split is Split.TRAIN else "validation"
        return {
            "id": run,
            "project": self._project,
            "name": f"{kind} {step}, {reward}, {of.task.task_id}"[:_NAME],
            "timestamp": timestamp(started),
            "pid": os.getpid(),
            "status": "done",
            "run_dir": "",
        }


class _Conversation:
    """Messages of all agents, in the order of their replies, followed by the verdict.

    :param run: Prefix of all IDs, which must be unique in Studio.
    """

    def __init__(self, run: str, episode: Episode) -> None:
        self._run, self._episode = run, episode
        self._count = 0
        self._tools: dict[str, str] = {}
        """Call ID -> tool."""
        self._replies: dict[str, str] = {}
        """Agent -> its current reply."""
        self._seen: dict[str, set[Any]] = {}
        """Agent -> messages already shown, because a branch repeats its history."""

    def messages(self) -> Iterator[tuple[float | None, Push]]:
        """Yield messages with their time (seconds since 1970), or None if it is unknown."""
        everybody: list[Turn | ExternalTurn] = [*self._episode.turns, *self._episode.external]
        for turn in sorted(everybody, key=lambda turn: turn.index):
            if isinstance(turn, Turn) and turn.branch_reason:
                yield self._alone("astuner", "system", f"{turn.agent} branches: {turn.branch_reason}", turn.started)
            seen = self._seen.setdefault(turn.agent, set())
            for message in map(mapping_of, turn.request):
                if (key := full_key(message)) not in seen:
                    seen.add(key)
                    yield self._asked(turn, message)
            seen.add(full_key({"role": "assistant", **turn.message}))
            yield self._said(turn)
        episode = self._episode
        ended = None if episode.started is None else episode.started + episode.seconds
        yield self._alone("astuner", "system", _verdict(episode), ended, _facts(episode))

    def _asked(self, turn: Turn | ExternalTurn, message: Mapping[str, Any]) -> tuple[float | None, Push]:
        """Return a message that an agent received."""
        role, text = str(message.get("role") or "user"), shown(message.get("content"))
        if role == "tool":
            call = str(message.get("tool_call_id"))
            name = self._tools.get(call) or str(message.get("name") or "tool")
            result = {"type": "tool_result", "id": call, "name": name, "output": short(text)}
            return self._push(turn.agent, "system", "system", [result], turn.started)
        if role == "assistant":
            return self._push(turn.agent, turn.agent, "assistant", self._blocks(message), turn.started)
        self._replies.pop(turn.agent, None)  # the agent's next message starts another reply
        role = "user" if role == "user" else "system"
        return self._alone(str(message.get("name") or role), role, text, turn.started)

    def _said(self, turn: Turn | ExternalTurn) -> tuple[float | None, Push]:
        """Return an agent's answer."""
        facts: dict[str, Any] = {"turn": turn.index}
        if isinstance(turn, Turn):
            facts |= {
                "tokens": len(turn.generation.response_ids),
                "finish_reason": turn.generation.finish_reason.value,
                "policy_version": turn.generation.policy_version,
                "trained": turn.trained,
            }
        else:
            facts["model"] = turn.model
        when = None if turn.started is None else turn.started + (turn.seconds or 0.0)
        return self._push(turn.agent, turn.agent, "assistant", self._blocks(turn.message), when, facts)

    def _blocks(self, message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        blocks: list[Mapping[str, Any]] = []
        if thought := reasoning_of(message):
            blocks.append({"type": "thinking", "thinking": short(thought)})
        if text := shown(message.get("content")):
            blocks.append({"type": "text", "text": short(text)})
        for call in message.get("tool_calls") or ():
            name, arguments = call_parts(call)
            self._tools[str(call_id(call))] = name
            given = arguments_of(arguments)
            given = given if isinstance(given, dict) else {"arguments": given}  # Studio requires an object
            blocks.append({"type": "tool_use", "id": str(call_id(call)), "name": name, "input": given})
        return blocks

    def _push(
        self,
        agent: str,
        name: str,
        role: str,
        blocks: Sequence[Mapping[str, Any]],
        when: float | None,
        metadata: Mapping[str, Any] | None = None,
    ) -> tuple[float | None, Push]:
        """Return a message for ``pushMessage``.

        :param agent: Agent whose reply contains the message; empty for a separate reply.
        :param name: Name of the speaker, as ``role``.
        """
        self._count += 1
        number = f"{self._run}-{self._count:04d}"
        reply = f"{number}-reply"
        of_reply = {"name": name, "role": role}  # older field names; their columns must not be NULL
        if agent:
            reply, of_reply = self._replies.setdefault(agent, reply), {"name": agent, "role": "assistant"}
        return when, {
            "runId": self._run,
            "replyId": reply,
            "replyName": of_reply["name"],
            "replyRole": of_reply["role"],
            **of_reply,
            "msg": {
                "id": number,
                "name": name,
                "role": role,
                "content": list(blocks),
                "metadata": dict(metadata or {}),
            },
        }

    def _alone(
        self, name: str, role: str, text: str, when: float | None, metadata: Mapping[str, Any] | None = None
    ) -> tuple[float | None, Push]:
        return self._push("", name, role, [{"type": "text", "text": short(text)}], when, metadata)


def _verdict(episode: Episode) -> str:
    text = episode.stop_reason.value
    if episode.reward is not None:
        text += f", reward {episode.reward:g} ({episode.reward_source})"
    return f"{text}: {episode.error}" if episode.error else text


def _facts(episode: Episode) -> dict[str, Any]:
    of = episode.workflow_task
    return {
        "stop_reason": episode.stop_reason.value,
        "reward": episode.reward,
        "is_success": episode.is_success,
        "task_id": of.task.task_id,
        "group_id": of.group_id,
        "episode_id": of.episode_id,
    }


def _is_here(host: str) -> bool:
    """Return whether a URL's host is this machine. Names other than localhost could resolve to any address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def timestamp(seconds: float) -> str:
    """Format a time as AgentScope does: local time with milliseconds."""
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
