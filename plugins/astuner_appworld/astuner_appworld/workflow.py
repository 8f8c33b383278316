"""The first documents' AppWorld agent: an AgentScope `ReActAgent` without tools that talks with the environment.

Each reply of the agent is an action, each observation the next message to it, until the environment says that the task
is over.  The agent is AgentScope's own, unchanged.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from astuner import Workflow, WorkflowOutput, WorkflowTask
from astuner.contracts.errors import EnvironmentFailed

if TYPE_CHECKING:
    from astuner import ModelTuner


class AppWorldWorkflow(Workflow):
    """Play one task; the reward is the judge's business (`appworld` or `env_service`).

    AgentScope 1.x; in 2.x there is no `ReActAgent`.
    """

    name = "appworld"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        from agentscope.agent import ReActAgent
        from agentscope.formatter import DashScopeChatFormatter
        from agentscope.memory import InMemoryMemory
        from agentscope.message import Msg

        system, first = _opening(workflow_task)
        model: Any = model_tuner  # AgentScope calls it and reads `stream`; it asks for no base class
        agent = ReActAgent(
            name="Qwen",
            sys_prompt=system,
            model=model,
            formatter=DashScopeChatFormatter(),
            memory=InMemoryMemory(),
            toolkit=None,
            print_hint_msg=False,
        )
        agent.set_console_output_enabled(False)
        message, terminate, steps = Msg(name="env", content=first, role="user"), False, 0
        most = model_tuner.config.astuner.rollout.multi_turn.max_steps
        for _ in itertools.count() if most is None else range(most):
            # reply(), not agent(...): the latter turns a cancelled episode into a polite answer
            reply = await agent.reply(message)
            observation, _, terminate, _ = await model_tuner.gym_step_async(
                action={"content": reply.content, "role": "assistant"}
            )
            steps += 1
            message = Msg(name="env", content=observation, role="user")
            if terminate or model_tuner.context_overflow:
                break
        return WorkflowOutput(metadata={"terminated": terminate}, metrics={"env_steps": float(steps)})


def _opening(workflow_task: WorkflowTask) -> tuple[str, str]:
    """What the environment says first: the system's message and the user's.

    :raises EnvironmentFailed: it said nothing; the task has no environment.
    """
    messages = list(workflow_task.task.init_messages)
    if not messages:
        raise EnvironmentFailed(
            f"task {workflow_task.task.task_id!r} came without an environment's first messages; use the task reader "
            "appworld, or one that sets env_type: appworld"
        )
    system = [str(message["content"]) for message in messages if message["role"] == "system"]
    said = [str(message["content"]) for message in messages if message["role"] != "system"]
    return "\n\n".join(system), "\n\n".join(said) or workflow_task.task.main_query
