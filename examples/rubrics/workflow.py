"""The clerk of a shop's help desk: one reply to one question, and nothing that says how good it is."""

from desk import SYSTEM_PROMPT

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class Clerk(Workflow):
    """One episode: a reply.  It has no reward; that is the judge's business."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        asked = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": workflow_task.task.main_query},
        ]
        return WorkflowOutput(response=(await model_tuner.chat(asked)).text)
