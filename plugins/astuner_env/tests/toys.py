"""Environments for the tests of the service, served as ``toys.py->Counter``; standard library only.

The answer of every world can be computed from its actions, so that a test knows an invented reward when it sees one.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task

GOAL = 5


class Counter(Environment):
    """Counts its steps; an action may ask for anything that can go wrong."""

    count = 0

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        if split not in ("train", "dev"):
            raise ValueError(f"no split {split!r}; there are train and dev")
        size = params.get("size", 3)
        return (Task(task_id=f"{split}-{n}", main_query=f"count to {n}", metadata={"n": n}) for n in range(size))

    def reset(self, task: Task) -> StepResult:
        self._misbehave(self.params.get("reset", ""))
        if not task.task_id.startswith(("train", "dev", "test")):
            raise ValueError(f"no task {task.task_id!r}")
        self.task, self.count = task, 0
        return StepResult(
            observation="count",
            messages=[{"role": "system", "content": "rules"}, {"role": "user", "content": task.main_query or "count"}],
            info={"pid": os.getpid(), "folder": os.getcwd(), "metadata": task.metadata, "params": self.params},
        )

    def step(self, action: Mapping[str, Any]) -> StepResult:
        said = action.get("content")
        said = said if isinstance(said, str) else ""
        self._misbehave(said)
        self.count += 1
        over = self.count >= self.params.get("goal", GOAL)
        cut = said == "truncate"
        text = "x" * int(said.split()[1]) if said.startswith("big ") else str(self.count)
        info = {"count": self.count, "action": dict(action)} if said != "big" else {}
        return StepResult(observation=text, reward=float(over), terminated=over, truncated=cut, info=info)

    def evaluate(self) -> Evaluation:
        self._misbehave(self.params.get("evaluate", ""))
        return Evaluation(score=self.count / 10, success=self.count >= GOAL, details={"count": self.count})

    def describe(self) -> Mapping[str, Any]:
        return {"goal": GOAL}

    def close(self) -> None:
        self._misbehave(self.params.get("close", ""))
        if "closed" in self.params:
            Path(self.params["closed"]).write_text("closed")

    @staticmethod
    def _misbehave(said: str) -> None:
        if said == "hang":
            while True:  # swallows what would end it
                with contextlib.suppress(BaseException):
                    time.sleep(60)
        elif said.startswith("wait "):
            time.sleep(float(said.split()[1]))
        elif said == "exit":
            os._exit(3)
        elif said == "sys.exit":
            sys.exit("bye")
        elif said == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif said == "raise":
            raise RuntimeError("the world is broken")
        elif said == "value error":
            raise ValueError("out of range")
        elif said == "print":
            print("on the standard output", flush=True)
            print("on the standard error", file=sys.stderr, flush=True)
        elif said == "daemon":
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    time.sleep(600)
                os._exit(0)
        elif said == "nest":
            for _ in range(3000):
                os.mkdir("d")
                os.chdir("d")
        elif said.startswith("eat "):
            if said.endswith(" in a daemon") and os.fork() > 0:
                return
            if said.endswith(" in a daemon"):
                os.setsid()
                if os.fork() > 0:
                    os._exit(0)
            Counter.eaten = bytearray(int(said.split()[1]) << 20)
            Counter.eaten[:: 1 << 12] = b"x" * len(Counter.eaten[:: 1 << 12])
            if " " in said[4:]:
                time.sleep(600)
        elif said.startswith("fork "):
            number, marker = said.split()[1:3]
            for _ in range(int(number)):
                pid = os.fork()
                if pid == 0:
                    time.sleep(600)
                    os._exit(0)
                with open(marker, "a") as file:
                    file.write(f"{pid}\n")
            if said.endswith("wait"):
                time.sleep(600)
        elif said.startswith("let go "):
            ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # what becomes a daemon is no longer this process's
            if os.fork() == 0:
                if (pid := os.fork()) == 0:
                    os.setsid()
                    time.sleep(600)
                Path(said.split()[2]).write_text(f"{pid}\n")
                os._exit(0)
            os.wait()


class Strict(Counter):
    """Takes no parameter but ``goal``."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self.tasks("train", self.params)

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterable[Task]:
        if params.keys() - {"goal"}:
            raise ValueError(f"no parameters {sorted(params)}; there is goal")
        return super().tasks(split, params)


class NotANumber(Counter):
    """Its rewards and scores are no numbers."""

    def step(self, action: Mapping[str, Any]) -> StepResult:
        return StepResult(observation="", reward=float("nan"))

    def evaluate(self) -> float:
        return float("inf")


class NoData(Counter):
    """Returns what is no data."""

    def step(self, action: Mapping[str, Any]) -> StepResult:
        said = action.get("content")
        if said == "none":
            return None  # type: ignore[return-value]
        if said == "infinity":
            return StepResult(observation="", info={"value": float("inf"), "set": {1}, "nested": {"key": (1, 2)}})
        return StepResult(observation="", info={"value": object()})


def score_of(actions: Iterable[str]) -> float:
    """What `Ledger` gives for exactly these actions; anybody can compute it, and nobody can guess it."""
    return int(hashlib.sha256("|".join(actions).encode()).hexdigest()[:8], 16) / 2**32


class Ledger(Counter):
    """Its score depends on every single action: one that is lost, made up or carried out twice changes it."""

    def reset(self, task: Task) -> StepResult:
        self.actions: list[str] = []
        return super().reset(task)

    def step(self, action: Mapping[str, Any]) -> StepResult:
        self.actions.append(action["content"])
        return StepResult(observation=str(len(self.actions)), terminated=len(self.actions) >= GOAL)

    def evaluate(self) -> Evaluation:
        return Evaluation(score=score_of(self.actions), success=True)
