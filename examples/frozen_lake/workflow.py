"""Cross the lake with an AgentScope agent, one move per answer."""

from agentscope.agent import Agent, InjectionConfig
from agentscope.message import UserMsg

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask

NO_CLOCK = InjectionConfig(inject_runtime_state=False)  # without it, the prompt contains the time


class FrozenLakeWorkflow(Workflow):
    """Workflow of one episode: exchange messages between the environment and the agent."""

    name = "frozen_lake_workflow"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        rules, first = workflow_task.task.init_messages  # first messages of the environment
        agent = Agent(
            name="skater",
            system_prompt=rules["content"],
            model=model_tuner,  # this makes the agent trainable
            injection_config=NO_CLOCK,
        )
        seen, over, info, unreadable = first["content"], False, {}, 0
        while not over and not model_tuner.context_overflow:
            move = (await agent.reply(UserMsg("lake", seen))).get_text_content() or ""
            seen, _, over, info = await model_tuner.gym_step_async({"role": "assistant", "content": move})
            unreadable += seen.startswith("No move found")
        moves = info.get("steps", 0)
        metrics = {"moves": moves, "unreadable": unreadable / max(1, moves)}  # the sentinel monitors "unreadable"
        return WorkflowOutput(metadata={"end": seen}, metrics=metrics)
