"""The log sink `studio`: a few of a run's conversations, as AgentScope Studio shows them.

Studio's own client (`agentscope.init(studio_url=…)`) sends every printed message from within the agents' event loop and
waits for the answer.  This one sends finished episodes, from the sink's thread, in the same protocol.

A reply is what AgentScope's agents make of one message to them: thoughts, tool calls, results and the answer.  A
message that is no agent's is a reply of its own.

An episode is a Studio run: Studio calls a run something "similar to sessions" and shows it as one chat, in which
episodes of a step, or of a whole training, would be mixed.  All runs of an experiment are in one Studio project.

What is sent was held against Studio's schemas, in `packages/server/src/trpc/router.ts` of
agentscope-ai/agentscope-studio at 06e5f1f (`replyName` and `replyRole`, with `name` and `role` as their older names)
and of its fork lbxcfx/agentscope-studio at 6d337a7 (October 2025: none of the four).  Studio drops what its schema does
not have, so all get all four.  A state between, 1f1ca5e, wants `registerReply` first, and is not served.
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
"""Seconds for one request."""
LONGEST = 45.0
"""Seconds for one episode; what is left of it then is not sent."""
PAUSE = 60.0
"""Seconds without requests after one that failed."""
_NAME = 80
Push = dict[str, Any]
"""What ``pushMessage`` takes: a message, and the reply that it belongs to."""


class StudioSink(LogSink):
    """Sends first attempts at the first tasks of a step to end."""

    def open(self, run_dir: Path, run_name: str, settings: Mapping[str, Any]) -> None:
        telemetry = Telemetry.model_validate(settings["astuner"]["telemetry"])
        url = telemetry.studio_url
        self._most = telemetry.studio_episodes
        self._client = JsonClient(url, timeout=TIMEOUT)
        self._project = f"{settings['astuner']['project_name']} - {run_name}"
        self._run_dir, self._ids = run_dir, run_ids.begin(run_dir)
        self._chosen: Counter[tuple[int, Split]] = Counter()
        self._again = 0.0
        """When to try again after a failure, by `time.monotonic`."""
        self._reported = False
        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "http" and not _is_here(parts.hostname or ""):
            self.remark(f"conversations go to {url} unencrypted; write https:// where Studio is behind TLS")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        return None  # Studio shows no numbers

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
                clock = max(clock + 0.001, started if when is None else when)  # Studio sorts by it
                push["msg"]["timestamp"] = timestamp(clock)
                self._client.post("/trpc/pushMessage", push)
        except HttpError as e:
            self._again = time.monotonic() + PAUSE
            if not self._reported:
                self._reported = True
                self.remark(
                    f"AgentScope Studio did not take an episode: {e}; the run goes on, and tries again with episodes "
                    f"that end more than {PAUSE:g} s later"
                )

    def _registration(self, run: str, step: int, episode: Episode, started: float) -> dict[str, Any]:
        """Of a run that is over: Studio learns from a socket, which we do not open, when one ends."""
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
    """The conversations of all agents, in the order of their replies, and at the end the verdict.

    :param run: begins all ids, which Studio wants to be unique.
    """

    def __init__(self, run: str, episode: Episode) -> None:
        self._run, self._episode = run, episode
        self._count = 0
        self._tools: dict[str, str] = {}
        """Call -> tool."""
        self._replies: dict[str, str] = {}
        """Agent -> the reply that it is at."""
        self._seen: dict[str, set[Any]] = {}
        """Agent -> its messages that were shown: a branch repeats its history."""

    def messages(self) -> Iterator[tuple[float | None, Push]]:
        """Each with its time (seconds since 1970), None where nobody wrote it down."""
        everybody: list[Turn | ExternalTurn] = [*self._episode.turns, *self._episode.external]
        for turn in sorted(everybody, key=lambda turn: turn.index):
            if isinstance(turn, Turn) and turn.branch_reason:
                yield self._alone("astuner", "system", f"{turn.agent} starts anew: {turn.branch_reason}", turn.started)
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
        """A message that an agent was sent."""
        role, text = str(message.get("role") or "user"), shown(message.get("content"))
        if role == "tool":
            call = str(message.get("tool_call_id"))
            name = self._tools.get(call) or str(message.get("name") or "tool")
            result = {"type": "tool_result", "id": call, "name": name, "output": short(text)}
            return self._push(turn.agent, "system", "system", [result], turn.started)
        if role == "assistant":
            return self._push(turn.agent, turn.agent, "assistant", self._blocks(message), turn.started)
        self._replies.pop(turn.agent, None)  # what it says next is another reply
        role = "user" if role == "user" else "system"
        return self._alone(str(message.get("name") or role), role, text, turn.started)

    def _said(self, turn: Turn | ExternalTurn) -> tuple[float | None, Push]:
        """What an agent answered."""
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
            given = given if isinstance(given, dict) else {"arguments": given}  # Studio wants an object
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
        """
        :param agent: whose reply the message is a part of; empty for a reply of its own.
        :param name: of who speaks, as ``role``.
        """
        self._count += 1
        number = f"{self._run}-{self._count:04d}"
        reply = f"{number}-reply"
        of_reply = {"name": name, "role": role}  # older names; the columns for them take no NULL
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
    """Whether a URL's host is this machine, so that nobody on the way reads along; a name but localhost may be any."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def timestamp(seconds: float) -> str:
    """As AgentScope writes it: local time with milliseconds."""
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
