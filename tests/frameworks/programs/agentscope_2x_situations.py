"""AgentScope 2.x: what its `Agent` does besides calling tools, from middleware to permissions and interruption."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentscope.agent import Agent, ContextConfig, InjectionConfig, ModelConfig, ReActConfig
from agentscope.event import (
    ConfirmResult,
    ExternalExecutionResultEvent,
    RequireExternalExecutionEvent,
    RequireUserConfirmEvent,
    UserConfirmResultEvent,
    UserInterruptEvent,
)
from agentscope.mcp import MCPClient, StdioMCPConfig
from agentscope.message import AssistantMsg, TextBlock, ToolResultBlock, UserMsg
from agentscope.middleware import MiddlewareBase
from agentscope.permission import PermissionBehavior, PermissionContext, PermissionDecision, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, ToolBase, Toolkit
from agentscope_2x_parts import SUMMARY, Answer, multiply
from harness import account, call, play, story, tell, thinking_template

from astuner import WorkflowOutput
from astuner.contracts.errors import ModelFailed
from astuner.testing import FakeEngine

logging.getLogger("as").setLevel(logging.CRITICAL)

ALLOW = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="")
DENY = PermissionDecision(behavior=PermissionBehavior.DENY, message="Multiplying is forbidden.")
QUESTION = UserMsg(name="user", content="6 times 7?")
SUMMARISE = "generate_structured_output"
Work = Callable[[Any], Awaitable[WorkflowOutput]]


async def fail(a: int, b: int) -> str:
    """Divide two numbers.

    Args:
        a (int): one
        b (int): the other
    """
    raise RuntimeError(f"no division of {a} today")


async def wait(a: int, b: int) -> str:
    """Wait until cancelled.

    Args:
        a (int): one
        b (int): the other
    """
    await asyncio.Event().wait()
    return ""


async def wait_a_moment(a: int, b: int) -> str:
    """Wait for two seconds.

    Args:
        a (int): one
        b (int): the other
    """
    await asyncio.sleep(2)
    return "waited"


class Submit(ToolBase):
    """A tool that the workflow executes."""

    name = "multiply"
    description = "Multiply two numbers."
    input_schema: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    }
    is_concurrency_safe = True
    is_read_only = False
    is_external_tool = True

    async def check_permissions(self, *_: Any, **__: Any) -> PermissionDecision:
        return ALLOW


def build(
    model: Any,
    tools: Sequence[Any] = (),
    *,
    name: str = "Friday",
    system_prompt: str = "Be brief.",
    max_iters: int = 10,
    clock: bool = False,
    react: dict[str, Any] | None = None,
    **options: Any,
) -> Agent:
    return Agent(
        name=name,
        system_prompt=system_prompt,
        model=model,
        toolkit=Toolkit(tools=list(tools)) if tools else None,
        react_config=ReActConfig(max_iters=max_iters, **(react or {})),
        injection_config=InjectionConfig(inject_runtime_state=clock),
        **options,
    )


def tool(function: Any = multiply, permission: PermissionDecision | None = ALLOW, **options: Any) -> FunctionTool:
    return FunctionTool(function, permission=permission, **options)


def output(*replies: Any, **metadata: Any) -> WorkflowOutput:
    """The workflow's result: the texts of these replies."""
    return WorkflowOutput(
        reward=1.0, metadata={"answers": [reply.get_text_content() or "" for reply in replies], **metadata}
    )


def asking(*questions: str, tools: Sequence[Any] = (), context_size: int = 0, **options: Any) -> Work:
    """A workflow that asks one agent these questions."""

    async def work(tuner: Any) -> WorkflowOutput:
        model = tuner.as_agentscope_model() if context_size else tuner
        if context_size:
            model.context_size = context_size
        agent = build(model, tools, **options)
        replies = [await agent.reply(UserMsg(name="user", content=question)) for question in questions]
        return output(*replies, reasons=[str(reply.finished_reason) for reply in replies])

    return work


# ---- middleware ------------------------------------------------------------------------------------------------------


class Observes(MiddlewareBase):
    """Looks at everything and changes nothing."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def on_model_call(self, agent: Any, input_kwargs: dict[str, Any], next_handler: Any) -> Any:
        self.seen.append(f"model call with {len(input_kwargs['messages'])} messages")
        return await next_handler(**input_kwargs)

    async def on_acting(self, agent: Any, input_kwargs: dict[str, Any], next_handler: Any) -> AsyncIterator[Any]:
        self.seen.append(f"call of {input_kwargs['tool_call'].name}")
        async for chunk in next_handler(**input_kwargs):
            yield chunk


class Hints(MiddlewareBase):
    """Edits the system prompt, and adds a hint to each request which the next one does not have."""

    async def on_system_prompt(self, agent: Any, current_prompt: str) -> str:
        return f"{current_prompt} Think of Euclid."

    async def on_model_call(self, agent: Any, input_kwargs: dict[str, Any], next_handler: Any) -> Any:
        hint = UserMsg(name="user", content=f"Step {len(input_kwargs['messages'])}.")
        return await next_handler(**{**input_kwargs, "messages": [*input_kwargs["messages"], hint]})


class EditsSystemPrompt(MiddlewareBase):
    async def on_system_prompt(self, agent: Any, current_prompt: str) -> str:
        return f"{current_prompt} Think of Euclid."


async def observed(tuner: Any) -> WorkflowOutput:
    middleware = Observes()
    agent = build(tuner, [tool()], middlewares=[middleware])
    return output(await agent.reply(QUESTION), seen=middleware.seen)


# ---- permissions -----------------------------------------------------------------------------------------------------


def confirming(confirmed: bool) -> Work:
    async def work(tuner: Any) -> WorkflowOutput:
        agent = build(tuner, [tool(permission=None)])
        asked = [e async for e in agent.reply_stream(QUESTION) if isinstance(e, RequireUserConfirmEvent)]
        answers = [ConfirmResult(confirmed=confirmed, tool_call=c) for event in asked for c in event.tool_calls]
        answer = UserConfirmResultEvent(reply_id=asked[0].reply_id, confirm_results=answers)
        return output(await agent.reply(answer), asked=len(answers))

    return work


async def never_confirmed(tuner: Any) -> WorkflowOutput:
    """Its answer is judged although the tool still waits for a person."""
    tuner.stream = True
    return output(await build(tuner, [tool(permission=None)]).reply(QUESTION))


async def never_confirmed_and_unread(tuner: Any) -> WorkflowOutput:
    """The same, where the workflow does not return the agent's words."""
    await build(tuner, [tool(permission=None)]).reply(QUESTION)
    return WorkflowOutput(reward=0.0, metadata={"final_answer": ""})


async def external(tuner: Any) -> WorkflowOutput:
    agent = build(tuner, [Submit()])
    asked = [e async for e in agent.reply_stream(QUESTION) if isinstance(e, RequireExternalExecutionEvent)]
    results = [
        ToolResultBlock(id=c.id, name=c.name, output=[TextBlock(text="42")]) for e in asked for c in e.tool_calls
    ]
    answer = ExternalExecutionResultEvent(reply_id=asked[0].reply_id, execution_results=results)
    return output(await agent.reply(answer), asked=len(results))


async def submitted(tuner: Any) -> WorkflowOutput:
    """The call of an external tool is the answer, and no one executes it."""
    agent = build(tuner, [Submit()])
    asked = [e async for e in agent.reply_stream(QUESTION) if isinstance(e, RequireExternalExecutionEvent)]
    return WorkflowOutput(reward=1.0, metadata={"final_answer": asked[0].tool_calls[0].input})


async def withdrawn(tuner: Any) -> WorkflowOutput:
    """The question for permission is withdrawn, and the agent is asked something else."""
    agent = build(tuner, [tool(permission=None)])
    await agent.reply(QUESTION)
    event = UserInterruptEvent(session_id=agent.state.session_id, reply_id=agent.state.reply_id)
    return output(await agent.reply(event), await agent.reply(UserMsg(name="user", content="Never mind. 2 + 2?")))


# ---- MCP -------------------------------------------------------------------------------------------------------------


async def mcp(tuner: Any, mode: PermissionMode = PermissionMode.BYPASS) -> WorkflowOutput:
    server = Path(__file__).with_name("mcp_server.py")
    config = StdioMCPConfig(command=sys.executable, args=[str(server)])
    client = MCPClient(name="numbers", is_stateful=True, mcp_config=config)
    await client.connect()
    try:
        state = AgentState(permission_context=PermissionContext(mode=mode))
        return output(await build(tuner, await client.list_tools(), state=state).reply(QUESTION))
    finally:
        await client.close()


# ---- several agents --------------------------------------------------------------------------------------------------


async def hand_off(tuner: Any) -> WorkflowOutput:
    """Two agents in turn; each hears the other's words, and a third only listens until it is asked."""
    solver = build(tuner.as_agentscope_model("solver"), [tool()], name="solver", system_prompt="Solve it.")
    critic = build(tuner.as_agentscope_model("critic"), name="critic", system_prompt="Criticise it.")
    clerk = build(tuner.as_agentscope_model("clerk"), name="clerk", system_prompt="Take notes.")
    first = await solver.reply(QUESTION)
    second = await critic.reply(AssistantMsg(name="solver", content=first.get_text_content()))
    for message in (first, second):
        await clerk.observe(message)
    third = await solver.reply(UserMsg(name="critic", content=second.get_text_content()))
    return output(first, second, third, await clerk.reply(UserMsg(name="user", content="What was said?")))


async def one_model_for_two(tuner: Any) -> WorkflowOutput:
    """Two agents with one unnamed model."""
    solver = build(tuner, [tool()], name="solver", system_prompt="Solve it.")
    critic = build(tuner, name="critic", system_prompt="Criticise it.")
    first = await solver.reply(QUESTION)
    second = await critic.reply(UserMsg(name="solver", content=first.get_text_content()))
    return output(first, second, await solver.reply(UserMsg(name="critic", content=second.get_text_content())))


# ---- structured replies ----------------------------------------------------------------------------------------------


def structured(max_iters: int = 10, grace: int = 2) -> Work:
    async def work(tuner: Any) -> WorkflowOutput:
        agent = build(tuner, [tool()], max_iters=max_iters, react={"structured_output_grace_iters": grace})
        reply = await agent.reply(QUESTION, structured_schema=Answer)
        return output(reply, result=reply.structured_output, reasons=[str(reply.finished_reason)])

    return work


# ---- interruption, retries -------------------------------------------------------------------------------------------


class HangsAt(FakeEngine):
    """Does not answer its second call."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if len(self.calls) == 1 and not getattr(self, "hung", False):
            self.hung = True
            await asyncio.Event().wait()
        return await super().generate(*arguments, **options)


class FailsOnce(FakeEngine):
    """Raises in its second call, once."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if len(self.calls) == 1 and not getattr(self, "failed", False):
            self.failed = True
            raise ModelFailed("the GPU is busy")
        return await super().generate(*arguments, **options)


def interrupted(*tools: Any) -> Work:
    """Cancels a reply in the middle, and asks again."""

    async def work(tuner: Any) -> WorkflowOutput:
        agent = build(tuner, tools)
        reply = asyncio.ensure_future(agent.reply(QUESTION))
        await asyncio.sleep(1.0)
        reply.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reply
        first = [] if reply.cancelled() else [reply.result()]
        return output(*first, await agent.reply(UserMsg(name="user", content="Go on.")))

    return work


def retrying(fallback: bool) -> Work:
    async def work(tuner: Any) -> WorkflowOutput:
        model = tuner.as_agentscope_model()
        config = ModelConfig(fallback_model=model) if fallback else ModelConfig(max_retries=2)
        return output(await build(model, [tool()], model_config=config).reply(QUESTION))

    return work


async def streamed(tuner: Any) -> WorkflowOutput:
    tuner.stream = True
    agent = build(tuner, [tool()])
    kinds = [type(e).__name__ async for e in agent.reply_stream(QUESTION)]
    return WorkflowOutput(reward=1.0, metadata={"events": kinds})


def run(work: Work, replies: Any, **options: Any) -> dict[str, Any]:
    return account(play(work, replies, settings="  rollout: {max_retries: 0}", **options))


def run_open(work: Work, replies: Any, **options: Any) -> dict[str, Any]:
    """An episode that may end without a reward."""
    return story(play(work, replies, settings="  rollout: {max_retries: 0}", **options))


def summarising(*replies: str) -> Callable[[str], str]:
    """The replies in order, and a summary whenever one is requested."""
    rest = list(replies)
    return lambda prompt: call(SUMMARY, SUMMARISE) if f'"{SUMMARISE}"' in prompt else rest.pop(0)


TWO_CALLS = call() + "\n" + call('{"a":2,"b":3}')
MCP_CALL = call('{"lengths": [{"value": 1.5, "unit": "mi"}, "none"]}', "mcp__numbers__add_lengths")
FINISH = call('{"result": 42}', "GenerateStructuredOutput")
WRONG = call('{"result": "many"}', "GenerateStructuredOutput")
THOUGHT = "<think>\nHm.\n</think>\n\n"
LONG = "x" * 400
SHORT = ContextConfig(reserve_ratio=0.1)
WITH_TOOL = ContextConfig(
    trigger_ratio=0.9, reserve_ratio=0.05, context_buffer_ratio=0.89, compression_tool_enabled=True
)

SITUATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "middleware_that_observes": lambda: run(observed, [call(), "42"]),
    "middleware_that_edits_the_system_prompt": lambda: run(
        asking("6 times 7?", tools=[tool()], middlewares=[EditsSystemPrompt()]), [call(), "42"]
    ),
    "middleware_that_adds_hints": lambda: run(
        asking("6 times 7?", tools=[tool()], middlewares=[Hints()]), [call(), "42"]
    ),
    "allowed": lambda: run(asking("6 times 7?", tools=[tool()]), [call(), "42"]),
    "denied": lambda: run(asking("6 times 7?", tools=[tool(permission=DENY)]), [call(), "Sorry."]),
    "confirmed": lambda: run(confirming(True), [call(), "42"]),
    "rejected": lambda: run(confirming(False), [call(), "Sorry."]),
    "never_confirmed": lambda: run_open(never_confirmed, [call()]),
    "never_confirmed_and_unread": lambda: run_open(never_confirmed_and_unread, [call()]),
    "withdrawn": lambda: run(withdrawn, [call(), "four"]),
    "external": lambda: run(external, [call(), "42"]),
    "never_executed": lambda: run_open(asking("6 times 7?", tools=[Submit()]), [call()]),
    "submitted": lambda: run_open(submitted, [call()]),
    "mcp": lambda: run(mcp, [call(name="mcp__numbers__multiply"), MCP_CALL, "42"]),
    "mcp_never_confirmed": lambda: run_open(
        lambda tuner: mcp(tuner, PermissionMode.DEFAULT), [call(name="mcp__numbers__multiply")]
    ),
    "hand_off": lambda: run(hand_off, [call(), "42", "Really?", "Yes.", "Solver and critic agreed on 42."]),
    "one_model_for_two": lambda: run(one_model_for_two, [call(), "42", "Really?", "Yes."]),
    "structured": lambda: run(structured(), [call(), WRONG, FINISH]),
    "structured_after_text": lambda: run(structured(), ["It is 42.", FINISH]),
    "structured_in_grace": lambda: run(structured(max_iters=1), [call(), "42", FINISH]),
    "structured_never": lambda: run(structured(max_iters=1), ["It is 42."] * 9),
    "compressed_by_threshold": lambda: run(
        asking(LONG, "y" * 400, "And?", context_size=250, context_config=SHORT), summarising("fine", "good", "bye")
    ),
    "compressed_by_tool": lambda: run(
        asking(LONG, "y" * 400, tools=[tool()], context_size=4000, context_config=WITH_TOOL),
        summarising("fine", call("{}", "CompressContext"), "good"),
    ),
    "summary_that_cannot_be_read": lambda: run(
        asking(LONG, "y" * 400, context_size=250, context_config=SHORT),
        lambda prompt: "no idea" if f'"{SUMMARISE}"' in prompt else "fine",
    ),
    "concurrent_tools": lambda: run(asking("6 times 7?", tools=[tool()]), [TWO_CALLS, "42"]),
    "sequential_tools": lambda: run(asking("6 times 7?", tools=[tool(is_concurrency_safe=False)]), [TWO_CALLS, "42"]),
    "tool_that_raises": lambda: run(asking("6 by 7?", tools=[tool(fail)]), [call(name="fail"), "Sorry."]),
    "tool_retries": lambda: run(
        asking("6 by 7?", tools=[tool(fail)], clock=True), [*[call(name="fail")] * 4, "Sorry."]
    ),
    "retried": lambda: run_open(retrying(fallback=False), [call(), "42"], engine_type=FailsOnce),
    "fallback": lambda: run_open(retrying(fallback=True), [call(), "42"], engine_type=FailsOnce),
    "interrupted_tool": lambda: run(interrupted(tool(wait)), [call(name="wait"), "Done."]),
    "interrupted_model": lambda: run(interrupted(tool()), [call(), "Done."], engine_type=HangsAt),
    "streamed": lambda: run(streamed, [THOUGHT + call(), "42"], chat_template=thinking_template()),
    "only_a_thought": lambda: run(
        asking("6 times 7?", tools=[tool()]), [THOUGHT, "42"], chat_template=thinking_template()
    ),
    "long_history": lambda: run(asking(*(f"{n} times 7?" for n in range(20)), tools=[tool()]), [call(), "42"] * 20),
    "empty_answer": lambda: run(asking("6 times 7?", "Well?", tools=[tool()]), [call(), "", "42"]),
    "out_of_iterations": lambda: run(
        asking("6 times 7?", "Well?", tools=[tool()], max_iters=2), [call(), call(), "It is 42.", "43"]
    ),
    "call_after_the_last_iteration": lambda: run(
        asking("6 times 7?", "Well?", tools=[tool()], max_iters=1), [call(), call(), "43"]
    ),
}


if __name__ == "__main__":
    tell({situation: SITUATIONS[situation]() for situation in sys.argv[1:] or SITUATIONS})
