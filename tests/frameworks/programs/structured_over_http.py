"""Frameworks that ask for an answer with a structure, over HTTP; and models that give it in some way, or do not."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from anthropic import AsyncAnthropic
from example_tools import calculator
from harness import call, play, story, tell
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai import NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from astuner import WorkflowOutput

QUESTION = "What is 6 * 7?"


class Number(BaseModel):
    result: int


def workflow(ask: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[WorkflowOutput]]:
    """``ask`` gives a `Number`, or something else, or raises."""

    async def work(tuner: Any) -> WorkflowOutput:
        try:
            answer = await ask(tuner)
        except Exception as error:
            if tuner.failure is not None:
                raise
            return WorkflowOutput(reward=0.0, metadata={"raised": type(error).__name__, "says": str(error)[:500]})
        return WorkflowOutput(reward=1.0, metadata={"answer": answer.result if isinstance(answer, Number) else answer})

    return work


async def openai_chat(tuner: Any) -> Any:
    async with tuner.as_openai_client() as client:
        messages = [{"role": "user", "content": QUESTION}]
        said = await client.chat.completions.parse(model="astuner", messages=messages, response_format=Number)
    return said.choices[0].message.parsed or f"refused: {said.choices[0].message.refusal}"


async def openai_responses(tuner: Any) -> Any:
    async with tuner.as_openai_client() as client:
        said = await client.responses.parse(model="astuner", input=QUESTION, text_format=Number)
    return said.output_parsed or f"refused: {said.output[0].content[0].refusal}"


async def anthropic(tuner: Any) -> Any:
    access = tuner.base_url_and_key()
    async with AsyncAnthropic(base_url=access.anthropic_base_url, api_key=access.api_key) as client:
        messages = [{"role": "user", "content": QUESTION}]
        said = await client.messages.parse(model="astuner", max_tokens=99, messages=messages, output_format=Number)
    return said.parsed_output or f"refused: {said.stop_reason}"


def openai_agents(api: Any) -> Callable[[Any], Awaitable[Any]]:
    async def ask(tuner: Any) -> Any:
        async with tuner.as_openai_client() as client:
            agent = Agent("math", model=api("astuner", client), tools=[function_tool(calculator)], output_type=Number)
            return (await Runner.run(agent, QUESTION)).final_output

    return ask


def langchain(structure: Any) -> Callable[[Any], Awaitable[Any]]:
    async def ask(tuner: Any) -> Any:
        url, key = tuner.base_url_and_key()
        model = ChatOpenAI(model="astuner", base_url=url, api_key=key)
        agent = create_agent(model, tools=[calculator], response_format=structure)
        result = await agent.ainvoke({"messages": [{"role": "user", "content": QUESTION}]})
        return result.get("structured_response", "nothing")

    return ask


def pydantic_ai(structure: Any) -> Callable[[Any], Awaitable[Any]]:
    async def ask(tuner: Any) -> Any:
        url, key = tuner.base_url_and_key()
        model = OpenAIChatModel("astuner", provider=OpenAIProvider(base_url=url, api_key=key))
        return (await PydanticAgent(model, tools=[calculator], output_type=structure).run(QUESTION)).output

    return ask


set_tracing_disabled(True)
logging.disable(logging.CRITICAL)
USE = call('{"expression":"6*7"}', "calculator")
TEXT = '{"result": 42}'
WAYS = {
    "openai_chat": (openai_chat, "generate_structured_output", []),
    "openai_responses": (openai_responses, "generate_structured_output", []),
    "anthropic": (anthropic, "generate_structured_output", []),
    "openai_agents_chat": (openai_agents(OpenAIChatCompletionsModel), "generate_structured_output", [USE]),
    "openai_agents_responses": (openai_agents(OpenAIResponsesModel), "generate_structured_output", [USE]),
    "langchain": (langchain(Number), "Number", [USE]),
    "langchain_provider": (langchain(ProviderStrategy(Number)), "generate_structured_output", [USE]),
    "pydantic_ai": (pydantic_ai(Number), "final_result", [USE]),
    "pydantic_ai_native": (pydantic_ai(NativeOutput(Number)), "generate_structured_output", [USE]),
}
UNCHECKED = "  rollout: {max_retries: 0, compute_madness_checklist: []}"
tell(
    {
        name: {
            "by_call": story(play(workflow(ask), [*before, call(TEXT, tool)])),
            "by_text": story(play(workflow(ask), [*before, TEXT, call(TEXT, tool), "Well."], settings=UNCHECKED)),
            "not": story(play(workflow(ask), [*before, "It is 42.", "It is 42.", "It is 42."], settings=UNCHECKED)),
        }
        for name, (ask, tool, before) in WAYS.items()
    }
)
