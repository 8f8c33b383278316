"""Models that answer immediately, to measure everything except the model."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
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
    """Engine that calls the calculator at every turn of a conversation and answers at the last turn.

    :param turns: Turns of a conversation; the session identifies the conversation.
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
    """Agent that asks and calculates until the model makes no more calls."""

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
        """Do nothing; `StampedAgent` overrides it."""


class StampedAgent(PlainAgent):
    """Agent that records the process's CPU time before every call. Run one at a time."""

    stamps: ClassVar[list[float]] = []

    def before_call(self) -> None:
        self.stamps.append(time.process_time())


def instant_agentscope_model() -> Any:
    """Return a model of the installed AgentScope, without ASTuner: one calculator call, then the answer."""
    return agentscope_model(iter([("calculator", json.dumps({"expression": EXPRESSION})), ANSWER]))


def agentscope_model(replies: Iterator[tuple[str, str] | str]) -> Any:
    """Return a model of the installed AgentScope that returns the next reply and does nothing else.

    :param replies: A text, or the name and the arguments (JSON) of a tool call.
    """
    return _model_class()(replies)


@functools.cache
def _model_class() -> Any:
    from importlib import metadata

    return (_model_class1 if metadata.version("agentscope").startswith("1.") else _model_class2)()


def _model_class1() -> Any:
    from agentscope.message import TextBlock, ToolUseBlock
    from agentscope.model import ChatModelBase, ChatResponse

    class InstantModel(ChatModelBase):
        def __init__(self, replies: Iterator[tuple[str, str] | str]) -> None:
            super().__init__("instant", False)
            self._replies = replies
            self._calls = itertools.count()

        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            reply = next(self._replies)
            if isinstance(reply, str):
                return ChatResponse(content=[TextBlock(type="text", text=reply)])
            name, text = reply
            call = ToolUseBlock(type="tool_use", id=f"call{next(self._calls)}", name=name, input=json.loads(text))
            return ChatResponse(content=[call])

    return InstantModel


def _model_class2() -> Any:
    from agentscope.credential import CredentialBase
    from agentscope.formatter import OpenAIChatFormatter
    from agentscope.message import TextBlock, ToolCallBlock
    from agentscope.model import ChatModelBase, ChatResponse

    class InstantModel(ChatModelBase):
        def __init__(self, replies: Iterator[tuple[str, str] | str]) -> None:
            super().__init__(CredentialBase(), "instant", self.Parameters(), stream=False, context_size=1 << 40)
            self.formatter = OpenAIChatFormatter(input_types=["text/plain"])  # agents read its media types
            self._replies = replies
            self._calls = itertools.count()

        async def _call_api(self, *args: Any, **kwargs: Any) -> Any:
            reply = next(self._replies)
            if isinstance(reply, str):
                return ChatResponse(content=[TextBlock(text=reply)], is_last=True)
            name, text = reply
            call = ToolCallBlock(id=f"call{next(self._calls)}", name=name, input=text)
            return ChatResponse(content=[call], is_last=True)

    return InstantModel
