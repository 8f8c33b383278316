"""The math agent of the examples with a slow tool, to simulate waiting of an agent while no GPU works for it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
from pathlib import Path

from astuner import ModelTuner, WorkflowOutput, WorkflowTask
from astuner.contracts.types import Split

_FILE = Path(__file__).resolve().parent.parent / "examples/math_agent/workflow.py"
_spec = importlib.util.spec_from_file_location("math_agent_of_the_examples", _FILE)
assert _spec is not None
assert _spec.loader is not None
_example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_example)


class SlowMathAgent(_example.MathAgentWorkflow):  # type: ignore[name-defined]
    """Math agent that waits 0.5 to 1.5 times ``SLOW_MATH_AGENT_SECONDS`` before it begins, by episode.

    Validations do not wait, because their time is not measured.
    """

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.split is Split.TRAIN:
            mean = float(os.environ.get("SLOW_MATH_AGENT_SECONDS", "4"))
            await asyncio.sleep(mean * random.Random(workflow_task.episode_id).uniform(0.5, 1.5))
        output: WorkflowOutput = await super().execute(workflow_task, model_tuner)
        return output
