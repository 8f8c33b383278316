"""Adapt AgentScope 2.x: implement its model interface with `ModelTuner.chat`.

A 2.x model receives ``Msg`` objects, which its formatter converts to OpenAI-style messages, and answers with blocks
that are objects. agentscope is imported when a model is created.

Invariant: a block of a tool call contains the model's own text of the arguments, which 2.x returns unchanged.

An `Agent` keeps the blocks of a response and records in each tool call whether it waits for a person's permission or
for an external program. The model keeps the blocks too, so it can report an agent that waits forever.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from astuner.contracts.errors import MissingDependency, safe_text
from astuner.contracts.parts import Waiting
from astuner_agentscope.face import wanted
from astuner_agentscope.tool_agent import Tool, ToolAgent

if TYPE_CHECKING:
    from astuner import ModelTuner, WorkflowOutput
    from astuner.contracts.messages import ChatReply

ENDLESS = 1 << 40
"""Context size in tokens. An `Agent` rewrites its history at 80 % of it; the engine enforces the real limit."""
WAITING_NOTICE = "I'm waiting for your permission"
"""First words of an `Agent`'s reply when it waits for a permission or an external program."""


@functools.cache
def model_class() -> Any:
    """Return the ``ChatModelBase`` for one agent.

    :raises astuner.contracts.errors.MissingDependency: AgentScope cannot be imported.
    """
    try:
        from agentscope.credential import CredentialBase
        from agentscope.formatter import OpenAIChatFormatter
        from agentscope.message import ToolCallState
        from agentscope.model import ChatModelBase
        from agentscope.tool import ToolChoice
    except ImportError as e:
        raise MissingDependency(
            f"AgentScope 2.x cannot be imported ({e}). Install its dependencies with: "
            f"pip install 'astuner-agentscope[agentscope2]'"
        ) from e

    class AgentScopeModel(ChatModelBase):
        """The model in training, as one agent uses it."""

        def __init__(self, tuner: ModelTuner, agent_name: str, role: str | None) -> None:
            super().__init__(
                credential=CredentialBase(),  # not needed, because the model runs in this process
                model=tuner.model_name,
                parameters=self.Parameters(),
                stream=False,
                max_retries=0,  # ASTuner retries entire episodes
                context_size=ENDLESS,
            )
            self.formatter = OpenAIChatFormatter(input_types=["text/plain"])
            self._tuner = tuner
            self.agent_name = agent_name
            self.role = role
            self._calls: list[Any] = []

        async def _call_api(
            self, model_name: str, messages: Any, tools: Any = None, tool_choice: Any = None, **options: Any
        ) -> Any:
            """Return a ``ChatResponse``, or an iterator over responses if ``stream`` is set."""
            choice = None
            if tool_choice is not None:
                self._validate_tool_choice(tool_choice, tools)
                choice = tool_choice.mode
                if tool_choice.tools:
                    tools = [tool for tool in tools if tool["function"]["name"] in tool_choice.tools]
            started = time.perf_counter()
            reply = await self._tuner.chat(
                await self.formatter.format(messages),
                tools,
                agent_name=self.agent_name,
                role=self.role,
                tool_choice=choice,
                **wanted(options),
            )
            seconds = time.perf_counter() - started
            blocks = _blocks(reply)
            self._calls += [block for block in blocks if block.type == "tool_call"]
            response = functools.partial(_response, reply, blocks, seconds)
            return _stream(response) if self.stream else response(is_last=True)

        async def generate_structured_output(self, messages: Any, structured_model: Any, **options: Any) -> Any:
            """Make one attempt, without AgentScope's own fallbacks, which first force the tool.

            :raises agentscope.exception.StructuredOutputError: The model returned no object of that schema.
            """
            options.setdefault("tool_choice", ToolChoice(mode="auto"))
            return await super().generate_structured_output(messages, structured_model, **options)

        def find_waiting(self, output: WorkflowOutput) -> Waiting | None:
            """Return a tool call of this agent that no one has permitted, or whose external result is missing.

            A call of an external tool may itself be the answer; it counts only if the workflow returned the notice.
            """
            waiting = [call for call in self._calls if call.state in (ToolCallState.ASKING, ToolCallState.SUBMITTED)]
            if not waiting:
                return None
            returned = (output.response, *output.metadata.values())
            is_answer = any(WAITING_NOTICE in safe_text(value) for value in returned)
            for call in waiting:
                if call.state == ToolCallState.ASKING:
                    return Waiting(_ask_permission(self.agent_name, call.name), is_answer)
                if is_answer:
                    return Waiting(_ask_result(self.agent_name, call.name), is_answer)
            return None

    return AgentScopeModel


class ReActToolAgent(ToolAgent):
    """AgentScope 2.x's `Agent`, which calls its tools without permission and has no access to the time."""

    def __init__(self, model: Any, name: str, system_prompt: str, tools: Sequence[Tool], max_iters: int) -> None:
        model_class()  # raises with an explanation if a package is missing
        from agentscope.agent import Agent, InjectionConfig, ReActConfig

        is_shared = all(inspect.isfunction(tool) and "<locals>" not in tool.__qualname__ for tool in tools)
        self.agent = Agent(
            name=name,
            system_prompt=system_prompt,
            model=model,
            toolkit=(_shared_toolkit if is_shared else _make_toolkit)(*tools),
            react_config=ReActConfig(max_iters=max_iters, interruption_raise_cancelled_error=True),
            injection_config=InjectionConfig(inject_runtime_state=False),
        )

    async def reply(self, text: str, sender: str = "user") -> str:
        from agentscope.message import TextBlock, UserMsg

        reply = await self.agent.reply(UserMsg(name=sender, content=text))
        answer = reply.get_text_content() or ""
        if not answer:  # AgentScope omits an empty reply, and then the next request would not continue this one
            self.agent.state.append_context(self.agent.name, [TextBlock(text="")])
        return answer


def _make_toolkit(*tools: Tool) -> Any:
    from agentscope.permission import PermissionBehavior, PermissionDecision
    from agentscope.tool import FunctionTool, Toolkit

    allowed = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
    return Toolkit(tools=[FunctionTool(tool, permission=allowed) for tool in tools])


_shared_toolkit = functools.lru_cache(maxsize=32)(_make_toolkit)
"""Toolkits of module-level functions, which have no state of an episode. Creating one takes as long as a model call."""


def _ask_permission(agent: str, tool: str) -> str:
    return (
        f"agent {agent!r} waits for a person's permission to call the tool {tool!r}. Make the tool with "
        "FunctionTool(…, permission=PermissionDecision(behavior=PermissionBehavior.ALLOW, message='')), or for MCP "
        "tools the agent with state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS))"
    )


def _ask_result(agent: str, tool: str) -> str:
    return (
        f"agent {agent!r} waits for the result of the external tool {tool!r}. Pass the result with "
        "agent.reply(ExternalExecutionResultEvent(…))"
    )


def _response(reply: ChatReply, blocks: Sequence[Any], seconds: float, *, is_last: bool) -> Any:
    from agentscope.model import ChatResponse, ChatUsage

    return ChatResponse(
        content=list(blocks),
        is_last=is_last,
        id=reply.reply_id,  # links a message to its turn
        usage=ChatUsage(input_tokens=reply.prompt_tokens, output_tokens=reply.completion_tokens, time=seconds),
    )


async def _stream(response: Callable[..., Any]) -> AsyncIterator[Any]:
    """Yield one delta and then the complete response, whose blocks the agent keeps."""
    yield response(is_last=False)
    yield response(is_last=True)


def _blocks(reply: ChatReply) -> list[Any]:
    from agentscope.message import TextBlock, ThinkingBlock, ToolCallBlock

    blocks: list[Any] = []
    if reply.reasoning:
        blocks.append(ThinkingBlock(thinking=reply.reasoning))
    if reply.text:
        blocks.append(TextBlock(text=reply.text))
    for call in reply.tool_calls:
        blocks.append(ToolCallBlock(id=call["id"], name=call["function"]["name"], input=call["function"]["arguments"]))
    return blocks
