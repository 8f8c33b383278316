"""AgentScope 2.x: an `Agent` on ``model=model_tuner`` in situations that occur in training."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import agentscope
import agentscope.formatter
from agentscope.agent import Agent, ContextConfig, InjectionConfig, ReActConfig
from agentscope.message import UserMsg
from agentscope.permission import PermissionContext, PermissionMode
from agentscope.state import AgentState
from agentscope.tool import FunctionTool, ToolChoice, Toolkit
from agentscope_2x_parts import SUMMARY, Answer, multiply
from harness import call, play, story, tell, thinking_template

from astuner import WorkflowOutput
from astuner.testing import FakeEngine

logging.getLogger("as").setLevel(logging.CRITICAL)


ROLES = "  agents:\n    wolf: {}\n    villager:\n      train: false"


def build(model: Any, *, tools: bool = True, max_iters: int = 10, injected: bool = False, **options: Any) -> Agent:
    return Agent(
        name="Friday",
        system_prompt="Be brief.",
        model=model,
        toolkit=Toolkit(tools=[FunctionTool(multiply)]) if tools else None,
        state=AgentState(permission_context=PermissionContext(mode=PermissionMode.BYPASS)),  # else a person is asked
        react_config=ReActConfig(max_iters=max_iters),
        injection_config=InjectionConfig(inject_runtime_state=injected),
        **options,
    )


def conversation(
    *questions: str,
    structured: bool = False,
    stream: bool = False,
    named: bool = False,
    formatter: str = "",
    context_size: int = 0,
    **options: Any,
):
    """A workflow that asks one agent these questions."""

    async def work(tuner: Any) -> WorkflowOutput:
        model = tuner.as_agentscope_model(agent_name="solver") if named or formatter or context_size else tuner
        model.stream = stream
        if formatter:
            model.formatter = getattr(agentscope.formatter, formatter)()
        if context_size:
            model.context_size = context_size
        agent = build(model, **options)
        answers, results = [], []
        for i, question in enumerate(questions):
            asked = {"structured_schema": Answer} if structured and i == 0 else {}
            reply = await agent.reply(UserMsg(name="user", content=question), **asked)
            answers.append(reply.get_text_content())
            results.append(reply.structured_output)
        calls = [b.input for m in agent.state.context for b in m.content if b.type == "tool_call"]
        metadata = {"answers": answers, "results": results, "calls": calls, "summary": str(agent.state.summary or "")}
        return WorkflowOutput(reward=1.0, metadata=metadata)

    return work


async def events(tuner: Any) -> WorkflowOutput:
    """What a user interface sees of a streamed answer."""
    tuner.stream = True
    agent = build(tuner)
    kinds = [type(e).__name__ async for e in agent.reply_stream(UserMsg(name="user", content="6 times 7?"))]
    return WorkflowOutput(reward=1.0, metadata={"events": kinds})


async def two_agents(tuner: Any) -> WorkflowOutput:
    """They are told apart by name, though they speak at once."""
    models = [tuner.as_agentscope_model(agent_name=f"{role} 1", role=role) for role in ("wolf", "villager")]
    agents = [build(model, tools=False) for model in models]

    async def ask(agent: Agent) -> None:
        for question in ("Who are you?", "Whom do you suspect?"):
            await agent.reply(UserMsg(name="moderator", content=question))

    await asyncio.gather(*(ask(agent) for agent in agents))
    return WorkflowOutput(reward=1.0)


class Hangs(FakeEngine):
    """Never answers the second call."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.calls:
            await asyncio.Event().wait()
        return await super().generate(*arguments, **options)


async def structured_call(tuner: Any) -> WorkflowOutput:
    """The model's own structured output, as the compression of the context uses it."""
    answers = []
    for stream in (False, True):
        tuner.stream = stream
        for _ in range(2):
            try:
                response = await tuner.generate_structured_output([UserMsg(name="user", content="6 times 7?")], Answer)
                answers.append(response.content)
            except Exception as e:
                answers.append(type(e).__name__)
    return WorkflowOutput(reward=1.0, metadata={"answers": answers})


async def responses(tuner: Any) -> WorkflowOutput:
    """The model alone: ids, usage, and which tools a choice leaves."""
    model = tuner.as_agentscope_model()
    tools = await Toolkit(tools=[FunctionTool(multiply)]).get_tool_schemas()
    ask = [UserMsg(name="user", content="2 + 2?")]
    first = await model(ask, tools=tools, tool_choice=ToolChoice(mode="none"))
    second = await model(ask, tools=tools, tool_choice=ToolChoice(mode="required", tools=["multiply"]))
    refused = []
    for options in ({"tool_choice": ToolChoice(mode="fly")}, {"presence_penalty": 1.0}):
        try:
            await model(ask, tools=tools, **options)
        except ValueError as e:
            refused.append(str(e))
    metadata = {
        "ids": [first.id, second.id],
        "usage": [first.usage.input_tokens, first.usage.output_tokens],
        "kinds": [block.type for block in (*first.content, *second.content)],
        "refused": refused,
        "context_size": tuner.context_size,
        "counted": await tuner.count_tokens(ask, tools),
        "media": tuner.formatter.supported_input_media_types,
    }
    return WorkflowOutput(reward=1.0, metadata=metadata)


FINISH = call('{"result": 42}', "GenerateStructuredOutput")
SUMMARY_CALL = call(SUMMARY, "generate_structured_output")

tell(
    {
        "version": agentscope.__version__,
        "tool_loop": story(
            play(
                conversation("6 times 7?"),
                [
                    "Let me compute.\n" + call('{"a":6,"b":7}'),
                    call('{ "b": 2, "a":\t3 }'),
                    call('{"a": 1, "b": "\\u4f60"}'),
                    call('{"a": 1, "b": "你 café"}'),
                    call(name="unknown"),
                    "So the answer is 42.",
                ],
            )
        ),
        "parallel_calls": story(
            play(conversation("6 times 7?"), [call() + "\n" + call('{"a":2,"b":3}'), call(), "42"])
        ),
        "dashscope_formatter": story(
            play(
                conversation("6 times 7?", "And now?", formatter="DashScopeChatFormatter"),
                ["Well.\n" + call(), "42", call(), "43"],
            )
        ),
        "streaming": story(
            play(conversation("6 times 7?", "Sure?", stream=True), ["Let me see.\n" + call('{"a":6,"b":7}'), "42", ""])
        ),
        "events": story(play(events, ["Let me see.\n" + call(), "42"])),
        "chat_model": story(play(conversation("6 times 7?", named=True), [call(), "42"])),
        "further_questions": story(
            play(conversation("2 + 2?", "And 2 * 2?", "Sure?", tools=False), ["  four \n", "four again", "yes"])
        ),
        "further_questions_with_tools": story(
            play(conversation("2 + 2?", "And 2 * 2?"), ["four", call('{"a":2,"b":2}'), "four again"])
        ),
        "out_of_rounds": story(play(conversation("6 times 7?", max_iters=1), [call(), "It is 42."])),
        "structured_reply": story(
            play(
                conversation("6 times 7?", "Thank you.", structured=True), [call(), FINISH, "You are welcome.", "Bye."]
            )
        ),
        "structured_call": story(
            play(
                structured_call,
                [call(args, "generate_structured_output") for args in ('{"result": 42}', '{"result": "many"}')] * 2,
            )
        ),
        "thinking": story(
            play(
                conversation("2 * 2?", "2 + 3?"),
                [
                    "<think>\nhm\n</think>\n\n" + call('{"a":2,"b":2}'),
                    "<think>\nwell\n</think>\n\nfour",
                    "<think>\nhm\n</think>\n\nfive",
                ],
                chat_template=thinking_template(),
            )
        ),
        "runtime_state": story(
            play(conversation("6 times 7?", "And 7 times 6?", injected=True), [call(), "42", "42 again"])
        ),
        "several_speakers": story(
            play(
                conversation("6 times 7?", "And 7 times 6?", formatter="OpenAIMultiAgentFormatter"),
                [call(), "42", call(), "42"],
            )
        ),
        "compressed": story(
            play(
                conversation(
                    "x" * 400, "y" * 400, tools=False, context_size=200, context_config=ContextConfig(reserve_ratio=0.1)
                ),
                lambda prompt: SUMMARY_CALL if "generate_structured_output" in prompt else "fine",
            )
        ),
        "responses": story(play(responses, [call(), call()])),
        "two_agents": story(play(two_agents, lambda prompt: f"I am {len(prompt)}.", settings=ROLES)),
        "timed_out": story(
            play(
                conversation("6 times 7?"),
                [call()],
                engine_type=Hangs,
                settings="  rollout:\n    episode_timeout: 0.5",
            )
        ),
        "prompt_too_long": story(play(conversation("6 times 7?"), ["42"], max_model_len=20)),
    }
)
