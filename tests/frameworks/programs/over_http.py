"""An agent of ``examples/frameworks`` in situations that occur in training, over HTTP.

Arguments: the example's file, its class, and how its model speaks: ``text`` (calls tools, ends with a text),
``final_answer`` (ends with a tool call) or ``code`` (writes Python).
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from harness import ROOT, call, play, story, tell, thinking_template

from astuner.contracts.errors import ModelFailed
from astuner.rollout.turns import build_samples
from astuner.testing import FakeEngine
from astuner_gateway.endpoint.handler import Handler

FILE, CLASS, STYLE = sys.argv[1:]
VARIATIONS = f"""
from {Path(FILE).stem} import {CLASS}

class Streaming({CLASS}):
    streaming = True

class Impostor({CLASS}):
    def execute(self, workflow_task, model_tuner):
        return super().execute(workflow_task, WrongKey(model_tuner))

class WrongKey:
    def __init__(self, tuner):
        self.tuner = tuner

    def base_url_and_key(self):
        right = self.tuner.base_url_and_key()
        return type(right)(right.base_url, "sk-astuner-wrong", right.model)

    def as_openai_client(self, **options):
        return self.tuner.as_openai_client(**options).with_options(api_key="sk-astuner-wrong")
"""
TEMPLATES = ROOT / "plugins" / "astuner_families" / "tests" / "templates"
seen: list[int] = []
"""The statuses of the endpoint's answers."""

answer_request = Handler.__call__


async def noted(self: Handler, request: Any) -> Any:
    response = await answer_request(self, request)
    seen.append(response.status)
    return response


Handler.__call__ = noted  # type: ignore[method-assign]


class Breaks(FakeEngine):
    """Fails at the second call."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.calls:
            raise ModelFailed("the GPU is on fire")
        return await super().generate(*arguments, **options)


class Hangs(FakeEngine):
    """Never answers the second call."""

    async def generate(self, *arguments: Any, **options: Any) -> Any:
        if self.calls:
            await asyncio.Event().wait()
        return await super().generate(*arguments, **options)


def use(arguments: str = '{"expression":"6*7"}', text: str = "") -> str:
    """The model uses its tool."""
    if STYLE == "code":
        return f"{text}\n<code>\nprint(calculator(**{arguments}))\n</code>".lstrip()
    return text + "\n" * bool(text) + call(arguments, "calculator")


def end(text: str = "It is \\boxed{42}.") -> str:
    """The model's last words."""
    if STYLE == "code":
        return f"<code>\nfinal_answer({text!r})\n</code>"
    return text if STYLE == "text" else call(f'{{"answer":"{text}"}}'.replace("\\", "\\\\"), "final_answer")


def in_xml(reply: str) -> str:
    """The same reply as Qwen3.5 writes it, behind a thought that its template has begun."""

    def rewritten(found: re.Match[str]) -> str:
        said = json.loads(found[1])
        given = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in said["arguments"].items())
        return f"<tool_call>\n<function={said['name']}>\n{given}</function>\n</tool_call>"

    return "Hm.\n</think>\n\n" + re.sub(r"<tool_call>\n(.*?)\n</tool_call>", rewritten, reply)


def template(name: str) -> str:
    """The chat template of a real model."""
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def scene(replies: list[str], variation: str = CLASS, rollout: str = "", **options: Any) -> dict[str, Any]:
    """One episode: its story, the endpoint's answers, and where its tokens went.

    :param replies: one more of them than the agent is expected to ask for does no harm.
    :param rollout: settings of the section, as YAML's flow style writes them.
    """
    seen.clear()
    episode = play(
        f"variations.py->{variation}",
        replies,
        files={"variations.py": VARIATIONS},
        settings=f"  rollout: {{max_retries: 0, {rollout}}}",
        main_query="What is 6 * 7?",
        **options,
    )
    samples = build_samples(episode)
    return {
        **story(episode),
        "statuses": list(seen),
        "samples": len(samples.samples),
        "generated": samples.generated_tokens,
        "trained": sum(sample.trained_tokens for sample in samples.samples),
    }


UNCHECKED = "compute_madness_checklist: []"
LOOP = [
    use(text="Let me compute."),
    use('{ "expression":\t"2*3" }'),
    use('{"expression": "\\u0035*5"}'),
    use('{"expression": "8×2"}'),
    end(),
]
TWO_AT_ONCE = [use() + "\n" + use('{"expression":"2*3"}'), use(), end()]
THOUGHTS = [f"<think>\nHm.\n</think>\n\n{use()}", use(), f"<think>\nSo.\n</think>\n\n{end()}"]
UNKNOWN = call('{"x": 1}', "fly") if STYLE != "code" else "<code>\nfly(x=1)\n</code>"
UNREADABLE = use('{"expression": ') if STYLE != "code" else "<code>\nprint(\n</code>"

plain = scene(LOOP)
too_little = plain["turns"][1]["prompt_tokens"] - 1
tell(
    {
        "loop": plain,
        "loop_streaming": scene(LOOP, "Streaming"),
        "parallel": scene(TWO_AT_ONCE),
        "parallel_streaming": scene(TWO_AT_ONCE, "Streaming"),
        "thinking": scene(THOUGHTS, chat_template=thinking_template()),
        "thinking_streaming": scene(THOUGHTS, "Streaming", chat_template=thinking_template()),
        "qwen3": scene(THOUGHTS, chat_template=template("qwen3")),
        "qwen3.5": scene([in_xml(reply) for reply in TWO_AT_ONCE], chat_template=template("qwen3.5")),
        "unknown_tool": scene([UNKNOWN, end()], rollout=UNCHECKED),
        "wrong_arguments": scene([use('{"formula":"6*7"}'), end()], rollout=UNCHECKED),
        "unreadable_call": scene([UNREADABLE, end()], rollout=UNCHECKED),
        "cut_off": scene([use(text="Let me see.")] * 9, rollout=f"max_response_length_in_one_turn: 40, {UNCHECKED}"),
        "out_of_turns": scene([use()] * 9, rollout="multi_turn: {max_steps: 2}"),
        "out_of_turns_streaming": scene([use()] * 9, "Streaming", rollout="multi_turn: {max_steps: 2}"),
        "check": scene([use(), "ha" * 400, end()]),
        "context": scene([use(text="Let me compute.")] * 9, max_model_len=too_little),
        "model_fails": scene([use()] * 9, engine_type=Breaks),
        "timed_out": scene([use()] * 9, engine_type=Hangs, rollout="episode_timeout: 2"),
        "wrong_key": scene([], "Impostor"),
    }
)
