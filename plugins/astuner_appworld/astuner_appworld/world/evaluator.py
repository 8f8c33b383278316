"""Compare the state that a world left on disk with the ground truth, in a new process.

The process returns the tests' requirements and labels, but never their traces, because these quote the answers: other
processes cannot leak data that they do not have.
"""

# mypy: disable-error-code="import-not-found,import-untyped"

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

from astuner_appworld.world import package
from astuner_appworld.world.apps import told


def main(channel: Any, root: str, task_id: str, experiment: str) -> None:
    """Answer one message with the evaluation of the state saved as ``experiment``."""
    sys.dont_write_bytecode = True
    os.environ["HOME"] = root
    package.use_root(Path(root))
    channel.recv()
    try:
        channel.send(evaluate(task_id, experiment))
    except Exception as e:  # not a verdict: the data is damaged or the state is missing
        channel.send({"failed": told(e)})


def evaluate(task_id: str, experiment: str) -> dict[str, Any]:
    """Run the task's tests.

    If the evaluation code itself fails on the state, tests that did not run count as failed, because the agent produced
    the state.

    :returns: Passes and failures, each ``{"requirement", "label"}``, and the number of tests.
    """
    from appworld import evaluator

    made: list[Any] = []

    class Kept(evaluator.TestTracker):  # type: ignore[misc]
        """The package's tracker, stored because an error would discard it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    evaluator.TestTracker = Kept
    stumbled = ""
    try:
        evaluator.evaluate_task(task_id, experiment_name=experiment, suppress_errors=True, save_report=False)
    except Exception as e:
        if not made or not _by_the_state(e):
            raise
        stumbled = type(e).__name__
    tracker = made[0]
    seen = {test["requirement"] for test in (*tracker.passes, *tracker.failures)}
    missing = [test for test in tracker.test_data or () if test["requirement"] not in seen]
    return {
        "passes": [_public(test) for test in tracker.passes],
        "failures": [_public(test) for test in (*tracker.failures, *missing)],
        "num_tests": max(len(tracker.passes) + len(tracker.failures) + len(missing), len(tracker.test_data or ())),
        "difficulty": tracker.difficulty,
        "stumbled": stumbled,
    }


def _by_the_state(error: Exception) -> bool:
    """Return whether the task's evaluation code failed on the state; other errors are failures of the package."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [at for at, frame in enumerate(frames) if os.path.basename(frame.filename) == "evaluation.py"]
    return bool(inside) and not any(frame.name == "__exit__" for frame in frames[inside[-1] :])


def _public(test: Any) -> dict[str, Any]:
    return {"requirement": test["requirement"], "label": test.get("label")}
