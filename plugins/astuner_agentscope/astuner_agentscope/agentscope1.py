"""Adapt AgentScope 1.x: implement its model interface with `ModelTuner.chat`.

Versions 1.0.7 to 1.0.21 differ in the arguments of a model, but not in its answer: a `ChatResponse` of plain
dictionaries ("blocks"). agentscope is imported when a model is created.

Invariant: a block of a tool call contains the model's own text of the arguments next to the parsed object.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import MissingDependency
from astuner.contracts.messages import parse_arguments
from astuner_agentscope.face import wanted
from astuner_agentscope.tool_agent import Tool, ToolAgent

if TYPE_CHECKING:
    from astuner import ModelTuner
    from astuner.contracts.messages import ChatReply


@functools.cache
def model_class() -> Any:
    """Return the ``ChatModelBase`` for one agent, with a span per call if tracing is enabled.

    :raises astuner.contracts.errors.MissingDependency: AgentScope cannot be imported.
    """
    _response_types()  # raises with an explanation if a package is missing
    from agentscope.model import ChatModelBase
    from agentscope.tracing import trace_llm

    class AgentScopeModel(ChatModelBase):
        """The model in training, as one agent uses it."""

        def __init__(self, tuner: ModelTuner, agent_name: str, role: str | None) -> None:
            super().__init__(tuner.model_name, False)
            self._tuner = tuner
            self.agent_name = agent_name
            self.role = role

        @trace_llm
        async def __call__(
            self,
            messages: Any,
            tools: Any = None,
            tool_choice: Any = None,
            structured_model: Any = None,
            **options: Any,
        ) -> Any:
            """Return a ``ChatResponse``, or an iterator over responses if ``stream`` is set.

            With a ``structured_model``, the model is offered one tool with its fields. If the model calls the tool with
            valid fields, the metadata of the response contains the object. The call is never enforced.
            """
            options = wanted(options)
            if structured_model is not None:  # as in AgentScope's own models, the tools are ignored in this case
                tools, tool_choice = None, None
                options["response_schema"] = structured_model.model_json_schema()
            started = time.perf_counter()
            reply = await self._tuner.chat(
                messages, tools, agent_name=self.agent_name, role=self.role, tool_choice=tool_choice, **options
            )
            seconds = time.perf_counter() - started
            response = _response(reply, seconds, structured_model)
            return _stream(response) if self.stream else response

    return AgentScopeModel


class ReActToolAgent(ToolAgent):
    """AgentScope 1.x's `ReActAgent`."""

    def __init__(self, model: Any, name: str, system_prompt: str, tools: Sequence[Tool], max_iters: int) -> None:
        _response_types()  # raises with an explanation if a package is missing
        from agentscope.agent import ReActAgent
        from agentscope.formatter import DashScopeChatFormatter
        from agentscope.memory import InMemoryMemory
        from agentscope.tool import Toolkit

        toolkit = Toolkit()
        for tool in tools:
            toolkit.register_tool_function(_returns_response(tool))
        self.agent = ReActAgent(
            name=name,
            sys_prompt=system_prompt,
            model=model,
            formatter=DashScopeChatFormatter(),
            toolkit=toolkit,
            memory=InMemoryMemory(),
            max_iters=max_iters,
        )
        self.agent.set_console_output_enabled(False)

    async def reply(self, text: str, sender: str = "user") -> str:
        from agentscope.message import Msg, TextBlock

        # reply() instead of agent(...), because the latter turns a canceled episode into a normal answer
        reply = await self.agent.reply(Msg(sender, text, role="user"))
        answer = reply.get_text_content() or ""
        if not answer:  # AgentScope omits an empty reply, and then the next request would not continue this one
            await self.agent.memory.add(Msg(self.agent.name, [TextBlock(type="text", text="")], "assistant"))
        return answer


def _returns_response(tool: Tool) -> Callable[..., Any]:
    """Return the tool with its text in the object that 1.x requires; its signature and docstring stay."""
    from agentscope.message import TextBlock
    from agentscope.tool import ToolResponse

    @functools.wraps(tool)
    async def wrapped(*args: Any, **kwargs: Any) -> Any:
        result = tool(*args, **kwargs)
        if inspect.isawaitable(result):
            result = await result
        if isinstance(result, str):
            return ToolResponse(content=[TextBlock(type="text", text=result)])
        return result

    return wrapped


@functools.cache
def _response_types() -> tuple[Any, Any]:
    try:
        from agentscope.model import ChatResponse
        from agentscope.model._model_usage import ChatUsage  # 1.x does not export it
    except ImportError as e:
        raise MissingDependency(
            f"AgentScope 1.x cannot be imported ({e}). Install its dependencies with: "
            f"pip install 'astuner-agentscope[agentscope1]'"
        ) from e
    return ChatResponse, ChatUsage


def _response(reply: ChatReply, seconds: float, structured_model: Any) -> Any:
    response_type, usage_type = _response_types()
    return response_type(
        content=_blocks(reply),
        id=reply.reply_id,  # links a message to its turn
        usage=usage_type(input_tokens=reply.prompt_tokens, output_tokens=reply.completion_tokens, time=seconds),
        metadata=None if structured_model is None else _validated(reply.structured, structured_model),
    )


async def _stream(response: Any) -> AsyncIterator[Any]:
    """Yield the response once; 1.x expects the complete text so far on each iteration."""
    yield response


def _blocks(reply: ChatReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    return blocks + [_call_block(call["id"], call["function"]) for call in reply.tool_calls]


def _call_block(call_id: str, function: Mapping[str, Any]) -> dict[str, Any]:
    text = function["arguments"]
    return {
        "type": "tool_use",
        "id": call_id,
        "name": function["name"],
        "input": parse_arguments(text) or {},  # only an external model sends anything else; 1.0.21 does the same
        "raw_input": text,
    }


def _validated(structured: Mapping[str, Any] | None, structured_model: Any) -> dict[str, Any] | None:
    from pydantic import ValidationError

    if structured is None:
        return None
    try:
        output: dict[str, Any] = structured_model.model_validate(structured).model_dump()
    except ValidationError:
        return None  # not the requested structure; the agent receives empty metadata
    return output
