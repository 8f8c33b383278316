"""The environment of a round; each instance lives in the environment service, in a process of its own."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time

from astuner import Environment, Evaluation, StepResult, Task

STEPS = 2


def score_of(actions):
    """What an instance gives for exactly these actions: one that is lost, made up or done twice changes it."""
    return int(hashlib.sha256("|".join(actions).encode()).hexdigest()[:8], 16) / 2**32


class World(Environment):
    """Its first action says how it is to misbehave."""

    @classmethod
    def tasks(cls, split, params):
        return [Task(task_id="t0")]

    def reset(self, task):
        self.actions = []
        return StepResult(observation="go on")

    def step(self, action):
        said = action["content"]
        if not self.actions:
            self.kind = said
        self.actions.append(said)
        if self.kind == "world_raises":
            raise KeyError("chaos: the world is broken")
        if self.kind == "world_exits":
            sys.exit("chaos: bye")
        if self.kind == "world_leaves":
            os._exit(3)
        if self.kind == "world_is_killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "world_hangs":
            time.sleep(600)
        if self.kind == "world_says_nothing":
            return None
        if self.kind == "world_says_an_object":
            return StepResult(observation="", info={"value": object()})
        if self.kind == "world_reward_is_nan":
            return StepResult(observation="", reward=float("nan"))
        if self.kind == "world_prints":
            print("x" * 3_000_000, flush=True)
        if self.kind == "world_has_children":
            subprocess.Popen(["sleep", "600"], start_new_session=True)
        return StepResult(observation="go on", terminated=len(self.actions) > STEPS)

    def evaluate(self):
        if self.kind == "world_score_is_nan":
            return float("nan")
        if self.kind == "world_success_is_a_word":
            return Evaluation(score=1.0, success="no")
        return Evaluation(score=score_of(self.actions))
