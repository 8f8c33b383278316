"""The log sink `studio`: a few of a run's conversations, as AgentScope Studio shows them.

Studio's own client (`agentscope.init(studio_url=…)`) sends every printed message from within the agents' event loop and
waits for the answer.  This one sends finished episodes, from the sink's thread, in the same protocol.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.log_sink import LogSink
from astuner.contracts.types import Episode, Split
from astuner.support.http_client import HttpError, JsonClient
from astuner_trackers.studio_messages import StudioMessage, studio_messages
from astuner_trackers.telemetry import run_ids
from astuner_trackers.telemetry.settings import Telemetry

TIMEOUT = 10.0
"""Seconds for one request."""
LONGEST = 45.0
"""Seconds for one episode; what is left of it then is not sent."""
PAUSE = 60.0
"""Seconds without requests after one that failed."""
_NAME = 80


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
        messages = studio_messages(run, episode)
        try:
            self._client.post("/trpc/registerRun", self._registration(run, step, episode, started))
            clock = 0.0
            for number, message in enumerate(messages):
                if time.monotonic() > deadline:
                    raise HttpError(f"{self._client.base_url} took {LONGEST:g} s for {number} messages", again=True)
                clock = max(clock + 0.001, started if message.time is None else message.time)  # Studio sorts by it
                self._client.post("/trpc/pushMessage", _push(run, message, clock))
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


def _push(run: str, message: StudioMessage, clock: float) -> dict[str, Any]:
    return {
        "runId": run,
        "replyId": message.reply_id,
        "replyName": message.reply_name,
        "replyRole": message.reply_role,
        "name": message.reply_name,  # their older names; the columns for them take no NULL
        "role": message.reply_role,
        "msg": {
            "id": message.id,
            "name": message.name,
            "role": message.role,
            "content": list(message.blocks),
            "metadata": dict(message.metadata),
            "timestamp": timestamp(clock),
        },
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
