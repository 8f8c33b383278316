"""Answers of random weights, which never end a text by themselves: the agent and judge of `long_answers.yaml`."""

from __future__ import annotations

from astuner import Judge, JudgeOutput, ModelTuner, Workflow, WorkflowOutput, WorkflowTask


class LongAnswer(Workflow):
    """One call of the model."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        reply = await model_tuner.chat([{"role": "user", "content": workflow_task.task.main_query}])
        return WorkflowOutput(metadata={"text": reply.message["content"]})


class ShareOfE(Judge):
    """How much of the answer is the letter e: no two answers are worth the same, so that each is trained on."""

    def judge(self, workflow_task: WorkflowTask, output: WorkflowOutput) -> JudgeOutput:
        text = output.metadata["text"]
        return JudgeOutput(reward=text.count("e") / (len(text) + 1))
