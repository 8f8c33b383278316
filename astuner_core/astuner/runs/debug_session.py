"""``--db TAG|TAG`` in the run's own process: what the run is told, and what it hears from its workers.

A person at a breakpoint takes longer than anything may take, and wants to see one episode.  So the time limits of
episodes, judges and environments are a day, and one episode runs at a time, unless the command line says otherwise.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import ConfigError
from astuner.runs import debugger
from astuner.runs.breakpoints import RUN_VARIABLE, TAGS_VARIABLE
from astuner.runs.debugger import NAMESPACE, Stop

if TYPE_CHECKING:
    from astuner.contracts.backbone import Backbone

DAY = 86400.0
"""Seconds that a person may sit at a breakpoint."""
OVERRIDES = (
    f"astuner.rollout.episode_timeout={DAY:g}",
    f"astuner.task_judge.judge_timeout={DAY:g}",
    f"astuner.env_service.timeout={DAY:g}",
    "astuner.rollout.max_env_worker=1",
)
"""What ``--db`` puts before the overrides of the command line, which win."""
_TAG = re.compile(r"[\w.-]+")
_LOOK = 0.5
"""Seconds between looks at what workers say."""

_current: DebugSession | None = None


class DebugSession:
    """The breakpoints of one run; without tags it does nothing."""

    def __init__(self, tags: Sequence[str] = (), *, listen: bool = False) -> None:
        """:param tags: each one tag, or several as ``A|B`` or ``A,B``.
        :param listen: wait for a debugger though there is a terminal.
        :raises ConfigError: that is no tag.
        """
        self.tags = tuple(dict.fromkeys(tag.strip() for text in tags for tag in re.split(r"[|,]", text)))
        if wrong := next((tag for tag in self.tags if not _TAG.fullmatch(tag)), None):
            raise ConfigError(f"{wrong!r} is no tag: tags are letters, digits and _ . -, and between two of them is |")
        if "" in self.tags:
            raise ConfigError("--db has an empty tag; write --db 'TAG1|TAG2', as in bp(\"TAG1\")")
        if listen and not self.tags:
            raise ConfigError("--db-listen says how breakpoints stop, and there are none: write --db TAG too")
        self.note: Callable[[str], None] = _to_stderr
        """Tells the person something; the run puts its own here when it can."""
        self._listen = listen
        self._run, self._pid = uuid.uuid4().hex, os.getpid()
        self._reached: set[str] = set()

    @property
    def overrides(self) -> tuple[str, ...]:
        """For `load_config`, before those of the person."""
        return OVERRIDES if self.tags else ()

    def check(self, backbone: Backbone) -> str:
        """What a person should know of it.

        :raises MissingDependency: debugpy will be needed, and is not installed.
        :raises ConfigError: no episode runs for this command.
        """
        if not self.tags:
            return ""
        if backbone.lends:
            raise ConfigError("--db is for the command that has the run; this one lends a part to it: leave it out")
        if self._listen or not backbone.capabilities.in_process or not debugger.on_terminal():
            debugger.require_debugpy()
        return (
            f"breakpoints: {', '.join(self.tags)}; time limits are a day, and one episode runs at a time, unless the "
            "command line says otherwise (astuner.rollout.max_env_worker=N)"
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """In this block `bp` stops, here and in workers that Ray starts."""
        global _current
        if not self.tags:
            yield
            return
        ours = {TAGS_VARIABLE: "|".join(self.tags), RUN_VARIABLE: self._run}
        before = {name: os.environ.get(name) for name in ours}
        os.environ.update(ours)
        _current, debugger.tell, debugger.listen_always = self, self.hear, self._listen
        try:
            yield
        finally:
            _current, debugger.tell, debugger.listen_always = None, None, False
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def hear(self, stop: Stop) -> None:
        """Somebody has come to a breakpoint."""
        self._reached.add(stop.tag)
        (self.note if os.getpid() == self._pid else _to_stderr)(str(stop))  # a fork has no say in the run's books

    def end(self) -> None:
        """Say which tags nobody came to; the run is over."""
        if missed := [tag for tag in self.tags if tag not in self._reached]:
            calls = ", ".join(f'bp("{tag}")' for tag in missed)
            self.note(f"breakpoints that nothing came to: {calls}; is it spelt so, and on a path that was taken?")


def switches() -> dict[str, str]:
    """The variables that a Ray worker starts with; none without ``--db``."""
    return {name: os.environ[name] for name in (TAGS_VARIABLE, RUN_VARIABLE) if name in os.environ}


@contextmanager
def hearing_workers() -> Iterator[None]:
    """While this process is connected to Ray: hear which workers have come to a breakpoint."""
    session = _current
    if session is None:
        yield
        return
    over = threading.Event()
    ears = threading.Thread(target=_hear, args=(session, over), name="astuner breakpoints", daemon=True)
    ears.start()
    try:
        yield
    finally:
        over.set()
        ears.join()


def _hear(session: DebugSession, over: threading.Event) -> None:
    from ray.exceptions import RayError
    from ray.experimental import internal_kv

    while True:
        ended = over.wait(_LOOK)
        try:
            for key in internal_kv._internal_kv_list(session._run, namespace=NAMESPACE):
                session.hear(Stop(**_taken(internal_kv, key)))
        except RayError as e:  # the cluster is gone, which ends the run by itself
            session.note(f"breakpoints in workers are no longer heard of: {type(e).__name__}: {e}")
            return
        if ended:
            return


def _taken(store: Any, key: bytes) -> dict[str, Any]:
    """What a worker left, which is then gone."""
    said: dict[str, Any] = json.loads(store._internal_kv_get(key, namespace=NAMESPACE))
    store._internal_kv_del(key, namespace=NAMESPACE)
    return said


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
