"""AgentScope 1.x: its model interface on one side, `ModelTuner.chat` on the other.

1.0.7 to 1.0.21 differ in what a model is asked with, and not in what it answers: a `ChatResponse` of plain
dictionaries ("blocks").  agentscope is imported when a model is made.

Invariant: a block of a tool call holds the model's own text of the arguments beside the object that it denotes.
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
    """The ``ChatModelBase`` that speaks for one agent, with a span per call where tracing is on.

    :raises astuner.contracts.errors.MissingDependency: AgentScope cannot be imported.
    """
    _response_types()  # explains what is missing
    from agentscope.model import ChatModelBase
    from agentscope.tracing import trace_llm

    class AgentScopeModel(ChatModelBase):
        """One agent's view of the model in training."""

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
            """Answer with a ``ChatResponse``, or a stream of one where ``stream`` is set.

            With a ``structured_model`` the model is offered one tool that takes its fields; the object goes into
            the response's metadata when the model calls it with valid ones, which is never enforced.
            """
            options = wanted(options)
            if structured_model is not None:  # then AgentScope's own models ignore the tools
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
        _response_types()  # explains what is missing
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

        # reply(), not agent(...), which turns a cancelled episode into a polite answer
        reply = await self.agent.reply(Msg(sender, text, role="user"))
        answer = reply.get_text_content() or ""
        if not answer:  # AgentScope omits an empty reply, and then the next request would not continue this one
            await self.agent.memory.add(Msg(self.agent.name, [TextBlock(type="text", text="")], "assistant"))
        return answer


def _returns_response(tool: Tool) -> Callable[..., Any]:
    """The tool with its text in the object that 1.x requires; its signature and docstring stay."""
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
        from agentscope.model._model_usage import ChatUsage  # 1.x exports it nowhere
    except ImportError as e:
        raise MissingDependency(
            f"AgentScope 1.x cannot be imported ({e}); install what it needs with: "
            f"pip install 'astuner-agentscope[agentscope1]'"
        ) from e
    return ChatResponse, ChatUsage


def _response(reply: ChatReply, seconds: float, structured_model: Any) -> Any:
    response_type, usage_type = _response_types()
    return response_type(
        content=_blocks(reply),
        id=reply.reply_id,  # leads from a message to its turn
        usage=usage_type(input_tokens=reply.prompt_tokens, output_tokens=reply.completion_tokens, time=seconds),
        metadata=None if structured_model is None else _validated(reply.structured, structured_model),
    )


async def _stream(response: Any) -> AsyncIterator[Any]:
    """1.x streams what has been said so far, again and again; here there is nothing before the whole."""
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
        "input": parse_arguments(text) or {},  # no object: only an external model gets here with one, as 1.0.21 has it
        "raw_input": text,
    }


def _validated(structured: Mapping[str, Any] | None, structured_model: Any) -> dict[str, Any] | None:
    from pydantic import ValidationError

    if structured is None:
        return None
    try:
        output: dict[str, Any] = structured_model.model_validate(structured).model_dump()
    except ValidationError:
        return None  # not the structure asked for; the agent sees that metadata is empty
    return output
