"""Simulated people: what they ask, and what they do when the answer is right, or wrong.

The application is `converse`: an agent with a calculator on the official openai client, which keeps the id of its last
reply.  The people are the rest.  They ask word problems with one arithmetic operation in eight wordings; the makers of
the first model thought of four of them.  Nobody who is asked in the end (`held_out`) has a name, a sentence with its
numbers, or a near-duplicate among those who are learned from.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from astuner_flywheel.near import NearDuplicates
from astuner_local.tiny.problems import LARGEST, NAMES, SMALLEST, THINGS, WORDINGS, Problem, is_held_out

MAKERS = range(4)
"""The wordings that the makers thought of: one for each operation."""
EVERYBODY = range(len(WORDINGS))
KNOWN, OTHERS = NAMES[:5], NAMES[5:]
"""Who uses the first model, and who is asked in the end."""

SILENT, CORRECTS, MISTAKEN = 0.2, 0.75, 0.02
"""Share of users who give no opinion; of unhappy ones who write the right answer; of those who err in that."""

SYSTEM_PROMPT = "You solve math problems with a calculator. Answer with \\boxed{}."
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "Numbers, + - * / and parentheses."}},
            "required": ["expression"],
        },
    },
}
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b}
AT_ONCE = 32


@dataclass(frozen=True)
class Asked:
    """One question, and what came of it."""

    question: str
    wording: int
    expected: str
    answer: str
    right: bool


def draw(
    rng: random.Random, count: int, wordings: Sequence[int], people: Sequence[str], *, held_out: bool
) -> list[Problem]:
    """``count`` problems with different questions.

    :param held_out: of the pairs of numbers that are kept for the end, for each wording, or of the others.
    """
    found: dict[str, Problem] = {}
    while len(found) < count:
        wording, a, b = rng.choice(wordings), rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        operator, text = WORDINGS[wording]
        if operator == "-" and a < b:
            a, b = b, a
        if is_held_out(wording, a, b) == held_out:
            shown = a * b if operator == "/" else a
            question = text.format(name=rng.choice(people), things=rng.choice(THINGS), a=shown, b=b)
            found[question] = Problem(question, wording, a, b)
    return list(found.values())


def without_near(questions: Sequence[str], others: Sequence[str]) -> list[str]:
    """Those that nearly repeat none of the others."""
    known = NearDuplicates(numbers_tell_apart=True)
    for question in others:
        known.keep(question, question)
    return [question for question in questions if not known.near(question)]


def calculate(arguments: str) -> str:
    """Return the tool's result, or an error message that the model reads."""
    try:
        left, sign, right = json.loads(arguments)["expression"].split()
        return f"{round(SIGNS[sign](float(left), float(right)), 4):g}"
    except (ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError) as error:
        return f"error: {error}"


async def converse(client: openai.AsyncOpenAI, question: str) -> tuple[str, str]:
    """Return the application's answer and the ID of its completion."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    for _ in range(3):
        completion = await client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            said = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
    return message.content or "", completion.id


def opinion(rng: random.Random, right: bool, expected: str) -> dict[str, Any]:
    """Return a person's feedback on an answer as the body of ``POST /feedback``; empty for people who give none."""
    if rng.random() < SILENT:
        return {}
    mistaken = rng.random() < MISTAKEN
    if right != mistaken:
        return {"rating": 1.0}
    correction = str(int(float(expected)) + 1) if mistaken else expected
    return {"rating": -1.0, **({"correction": correction} if rng.random() < CORRECTS else {})}


async def ask_all(
    access: dict[str, Any], problems: Sequence[Problem], *, feedback_seed: int | None = None
) -> list[Asked]:
    """Everybody asks, a few at a time.

    :param access: what the file says that `astuner serve` named.
    :param feedback_seed: people say what they think; None: they only ask.
    """
    turns = asyncio.Semaphore(AT_ONCE)
    http = openai.DefaultAsyncHttpxClient(trust_env=False)
    async with (
        openai.AsyncOpenAI(base_url=access["base_url"], api_key=access["api_key"], http_client=http) as client,
        httpx.AsyncClient(trust_env=False, timeout=60) as opinions,
    ):

        async def one(problem: Problem) -> Asked:
            async with turns:
                answer, completion_id = await converse(client, problem.question)
                boxed = re.findall(r"\\boxed\{([^}]*)\}", answer)
                right = bool(boxed) and boxed[-1] == problem.answer
                if feedback_seed is not None:
                    rng = random.Random(f"{feedback_seed} {problem.question}")
                    if said := opinion(rng, right, problem.answer):
                        body = {"response_id": completion_id, **said}
                        (await opinions.post(access["feedback_url"], json=body)).raise_for_status()
            return Asked(problem.question, problem.wording, problem.answer, answer, right)

        return list(await asyncio.gather(*map(one, problems)))
