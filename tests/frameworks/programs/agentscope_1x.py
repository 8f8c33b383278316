"""AgentScope 1.x, 1.0.7 to 1.0.21: a `ReActAgent` on ``model=model_tuner`` in situations that occur in training."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import agentscope.formatter
from agentscope.agent import ReActAgent
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.tool import Toolkit, ToolResponse
from harness import call, play, story, tell, thinking_template
from pydantic import BaseModel

from astuner import WorkflowOutput
from astuner.testing import FakeEngine

logging.getLogger("as").setLevel(logging.CRITICAL)
ALWAYS_A_TOOL = agentscope.__version__ == "1.0.7"  # the last version whose agents end by calling generate_response


ROLES = "  agents:\n    wolf: {}\n    villager:\n      train: false"


class Answer(BaseModel):
    result: int


async def multiply(a: int, b: int) -> ToolResponse:
    """Multiply two numbers.

    Args:
        a (int): one
        b (int): the other
    """
    return ToolResponse(content=[TextBlock(type="text", text=str(a * b))])


def build(model: Any, *, tools: bool = True, formatter: str = "DashScopeChatFormatter", **options: Any) -> ReActAgent:
    toolkit = Toolkit()
    if tools:
        toolkit.register_tool_function(multiply)
    agent = ReActAgent(
        name="Friday",
        sys_prompt="Be brief.",
        model=model,
        formatter=getattr(agentscope.formatter, formatter)(),
        toolkit=toolkit,
        memory=InMemoryMemory(),
        **options,
    )
    agent.set_console_output_enabled(False)
    return agent


def conversation(*questions: str, structured: bool = False, stream: bool = False, named: bool = False, **options: Any):
    """A workflow that asks one agent these questions."""

    async def work(tuner: Any) -> WorkflowOutput:
        model = tuner.as_agentscope_model(agent_name="solver") if named else tuner
        model.stream = stream
        agent = build(model, **options)
        answers, metadata = [], []
        for i, question in enumerate(questions):
            asked = {"structured_model": Answer} if structured and i == 0 else {}
            reply = await agent.reply(Msg("user", question, role="user"), **asked)
            answers.append(reply.get_text_content())
            metadata.append((reply.metadata or {}).get("result"))
        blocks = reply.content if isinstance(reply.content, list) else []
        kinds = [block["type"] for block in blocks]
        return WorkflowOutput(reward=1.0, metadata={"answers": answers, "results": metadata, "blocks": kinds})

    return work


async def two_agents(tuner: Any) -> WorkflowOutput:
    """They are told apart by name, though they speak at once."""
    models = [tuner.as_agentscope_model(agent_name=f"{role} 1", role=role) for role in ("wolf", "villager")]
    agents = [build(model, tools=False) for model in models]

    async def ask(agent: ReActAgent) -> None:
        for question in ("Who are you?", "Whom do you suspect?"):
            await agent.reply(Msg("moderator", question, role="user"))

    await asyncio.gather(*(ask(agent) for agent in agents))
    return WorkflowOutput(reward=1.0)


class Hangs(FakeEngine):
    """Never answers the second call."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.calls:
            await asyncio.Event().wait()
        return await super().generate(*arguments, **options)


async def structured_call(tuner: Any) -> WorkflowOutput:
    """The model's own structured output, as memory compression and query rewriting use it."""
    answers = []
    for _ in range(3):
        response = await tuner([{"role": "user", "content": "6 times 7?"}], structured_model=Answer)
        answers.append(response.metadata)
    return WorkflowOutput(reward=1.0, metadata={"answers": answers})


FINISH = call('{"response": "It is 42.", "result": 42}' if ALWAYS_A_TOOL else '{"result": 42}', "generate_response")

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
            play(
                conversation("6 times 7?", parallel_tool_calls=True),
                [call() + "\n" + call('{"a":2,"b":3}'), call(), "42"],
            )
        ),
        "openai_formatter": story(
            play(
                conversation("6 times 7?", "And now?", formatter="OpenAIChatFormatter"),
                ["Well.\n" + call(), "42", call(), "43"],
            )
        ),
        "streaming": story(play(conversation("6 times 7?", stream=True), [call(), "42"])),
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
                conversation("6 times 7?", "Thank you.", structured=True),
                [call(), FINISH, *([] if ALWAYS_A_TOOL else ["It is 42."]), "You are welcome."],
            )
        ),
        "structured_call": story(
            play(
                structured_call,
                [call(args, "generate_structured_output") for args in ('{"result": 42}', '{"result": "many"}')]
                + ["42"],
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
        "several_speakers": story(
            play(
                conversation("6 times 7?", "And 7 times 6?", formatter="DashScopeMultiAgentFormatter"),
                [call(), "42", call(), "42"],
            )
        ),
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
