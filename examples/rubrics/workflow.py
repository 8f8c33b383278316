"""The agent of a shop's help desk: one reply per question, without a reward."""

from desk import SYSTEM_PROMPT

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class Clerk(Workflow):
    """An episode with one reply. The judge sets the reward."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        asked = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        return WorkflowOutput(response=(await model_tuner.chat(asked)).text)
