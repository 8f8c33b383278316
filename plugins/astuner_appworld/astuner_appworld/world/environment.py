"""AppWorld as an `Environment`: one instance process, which is trusted and holds no world.

It forks a process with the world and the apps, one with the shell that model-written code runs in, and for every
evaluation a fresh one that knows the answers (`session`).  Invariant: what an agent writes costs its own episode at
most, and is always scored: only a failure of AppWorld itself raises.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.types import Task
from astuner_appworld.world import actions, package, prompts, roots
from astuner_appworld.world.options import Options
from astuner_appworld.world.session import Session, StateBroken


def warm() -> None:
    """Import the package before the first fork, so that instances share its pages."""
    package.load()


class AppWorldEnvironment(Environment):
    """A task for a person with nine everyday apps, carried out by writing Python."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self._options = Options.of(self.params)
        self._folder: Path | None = None
        self._session: Session | None = None
        self._steps = 0
        self._over: StepResult | None = None
        self._completed = False

    @classmethod
    def tasks(cls, split: str, params: Mapping[str, Any]) -> Iterator[Task]:
        for task_id in roots.task_ids(roots.data_root(), split):
            yield Task(task_id=task_id, env_type="appworld", metadata={"split": split})

    def reset(self, task: Task) -> StepResult:
        if self._session is not None:
            raise RuntimeError("an instance serves one episode; make another one")
        root = roots.data_root()
        roots.task_folder(root, task.task_id)
        package.load()
        self._folder = Path(tempfile.mkdtemp(prefix="aw-")).resolve()
        self._session = Session(root, task.task_id, self._folder, self._options.limits)
        facts = self._session.start()
        messages = prompts.opening(facts["instruction"], facts["supervisor"])
        return StepResult(
            observation=messages[-1]["content"], messages=messages, info={"confined": self._session.confined}
        )

    def step(self, action: Mapping[str, Any]) -> StepResult:
        if self._over is not None:
            return self._again(self._over)
        session = self._running()
        self._steps += 1
        lost = False
        try:
            ran = session.run(actions.code_of(action, self._options.code_format))
        except actions.NoCode as e:
            said = str(e)
        else:
            said = prompts.observation(prompts.shortened(ran.output, self._options.max_output))
            self._completed, lost = ran.completed, ran.lost
        truncated = not self._completed and (lost or self._steps >= self._options.max_interactions)
        result = StepResult(
            observation=said,
            terminated=self._completed,
            truncated=truncated,
            info={"interactions": self._steps, "restarts": session.restarts, "world_lost": lost},
        )
        self._over = result if result.is_over else None
        return result

    def evaluate(self) -> Evaluation:
        found = self._tests()
        passes, num_tests = found["passes"], found["num_tests"]
        return Evaluation(
            score=len(passes) / num_tests if num_tests else 0.0,
            success=bool(num_tests) and len(passes) == num_tests and not found["stumbled"],
            details={**found, "task_completed": self._completed, "interactions": self._steps},
        )

    def describe(self) -> Mapping[str, Any]:
        return {
            "summary": "Carry out a person's task in AppWorld's apps by writing Python in ```python blocks.",
            "score": "the share of the task's tests that pass; success is all of them. A world that nobody touched "
            "passes some: see the judge's reward modes.",
            "tools": list(actions.TOOL_NAMES),
            "splits": list(roots.SPLITS),
            "options": self._options.as_dict(),
            "confined": self._session.confined if self._session is not None else "",
        }

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _tests(self) -> dict[str, Any]:
        """What the tests say; a state that the agent has made unfit for them has failed."""
        try:
            return self._running().evaluate()
        except StateBroken:
            failure = {"requirement": "the tests can look at the state that the agent left", "label": "no_op_fail"}
            return {"passes": [], "failures": [failure], "num_tests": 1, "difficulty": None, "stumbled": "StateBroken"}

    def _running(self) -> Session:
        if self._session is None or self._folder is None:
            raise RuntimeError("reset() comes first" if self._session is None else "this instance is closed")
        return self._session

    @staticmethod
    def _again(end: StepResult) -> StepResult:
        """A step after the end: nothing runs."""
        return StepResult(
            observation="The task is over; nothing was run.",
            terminated=end.terminated,
            truncated=end.truncated,
            info={**end.info, "refused": True},
        )
