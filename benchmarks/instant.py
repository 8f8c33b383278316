"""Models that answer at once, so that only what is around a model takes time."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from astuner import Generation, InferenceEngine, Workflow, WorkflowOutput, WorkflowTask
from astuner.contracts.types import FinishReason, SamplingParams
from astuner.rollout.model_tuner import ModelTuner
from astuner_local.tiny.transcripts import TOOLS, first_messages
from benchmarks.agents import use_calculator

EXPRESSION = "7 * 3"
CALL = f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{EXPRESSION}"}}}}\n</tool_call>'
ANSWER = "\\boxed{21}"


class InstantEngine(InferenceEngine):
    """Calls the calculator at every turn of a conversation but the last, where it answers.

    :param turns: of a conversation; conversations are told apart by their session.
    """

    max_model_len = 1 << 20

    def __init__(self, tokenizer: Any, turns: int) -> None:
        self._turns = turns
        self._call, self._answer = (
            (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id) for text in (CALL, ANSWER)
        )
        self._asked: dict[str, int] = {}

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        asked = self._asked[session] = self._asked.get(session, 0) + 1
        response = self._call if asked < self._turns else self._answer
        return Generation(
            prompt_ids=prompt_ids,
            response_ids=response,
            logprobs=(-0.5,) * len(response),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )


class PlainAgent(Workflow):
    """Ask, calculate, ask again, until there is no call any more."""

    name = "plain_agent"

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        messages: list[Mapping[str, Any]] = [*first_messages(workflow_task.task.main_query)]
        while True:
            self.before_call()
            reply = await model_tuner.chat(messages, TOOLS)
            if not reply.tool_calls:
                return WorkflowOutput(reward=1.0)
            messages.append(reply.message)
            for call in reply.tool_calls:
                result = use_calculator(json.loads(call["function"]["arguments"])["expression"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "name": "calculator", "content": result})

    def before_call(self) -> None:
        """Nothing; see `StampedAgent`."""


class StampedAgent(PlainAgent):
    """Notes the process's CPU time before every call. One at a time."""

    stamps: ClassVar[list[float]] = []

    def before_call(self) -> None:
        self.stamps.append(time.process_time())


def instant_agentscope_model() -> Any:
    """Return an AgentScope 2 model without ASTuner that gives the same two answers, as AgentScope's own blocks."""
    from agentscope.credential import CredentialBase
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import TextBlock, ToolCallBlock
    from agentscope.model import ChatModelBase, ChatResponse

    class InstantModel(ChatModelBase):
        def __init__(self) -> None:
            super().__init__(CredentialBase(), "instant", self.Parameters(), stream=False, max_retries=0)
            self.formatter = OpenAIChatFormatter()
            self._calls = 0

        async def _call_api(self, model_name: str, messages: Any, *args: Any, **kwargs: Any) -> Any:
            await self.formatter.format(messages)
            self._calls += 1
            if self._calls > 1:
                return ChatResponse(content=[TextBlock(text=ANSWER)], is_last=True)
            arguments = json.dumps({"expression": EXPRESSION})
            call = ToolCallBlock(id="1", name="calculator", input=arguments)
            return ChatResponse(content=[call], is_last=True)

    return InstantModel()
