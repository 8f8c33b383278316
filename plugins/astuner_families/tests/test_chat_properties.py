"""Random conversations over real chat templates: what the engine saw is what is kept, and what is trained.

Random forks, retries, parallel calls, truncations and tool calls; agents that drop, repeat, swap and edit messages.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec, EncodedPrompt
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.messages import normalise
from astuner.contracts.types import (
    APPROXIMATIONS,
    BRANCH_REASONS,
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    StopReason,
    Turn,
)
from astuner.rollout.turns import EpisodeRecorder, build_samples
from astuner.testing import make_tokenizer, workflow_task
from astuner_models.serving import TEMPLATES

DATA = Path(__file__).parent / "templates"
FAMILIES: dict[str, dict[str, Any]] = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
WITH_TOOLS = [name for name, known in FAMILIES.items() if known["calls"]]
ONE_CALL = ("llama-3.1", "llama-3.2", "gpt-oss")
CONTENT_BESIDE_CALLS = ("qwen2.5", "qwen3", "qwen3.5", "glm-4.5")
"""The other templates leave it out, or (gpt-oss) write it as reasoning."""
USER_MOVES_TOOLS = ("mistral-nemo", "mistral-small-3.2")
"""With tools, a user cannot follow a reply: the template shows the tools in front of the last user message."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("calc", "look")
]
SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}
HINT = {"role": "user", "content": "<system-hint>plan first</system-hint>"}
WORDS = st.text(
    st.characters(exclude_categories=["Cs", "Cc", "Z"], exclude_characters="<>|[]｜▁{}"), min_size=1, max_size=8
)
ARGUMENTS = st.fixed_dictionaries({}, optional={"s": WORDS, "n": st.integers()})


@cache
def codec(name: str, merge_level: str = "exact") -> ChatCodec:
    known = FAMILIES[name]
    if "file" in known:
        text = (DATA / known["file"]).read_text(encoding="utf-8")
    elif "shipped" in known:
        text = TEMPLATES[known["shipped"]].read_text(encoding="utf-8")
    else:
        found = importlib.util.find_spec("trl")
        if found is None or found.origin is None:
            pytest.skip("trl, from which templates under licences of their own are read, is not installed")
        text = (Path(found.origin).parent / "chat_templates" / f"{known['trl']}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(text, known["special"], eos_token=known["eos"], bos_token=known["bos"])
    return ChatCodec(tokenizer, merge_level=merge_level)  # type: ignore[arg-type]


class Agent:
    """A conversation, a model that says what it is told, and the recorder behind both."""

    def __init__(self, codec: ChatCodec) -> None:
        self.template, self.conversation, self.recorder = codec.template, codec.conversation(), EpisodeRecorder()
        self.merge_level = codec.merge_level

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> EncodedPrompt:
        encoded = self.conversation.encode(copy.deepcopy(messages), copy.deepcopy(tools))
        assert encoded.branch_reason in ("", *BRANCH_REASONS)
        assert encoded.approximation in ("", *APPROXIMATIONS)
        assert not (encoded.approximation and self.merge_level == "exact")
        assert (encoded.continues is None) or not encoded.branch_reason
        return encoded

    def say(self, encoded: EncodedPrompt, text: str, end: str) -> dict[str, Any]:
        ids = self.template.encode(text + end) or self.template.encode("x")
        generation = Generation(
            prompt_ids=tuple(encoded.prompt_ids),
            response_ids=tuple(ids),
            logprobs=tuple(-float(i % 7) for i in ids),
            finish_reason=FinishReason.STOP if end else FinishReason.LENGTH,
            policy_version=0,
        )
        index = self.recorder.reserve()
        message = self.conversation.accept(encoded, generation, index)
        self.recorder.add(  # checks that the turn continues what it says it continues, token for token
            Turn(
                index=index,
                agent="default",
                generation=generation,
                continues=encoded.continues,
                branch_reason=encoded.branch_reason,
                message=message,
            )
        )
        return message

    def check_samples(self) -> None:
        """Every path is what the engine saw, and every token that was generated is trained once."""
        turns = self.recorder.turns
        task = workflow_task()
        episode = Episode(
            workflow_task=task,
            output=None,
            turns=turns,
            verdict=JudgeOutput(reward=1.0),
            stop_reason=StopReason.COMPLETED,
        )
        made = build_samples(episode, max_samples=10_000)
        seen = {(*t.generation.prompt_ids, *t.generation.response_ids) for t in turns}
        assert all(tuple(s.input_ids) in seen for s in made.samples)
        generated = sum(len(t.generation.response_ids) for t in turns)
        assert made.generated_tokens == generated == sum(sum(s.loss_mask) for s in made.samples)
        for sample in made.samples:
            for token, trained, logprob in zip(sample.input_ids, sample.loss_mask, sample.logprobs, strict=True):
                assert not trained or logprob == -float(token % 7)

    def decode(self, encoded: EncodedPrompt) -> str:
        return self.template.decode(encoded.prompt_ids)

    def whole(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        return self.template.render([normalise(m) for m in messages], tools)


def alike(text: str) -> str:
    """What the codec documents to keep although the template would write it otherwise further back in history.

    Empty thoughts, which are written in front of a last reply only, and gpt-oss's way of ending one.
    """
    return re.sub(r"<think>\s*</think>\s*", "", text).replace("<|return|>", "<|end|>")


def made_call(n: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": f"made{n}", "type": "function", "function": {"name": name, "arguments": text}}


def result(reply: Mapping[str, Any], n: int, content: str = "4") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": reply["tool_calls"][n]["id"], "content": content}


def redump(message: Mapping[str, Any]) -> dict[str, Any]:
    """A framework's copy: arguments parsed and serialised again, what is no OpenAI field left out."""
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]))}}
        for c in message.get("tool_calls", [])
    ]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}


def split(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same in OpenAI's responses: the text and each call as messages of their own."""
    calls = [{"role": "assistant", "content": None, "tool_calls": [c]} for c in redump(message).get("tool_calls", [])]
    text = [{"role": "assistant", "content": message["content"]}]
    return [*(text if message["content"] or not calls else []), *calls]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_conversations_as_the_template_writes_them(name: str, data: st.DataObject) -> None:
    """Every later turn continues the right one, and its prompt reads like the template's whole rendering."""
    agent, known = Agent(codec(name)), FAMILIES[name]
    tools = data.draw(st.sampled_from([TOOLS, TOOLS[:1]])) if known["calls"] else None
    system = [] if name == "mistral-nemo" else data.draw(st.sampled_from([[], [SYSTEM]]))  # Nemo's moves it, too
    histories: list[tuple[list[Any], int | None]] = [([*system, {"role": "user", "content": data.draw(WORDS)}], None)]
    for turn in range(data.draw(st.integers(2, 6))):
        messages, last = data.draw(st.sampled_from(histories))
        encoded = agent.encode(messages, tools)
        if last is not None and messages[-1]["role"] == "user" and tools and name in USER_MOVES_TOOLS:
            assert encoded.branch_reason == "template_not_incremental"
        else:
            assert encoded.continues == last
        assert alike(agent.decode(encoded)) == alike(agent.whole(messages, tools))
        most = 0 if not tools else 1 if name in ONE_CALL else 3
        calls = [
            made_call(n, "calc", arguments) for n, arguments in enumerate(data.draw(st.lists(ARGUMENTS, max_size=most)))
        ]
        content = f"{turn}{data.draw(WORDS)}" if not calls or name in CONTENT_BESIDE_CALLS else ""
        said = agent.template.write_reply(content, calls)
        ends = (
            known["stops"][:1]
            if not calls
            else [{"gpt-oss": "<|call|>", "glm-4.5": "<|observation|>"}.get(name, known["stops"][0])]
        )
        reply = agent.say(encoded, said, data.draw(st.sampled_from([*ends, ""])))
        assert reply["content"] == content
        assert [json.loads(c["function"]["arguments"]) for c in reply.get("tool_calls", [])] == [
            json.loads(c["function"]["arguments"]) for c in calls
        ]
        heard = [result(reply, n, data.draw(WORDS)) for n in range(len(calls))]
        # GLM stopped for the user or for results: what follows is what it stopped for; some allow no user after results
        speaks = not heard or (name not in (*USER_MOVES_TOOLS, "glm-4.5") and data.draw(st.booleans()))
        if speaks:
            heard.append({"role": "user", "content": data.draw(WORDS)})
        histories.append(([*messages, data.draw(st.sampled_from([reply, redump(reply)])), *heard], turn))
    agent.check_samples()


@pytest.mark.slow
@pytest.mark.parametrize("merge_level", ["exact", "text"])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3.5", "glm-4.5", "gpt-oss", "deepseek-v3.1", "llama-3.1"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), texts=st.lists(st.text(max_size=12), min_size=3, max_size=7))
def test_no_history_however_mangled_breaks_a_prefix(name: str, merge_level: str, seed: int, texts: list[str]) -> None:
    """Models that write anything and stop anywhere, agents that rewrite history, clients that send it again."""
    chance, agent, known = random.Random(seed), Agent(codec(name, merge_level)), FAMILIES[name]
    messages: list[dict[str, Any]] = [SYSTEM, ASK]
    specials = [*known["special"], "<think>", "</think>", "<tool_call>", "{", ""]
    for text in texts:
        tools = chance.choice([TOOLS, TOOLS, TOOLS[:1], None]) if known["calls"] else None
        try:
            encoded = agent.encode(messages, tools)
        except UnsupportedRequest as refusal:  # the template's own, for instance of a second system message
            if " omits " in str(refusal):
                assert any(m["role"] == "system" for m in messages[1:])
            else:
                with pytest.raises(UnsupportedRequest):
                    agent.whole(messages, tools)
            messages = [SYSTEM, ASK]
            continue
        if encoded.continues is None:
            assert encoded.prompt_ids == agent.template.encode(agent.whole(messages, tools))
        calls = [made_call(0, "calc", {"n": 1})] if tools and chance.random() < 0.5 else []
        said = chance.choice([agent.template.write_reply(text.strip() if not calls else "", calls), text])
        said = (
            chance.choice(["", "", chance.choice(specials)]) + said + chance.choice(["", "", chance.choice(specials)])
        )
        reply = agent.say(encoded, said, chance.choice([*known["stops"], ""]))
        messages = [*messages, *chance.choice([[reply], [redump(reply)], split(reply)])]
        messages += [result(reply, n) for n in range(len(reply.get("tool_calls", [])))] or [ASK]
        at = chance.randrange(len(messages))
        mangle = chance.randrange(8)
        if mangle == 0 and len(messages) > 1:
            del messages[at]
        elif mangle == 1:
            messages.insert(at, HINT)
        elif mangle == 2 and not messages[at].get("tool_calls"):
            messages[at] = {**messages[at], "content": text}
        elif mangle == 3:
            messages = messages[: at + 1]
        elif mangle == 4 and messages[at].get("tool_calls"):
            messages[at] = {**messages[at], "tool_calls": [{**c, "id": "new"} for c in messages[at]["tool_calls"]]}
    agent.check_samples()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40)
@given(data=st.data())
def test_reading_never_fails_and_loses_nothing(name: str, data: st.DataObject) -> None:
    known, template = FAMILIES[name], codec(name).template
    special = [
        *known["special"],
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "functions.calc",
        '{"n": 1}',
        "calc",
        " to=",
        "json",
        "\n",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(special) | st.text(max_size=4), max_size=12)))
    read = template.read(text, TOOLS, prompt_ids=template.encode(template.generation_prompt or "x"))
    assert all(json.loads(call.arguments) is not None for call in read.calls)
    for block in read.broken:
        assert block.strip() in text
    if not read.calls and not template.reasons:
        assert read.content == text
    assert template.read(text, [], prompt_ids=[0]).calls == []
