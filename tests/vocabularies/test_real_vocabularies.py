"""The chat families on real vocabularies: what the codec makes is what `apply_chat_template` makes, id by id.

Where `test_chat_families.py` has one token for each byte, here white space, digits, code, CJK and emoji merge,
also over the borders of messages.  The texts hold no control token: a template's whole text would make it one.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec, EncodedPrompt
from astuner.contracts.types import FinishReason, Generation
from astuner_families.families import short_id
from tests.vocabularies.real import FAMILIES, OF, VOCABULARIES, tokenizer

OTHERS = {
    f"mistral-{version}": {"calls": calls, "stops": ["</s>"], "incremental": False}
    for version, calls in (("v1", ""), ("v2", "list"), ("v3", "list"), ("v7", "list"))
}
KNOWN: dict[str, dict[str, Any]] = {**FAMILIES, **OTHERS}
QUICK = ("qwen3", "llama-3.1", "mistral-v3")
"""One of each kind of vocabulary, small ones. The others take long to fetch, to make, or to render with."""
EXAMPLES = 20
"""Of each property, also in the thorough profile: there are many templates, and most render slowly."""


def templates(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in names]


TEMPLATES = templates(OF)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Zählt 字 and 🙂.",
            "parameters": {"type": "object", "properties": {"s": {"type": "string"}, "n": {"type": "integer"}}},
        },
    }
    for name in ("calc", "look_up")
]
PIECES = [
    *(" ", "  ", "   ", "\n", "\n\n", "\n\n\n", " \n", "\t", "\t\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\u2028"),
    *("a", "The", "the", " the", "ing", "'s", "'LL", "don't", "straße", "é", "e\u0301", "Å", "naïve", "ﬁ", "ÄÖ"),
    *("0", "7", "12", "123", "1234", "3.14", "-2", "1e9", "1,000", "½", "٣", "Ⅷ"),
    *("十二", "汉字", "、", "。", "こんにちは", "カ", "한국어", "ไทย", "हिन्दी", "العربية", "\u200f", "ﷺ"),
    *("🙂", "👩‍👩‍👧", "🇩🇪", "👍🏽", "☃", "\U0001f9ff", "\ufe0f"),
    *("\x00", "\x07", "\x1b[0m", "\x7f", "\x85", "\ufffd", "\ufeff", "\ue000", "\U00100000"),
    *("def f(x):\n    return x  # y\n", "{", "}", '{"k": [1, -2.5]}', "```python\n", "```", "</", "<", ">", "<|", "|>"),
    *("_", "__init__", "==", "!=", "->", "//", "/*", "\\n", "\\", "$x^2$", "http://a.b/c?d=e&f", "[", "]", "#", "%s"),
]
"""Texts that merge with one another in one vocabulary or another, or are no word in any."""
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=5), min_size=1, max_size=12).map("".join)


BEGINNINGS = ["", " ", "\n", "\n\n", "\r\n", "\t", "12", "十", "🙂", "\u0301", "]", "'s", "{", "_", "[", "<", "=", "-"]
"""How replies begin that may merge with the end of a prompt."""


LOST = range(0x40000, 0xC0000)
"""Where no characters are; SmolLM2's vocabulary has no tokens for two of their bytes."""


@cache
def codec(template: str) -> ChatCodec:
    return ChatCodec(tokenizer(template))


@cache
def control(template: str) -> tuple[str, ...]:
    """The tokens that the vocabulary does not cut, in any spelling."""
    return tuple(str(token) for token in tokenizer(template).added_tokens_decoder.values())


def ordinary(template: str) -> st.SearchStrategy[str]:
    """Texts that say something and hold no token of the template's, nor what it looks for in a content."""
    never = (*control(template), "<think>", "</think>", "[INST]", "[/INST]", "<tool_call>", "<|")
    lost = LOST if OF[template] == "SmolLM2" else ()
    return TEXTS.filter(
        lambda text: text.strip() and not any(t in text for t in never) and not any(ord(c) in lost for c in text)
    )


def as_templates_want(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """OpenAI's messages as authors of templates write them.

    Arguments are objects, ids have Mistral's length, and a result names its tool.
    """
    made, names = [], {}
    for message in messages:
        one = dict(message)
        if one.get("tool_calls"):
            calls = [(call["id"], call["function"]) for call in one["tool_calls"]]
            names |= {label: function["name"] for label, function in calls}
            one["tool_calls"] = [
                {
                    "id": short_id(label),
                    "type": "function",
                    "function": {**function, "arguments": json.loads(function["arguments"])},
                }
                for label, function in calls
            ]
        elif "tool_call_id" in one:
            one |= {"name": names[one["tool_call_id"]], "tool_call_id": short_id(one["tool_call_id"])}
        made.append(one)
    return made


def applied(template: str, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
    """The ids of Hugging Face's own way: everything rendered, and tokenised as one text."""
    ids: list[int] = tokenizer(template).apply_chat_template(
        as_templates_want(messages), tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return ids


class Agent:
    """A conversation, and a model that says what it is told in the tokens it is told."""

    def __init__(self, template: str) -> None:
        self.name, self.template = template, codec(template).template
        self.conversation = codec(template).conversation()
        self.generations: list[Generation] = []

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> EncodedPrompt:
        encoded = self.conversation.encode(messages, tools)
        if encoded.continues is not None:
            seen = self.generations[encoded.continues]
            before = [*seen.prompt_ids, *seen.response_ids]
            assert encoded.prompt_ids[: len(before)] == before, "a reply was tokenised again"
        return encoded

    def say(self, encoded: EncodedPrompt, ids: Sequence[int], *, ends: bool) -> dict[str, Any]:
        self.generations.append(
            Generation(
                prompt_ids=tuple(encoded.prompt_ids),
                response_ids=tuple(ids),
                logprobs=(0.0,) * len(ids),
                finish_reason=FinishReason.STOP if ends else FinishReason.LENGTH,
                policy_version=0,
            )
        )
        return self.conversation.accept(encoded, self.generations[-1], len(self.generations) - 1)

    def added(self, encoded: EncodedPrompt) -> list[int]:
        """The ids behind the reply that the prompt continues."""
        assert encoded.continues is not None
        seen = self.generations[encoded.continues]
        return encoded.prompt_ids[len(seen.prompt_ids) + len(seen.response_ids) :]


@pytest.mark.parametrize("name", TEMPLATES)
def test_stop_tokens_are_single_ids_of_the_real_vocabulary(name: str) -> None:
    made, real = codec(name), tokenizer(name)
    expected = [real.convert_tokens_to_ids(token) for token in KNOWN[name]["stops"]]
    assert list(made.template.stop_token_ids) == expected
    assert set(expected) <= set(real.added_tokens_decoder) - {real.unk_token_id}
    assert real.eos_token_id in made.stop_token_ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_where_a_reply_would_merge_with_its_prompt_it_does_not(name: str) -> None:
    """Then the whole text is cut otherwise than the model was asked, and made it: what was recorded stays."""
    agent = Agent(name)
    asked = [{"role": "user", "content": "Hi"}]
    encoded = agent.encode(asked, None)
    ids, encode = encoded.prompt_ids, agent.template.encode
    text = tokenizer(name).apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    merging = [begin for begin in BEGINNINGS if encode(f"{text}{begin}four")[: len(ids)] != ids]
    assert merging == VOCABULARIES[OF[name]]["templates"][name]
    for begin in merging:
        reply = agent.say(encoded, encode(f"{begin}four"), ends=False)
        following = agent.encode([*asked, reply, *asked], None)  # which looks at what the prompt begins with
        assert following.continues == len(agent.generations) - 1


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_a_whole_prompt_has_the_ids_of_apply_chat_template(name: str, data: st.DataObject) -> None:
    text, tools = ordinary(name), TOOLS if KNOWN[name]["calls"] else None
    messages: list[dict[str, Any]] = [{"role": "user", "content": data.draw(text)}]
    if data.draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": data.draw(text)})
    for _ in range(data.draw(st.integers(0, 2))):
        messages.append({"role": "assistant", "content": data.draw(text)})
        messages.append({"role": "user", "content": data.draw(text)})
    if tools and data.draw(st.booleans()):
        messages += called(data.draw(text), data.draw(text), data.draw(st.integers()))
    assert codec(name).conversation().encode(messages, tools).prompt_ids == applied(name, messages, tools)


def called(said: str, heard: str, n: int) -> list[dict[str, Any]]:
    call = {"name": "calc", "arguments": json.dumps({"s": said, "n": n}, ensure_ascii=False)}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "abcdefgh1", "content": heard},
    ]


def spelled(template: str, text: str, how: str) -> list[int]:
    """``text`` in the tokens of a model: as the tokenizer cuts it, or otherwise, as a model may at any temperature."""
    encode = codec(template).template.encode
    if how == "whole":
        return encode(text)
    return [i for piece in (text if how == "characters" else (text[:3], text[3:])) for i in encode(piece)]


def replies(template: str) -> st.SearchStrategy[tuple[str, str, bool]]:
    """What a model says, how it spells it, and whether it comes to an end."""
    return st.tuples(ordinary(template), st.sampled_from(["whole", "pieces", "characters"]), st.booleans())


MOVES_TOOLS = ("mistral-v2", "mistral-v3", "mistral-v7", "mistral-nemo", "mistral-small-3.2")
"""A user's message behind a reply takes the tools with it: such a turn is a branch, and is rendered as a whole."""
MOVES_SYSTEM = ("mistral-v2", "mistral-v3", "mistral-nemo")


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_what_follows_a_reply_has_the_ids_of_apply_chat_template(name: str, data: st.DataObject) -> None:
    """Whatever the model said, and in whatever tokens: they stay, and what is put behind them is the template's."""
    agent, text, known = Agent(name), ordinary(name), KNOWN[name]
    tools = TOOLS if known["calls"] and data.draw(st.booleans()) else None
    messages: list[dict[str, Any]] = [{"role": "user", "content": data.draw(text)}]
    if system := data.draw(st.booleans()):
        messages.insert(0, {"role": "system", "content": data.draw(text)})
    end = [tokenizer(name).convert_tokens_to_ids(known["stops"][0])]
    closing = {tokenizer(name).convert_tokens_to_ids(t) for t in agent.template.format.closes} or set(end)
    for turn in range(data.draw(st.integers(2, 4))):
        encoded = agent.encode(messages, tools)
        if turn:
            moves = (tools and name in MOVES_TOOLS) or (system and name in MOVES_SYSTEM)
            expected = (None, "template_not_incremental") if moves else (turn - 1, "")
            assert (encoded.continues, encoded.branch_reason) == expected
        whole = applied(name, messages, tools)
        if encoded.continues is None:
            assert encoded.prompt_ids == whole
        else:
            added = agent.added(encoded)
            after = agent.generations[-1].response_ids[-1:] == tuple(end)
            assert whole[-len(added) :] == added
            ended = whole[-len(added) - 1] in closing
            assert ended == after, "the end token stands there once, whoever wrote it"
        said, how, ends = data.draw(replies(name))
        reply = agent.say(encoded, [*spelled(name, said, how), *(end if ends else [])], ends=ends)
        messages = [*messages, reply, {"role": "user", "content": data.draw(text)}]


def alike(template: str, ids: Sequence[int]) -> list[int]:
    """What is recorded, as the template would write it further back in history, where it says so in the docs.

    Qwen's and GLM's write an empty thought in front of the last reply only; harmony's end token is another there.
    """
    real = tokenizer(template)
    if template == "gpt-oss":
        of_reply, of_history = real.convert_tokens_to_ids(["<|return|>", "<|end|>"])
        return [of_history if i == of_reply else i for i in ids]
    never, kept, at = EMPTY_THOUGHTS.get(template, ()), list[int](), 0
    empty = [[i for piece in pieces for i in real.encode(piece, add_special_tokens=False)] for pieces in never]
    while at < len(ids):
        length = next((len(thought) for thought in empty if list(ids[at : at + len(thought)]) == thought), 0)
        kept += ids[at : at + 1] if not length else ()
        at += length or 1
    return kept


EMPTY_THOUGHTS = {
    "qwen3": [("<think>\n\n</think>\n\n",)],
    "qwen3.5": [("<think>\n\n</think>\n\n",), ("<think>\n", "\n</think>\n\n")],
}
"""As the template writes it, and where the prompt has opened it: the ends of lines do not merge over that border."""


def normal(template: str, text: str) -> str:
    """``text`` as the tokenizer has it: Qwen's normalise it."""
    return unicodedata.normalize("NFC", text) if VOCABULARIES[OF[template]].get("normalizer") else text


CALL_END = {"gpt-oss": "<|call|>", "glm-4.5": "<|observation|>"}
WITH_CALLS = templates(name for name in OF if KNOWN[name]["calls"])


@pytest.mark.parametrize("name", WITH_CALLS)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_an_agent_that_calls_tools_has_the_ids_of_apply_chat_template(name: str, data: st.DataObject) -> None:
    """Replies as the template itself writes them: then the whole prompt is what it would have been, too."""
    agent, text = Agent(name), ordinary(name)
    end = tokenizer(name).convert_tokens_to_ids(CALL_END.get(name, KNOWN[name]["stops"][0]))
    messages: list[dict[str, Any]] = [{"role": "user", "content": data.draw(text)}]
    for turn in range(data.draw(st.integers(2, 4))):
        encoded = agent.encode(messages, TOOLS)
        assert encoded.continues == (turn - 1 if turn else None), encoded.branch_reason
        assert alike(name, encoded.prompt_ids) == alike(name, applied(name, messages, TOOLS))
        arguments = {"s": data.draw(text), "n": data.draw(st.integers())}
        call = called(arguments["s"], "", arguments["n"])[0]["tool_calls"][0]
        reply = agent.say(encoded, [*agent.template.encode(agent.template.write_reply("", [call])), end], ends=True)
        assert "unparsed_tool_calls" not in reply
        (made,) = reply["tool_calls"]
        assert json.loads(made["function"]["arguments"]) == {**arguments, "s": normal(name, arguments["s"])}
        messages = [*messages, reply, {"role": "tool", "tool_call_id": made["id"], "content": data.draw(text)}]


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_what_a_user_says_makes_no_control_token(template: str, data: st.DataObject) -> None:
    known, made = tokenizer(template), codec(template)
    ids_of = {str(token): i for i, token in known.added_tokens_decoder.items()}
    between = [known.decode([i]) for i in made.template.continuation_ids([{"role": "user", "content": "x"}], last=None)]
    names = [str(t) for t in known.added_tokens_decoder.values() if t.special or str(t) in between]
    names = [name for name in names if len(name.strip()) > 1 and "think>" not in name]
    texts = st.lists(st.sampled_from(names) | st.sampled_from(["a", " ", "\n", "<", "system", "7", "字"]), min_size=1)
    text = "x" + "".join(data.draw(texts)) + "x"
    forged, plain = (made.template.whole([{"role": "user", "content": t}], []).ids for t in (text, "x"))
    control_ids = {ids_of[name] for name in names}
    assert [i for i in forged if i in control_ids] == [i for i in plain if i in control_ids]
    assert text in made.template.decode(forged)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(text=TEXTS)
def test_the_bytes_of_all_tokens_are_the_text(template: str, text: str) -> None:
    known = codec(template).template
    ids = known.encode(text)
    if known.decode(ids).count("\ufffd") > text.count("\ufffd"):  # a character of `LOST`
        return
    parts = known.token_bytes(ids)
    assert None not in parts
    assert b"".join(part or b"" for part in parts) == known.decode(ids).encode()
    for n in range(1, len(ids)):
        assert known.decode(ids).encode().startswith(b"".join(part or b"" for part in known.token_bytes(ids[:n])))
