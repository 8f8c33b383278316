"""The math agent of the examples, whose tool takes its time: what an agent waits for while no GPU works for it."""

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
    """Waits before it begins: half of ``SLOW_MATH_AGENT_SECONDS`` to one and a half of it, drawn for each episode.

    A validation does not wait: its time is not what is measured.
    """

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        if workflow_task.split is Split.TRAIN:
            mean = float(os.environ.get("SLOW_MATH_AGENT_SECONDS", "4"))
            await asyncio.sleep(mean * random.Random(workflow_task.episode_id).uniform(0.5, 1.5))
        output: WorkflowOutput = await super().execute(workflow_task, model_tuner)
        return output
