"""Cross the lake with an AgentScope agent, one move per answer."""

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner_agentscope import make_tool_agent


class FrozenLakeWorkflow(Workflow):
    """Workflow of one episode: exchange messages between the environment and the agent."""

    name = "frozen_lake_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        rules, first = workflow_task.task.init_messages  # the environment has been reset: this is what it said
        agent = make_tool_agent(model_tuner, name="skater", system_prompt=rules["content"])
        seen, over, info, unreadable = first["content"], False, {}, 0
        while not over and not model_tuner.context_overflow:
            move = await agent.reply(seen, "lake")
            seen, _, over, info = await model_tuner.gym_step_async({"role": "assistant", "content": move})
            unreadable += seen.startswith("No move found")
        moves = info.get("steps", 0)
        metrics = {"moves": moves, "unreadable": unreadable / max(1, moves)}  # the sentinel monitors "unreadable"
        return WorkflowOutput(metadata={"end": seen}, metrics=metrics)
