"""Agent and judge of `long_answers.yaml`, for random weights, which never end an answer themselves."""

from __future__ import annotations

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class LongAnswer(Workflow):
    """Agent with one call of the model."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        reply = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(metadata={"text": reply.message["content"]})


class ShareOfE(Judge):
    """Judge that returns the share of the letter e: rewards differ, so every answer is trained on."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        text = output.metadata["text"]
        return JudgeOutput(reward=text.count("e") / (len(text) + 1))
