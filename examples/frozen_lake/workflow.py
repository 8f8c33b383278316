"""A skater: an AgentScope agent that crosses the lake, one move per answer."""

from agentscope.agent import ReActAgent
from agentscope.formatter import DashScopeChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class FrozenLakeWorkflow(Workflow):
    """One episode: what the environment shows goes to the agent, what the agent says goes to the environment."""

    name = "frozen_lake_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        rules, first = workflow_task.task.init_messages  # the environment has been reset: this is what it said
        agent = ReActAgent(
            name="skater",
            sys_prompt=rules["content"],
            model=model_tuner,  # this makes the agent trainable
            formatter=DashScopeChatFormatter(),
            memory=InMemoryMemory(),
        )
        agent.set_console_output_enabled(False)
        seen, over, info, unreadable = first["content"], False, {}, 0
        while not over and not model_tuner.context_overflow:
            # reply(), not agent(...): the latter turns a cancelled episode into a polite answer
            move = await agent.reply(Msg("lake", seen, role="user"))
            seen, _, over, info = await model_tuner.gym_step_async({"role": "assistant", "content": move.content})
            unreadable += seen.startswith("No move found")
        moves = info.get("steps", 0)
        metrics = {"moves": moves, "unreadable": unreadable / max(1, moves)}  # a name that the sentinel knows
        return WorkflowOutput(metadata={"end": seen}, metrics=metrics)
