"""AgentScope 1.x: its model interface on one side, `ModelTuner.chat` on the other.

Works on 1.0.7 to 1.0.21, which differ in what a model is asked with, and not in what it answers: a `ChatResponse`
of plain dictionaries ("blocks").  agentscope is imported when the first answer is given.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.chat.errors import UnsupportedRequest
from astuner.errors import MissingDependency

if TYPE_CHECKING:
    from astuner.chat.answer import ChatReply
    from astuner.model_tuner import ModelTuner

_HONOURED = {"max_tokens", "temperature"}
_STRUCTURED_TOOL = "generate_structured_output"


async def respond(
    tuner: ModelTuner,
    agent_name: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    structured_model: Any,
    options: Mapping[str, Any],
) -> Any:
    """Answer as an AgentScope model does: with a ``ChatResponse``.

    With a ``structured_model`` the model is offered one tool that takes its fields; the object goes into the
    response's metadata when the model calls it with valid ones, which is never enforced.

    :raises UnsupportedRequest: ``options`` holds a keyword that would change the sampling and is not honoured.
    """
    wanted = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(wanted.keys() - _HONOURED):
        raise UnsupportedRequest(
            f"model_tuner does not honour {', '.join(unknown)} (only {', '.join(sorted(_HONOURED))}); "
            f"leave it out, or set it for the whole run under astuner.rollout"
        )
    if structured_model is not None:
        tools, tool_choice = [_structured_tool(structured_model)], None
    started = time.perf_counter()
    reply = await tuner.chat(messages, tools, agent_name=agent_name, tool_choice=tool_choice, **wanted)
    response_type, usage_type = _response_types()
    return response_type(
        content=_blocks(reply) if structured_model is None else _text_blocks(reply),
        id=f"{tuner.workflow_task.episode_id}:{reply.turn_index}",
        usage=usage_type(
            input_tokens=reply.prompt_tokens,
            output_tokens=reply.completion_tokens,
            time=time.perf_counter() - started,
        ),
        metadata=None if structured_model is None else _structured_output(reply, structured_model),
    )


def make_model(tuner: ModelTuner, agent_name: str, role: str | None = None) -> Any:
    """A ``ChatModelBase`` that speaks for one agent, with a span per call where tracing is on."""
    return _model_class()(tuner, agent_name)


@functools.cache
def _model_class() -> Any:
    _response_types()  # explains what is missing
    from agentscope.model import ChatModelBase
    from agentscope.tracing import trace_llm

    class AgentScopeModel(ChatModelBase):
        """One agent's view of the model in training."""

        def __init__(self, tuner: ModelTuner, agent_name: str) -> None:
            super().__init__(tuner.model_name, False)
            self._tuner = tuner
            self.agent_name = agent_name

        @trace_llm
        async def __call__(
            self,
            messages: Any,
            tools: Any = None,
            tool_choice: Any = None,
            structured_model: Any = None,
            **options: Any,
        ) -> Any:
            return await respond(self._tuner, self.agent_name, messages, tools, tool_choice, structured_model, options)

    return AgentScopeModel


@functools.cache
def _response_types() -> tuple[Any, Any]:
    try:
        from agentscope.model import ChatResponse
        from agentscope.model._model_usage import ChatUsage  # 1.x exports it nowhere
    except ImportError as e:
        raise MissingDependency(
            f"model=model_tuner needs AgentScope 1.x ({e}); install it with: pip install 'astuner-core[agentscope]'"
        ) from e
    return ChatResponse, ChatUsage


def _text_blocks(reply: ChatReply) -> list[dict[str, Any]]:
    blocks = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    return blocks


def _blocks(reply: ChatReply) -> list[dict[str, Any]]:
    calls = [(call["id"], call["function"]) for call in reply.tool_calls]
    return _text_blocks(reply) + [
        {
            "type": "tool_use",
            "id": call_id,
            "name": function["name"],
            "input": json.loads(function["arguments"]),
            "raw_input": function["arguments"],
        }
        for call_id, function in calls
    ]


def _structured_tool(structured_model: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": _STRUCTURED_TOOL,
            "description": "Give the answer in the required structure.",
            "parameters": structured_model.model_json_schema(),
        },
    }


def _structured_output(reply: ChatReply, structured_model: Any) -> dict[str, Any] | None:
    from pydantic import ValidationError

    for call in reply.tool_calls:
        if call["function"]["name"] == _STRUCTURED_TOOL:
            try:
                output: dict[str, Any] = structured_model.model_validate_json(
                    call["function"]["arguments"]
                ).model_dump()
            except ValidationError:
                continue  # not the structure asked for; the agent sees that metadata is empty
            return output
    return None
