"""Run servers in separate processes that answer requests on standard input: one JSON line each way.

Only the standard library is used, because a side may run in an environment without ASTuner.  Everything else that a
side writes to standard output goes to its log, and the log is part of the error message if the side fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Commands = Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Any]]]
REPOSITORY = Path(__file__).resolve().parent.parent
_LOG_SHOWN = 3000
"""Characters of the log's end in an error message."""


class Side:
    """Client of a server in a separate process.

    :param python: Interpreter of its environment.
    :raises RuntimeError: It did not start; the message ends with its log.
    """

    def __init__(self, python: Path | str, module: str, *arguments: str, **environment: str) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process; see close)
        self._process = subprocess.Popen(
            [str(python), "-m", module, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        try:
            self.started: Any = self._answer()
            """Value that the side reported when it was ready."""
        except BaseException:
            self.close()
            raise

    def ask(self, command: str, **options: Any) -> Any:
        """Send a request to the side and return its answer.

        :raises RuntimeError: The side failed; the message ends with its log.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"command": command, **options}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def cpu(self) -> float:
        """Return the CPU seconds of all its threads."""
        seconds: float = self.ask("cpu")
        return seconds

    def close(self) -> None:
        """Close the side's input, which ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            log = self._log.read().decode(errors="replace")
            raise RuntimeError(f"a side ended with {self._process.returncode}; its log:\n{log[-_LOG_SHOWN:]}")
        return json.loads(line)


async def obey(ready: Any, commands: Commands) -> None:
    """Write ``ready``, then answer requests until the input ends.

    Every side supports ``cpu``, and ``settle``, which waits for background work after an answer.
    """
    out = _answers()
    _say(out, ready)
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if asked["command"] == "cpu":
            _say(out, time.process_time())
        elif asked["command"] == "settle" and "settle" not in commands:
            _say(out, None)
        else:
            _say(out, await commands[asked["command"]](asked))


def quiet() -> None:
    """Redirect printed text to the log. Call it before imports that print."""
    _answers()


_descriptor: list[int] = []


def _answers() -> int:
    """Return the original standard output, which nothing else writes to after this call."""
    if not _descriptor:
        _descriptor.append(os.dup(1))
        os.dup2(2, 1)
    return _descriptor[0]


def _say(out: int, answer: Any) -> None:
    left: Sequence[int] | bytes | memoryview = memoryview((json.dumps(answer) + "\n").encode())
    while left:
        left = left[os.write(out, left) :]  # type: ignore[arg-type]
