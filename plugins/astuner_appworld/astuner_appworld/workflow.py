"""Run an AgentScope agent (1.x or 2.x) without tools that exchanges messages with AppWorld.

Each reply of the agent is an action, and each observation is the next message to the agent, until the environment ends
the episode.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import EnvironmentFailed

if TYPE_CHECKING:
    from astuner import ModelTuner


class AppWorldWorkflow(Workflow):
    """Play one task; a judge (`appworld` or `env_service`) gives the reward."""

    name = "appworld"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        from astuner_agentscope import make_tool_agent

        system, message = _opening(workflow_task)
        agent = make_tool_agent(model_tuner, name="Qwen", system_prompt=system)
        terminate, steps = False, 0
        max_steps = model_tuner.config.astuner.rollout.multi_turn.max_steps
        for _ in itertools.count() if max_steps is None else range(max_steps):
            reply = await agent.reply(message, sender="env")
            message, _, terminate, _ = await model_tuner.gym_step_async(action={"content": reply, "role": "assistant"})
            steps += 1
            if terminate or model_tuner.context_overflow:
                break
        return WorkflowOutput(metadata={"terminated": terminate}, metrics={"env_steps": float(steps)})


def _opening(workflow_task: WorkflowTask) -> tuple[str, str]:
    """Return the environment's first messages: the system message and the user message.

    :raises EnvironmentFailed: There are none, because the task has no environment.
    """
    messages = list(workflow_task.task.init_messages)
    if not messages:
        raise EnvironmentFailed(
            f"Task {workflow_task.task.task_id!r} has no first messages from an environment. Use the task reader "
            "appworld, or one that sets env_type: appworld."
        )
    system = [str(message["content"]) for message in messages if message["role"] == "system"]
    said = [str(message["content"]) for message in messages if message["role"] != "system"]
    return "\n\n".join(system), "\n\n".join(said) or workflow_task.task.main_query
