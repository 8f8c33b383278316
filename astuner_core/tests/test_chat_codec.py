"""The chat codec: what was generated is never tokenised again, and prompts are what the template writes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec, Conversation, EncodedPrompt
from astuner.contracts.errors import ConfigError, EpisodeError, UnsupportedRequest
from astuner.contracts.messages import normalise, same_arguments
from astuner.contracts.types import BRANCH_REASONS, FinishReason, Generation
from astuner.testing import make_tokenizer
from tests.table import table

# Shaped like Qwen3's: reasoning in its own place, left out for turns before the last thing the user said.
THINKING = """\
{%- if tools %}<|im_start|>system
{{ messages[0].content + '\n\n' if messages[0].role == 'system' else '' }}# Tools
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'system' and loop.first %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}
{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}
{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("calc", "look")
]
SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def codecs(tokenizer: Any) -> dict[str, ChatCodec]:
    return {"own": ChatCodec(tokenizer), "thinking": ChatCodec(tokenizer, chat_template=THINKING)}


@pytest.fixture
def codec(codecs: dict[str, ChatCodec]) -> ChatCodec:
    return codecs["own"]


class Agent:
    """A conversation and a model that says what it is told."""

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec
        self.conversation: Conversation = codec.conversation()
        self.generations: list[Generation] = []

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> EncodedPrompt:
        encoded = self.conversation.encode(copy.deepcopy(messages), copy.deepcopy(tools))
        assert encoded.branch_reason in ("", *BRANCH_REASONS)
        if encoded.continues is not None:
            earlier = self.generations[encoded.continues]
            before = [*earlier.prompt_ids, *earlier.response_ids]
            assert encoded.prompt_ids[: len(before)] == before
            assert encoded.branch_reason == ""
        return encoded

    def say(
        self, encoded: EncodedPrompt, text: str, *, end: str = "<|im_end|>", ids: list[int] | None = None
    ) -> dict[str, Any]:
        response = ids or self.codec.template.encode(text + end)
        self.generations.append(
            Generation(
                prompt_ids=tuple(encoded.prompt_ids),
                response_ids=tuple(response),
                logprobs=(0.0,) * len(response),
                finish_reason=FinishReason.STOP if end else FinishReason.LENGTH,
                policy_version=0,
            )
        )
        return self.conversation.accept(encoded, self.generations[-1], len(self.generations) - 1)

    def ask(self, messages: Sequence[Mapping[str, Any]], text: str, tools: Any = None, **how: Any) -> dict[str, Any]:
        return self.say(self.encode(messages, tools), text, **how)

    def text(self, encoded: EncodedPrompt) -> str:
        return self.codec.template.decode(encoded.prompt_ids)

    def whole(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        return self.codec.template.render([normalise(m) for m in messages], tools)


def call(name: str = "calc", arguments: str = '{"x": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def result(message: Mapping[str, Any], n: int = 0, content: str = "4") -> dict[str, Any]:
    made = message["tool_calls"][n]
    return {"role": "tool", "tool_call_id": made["id"], "name": made["function"]["name"], "content": content}


def redump(message: Mapping[str, Any]) -> dict[str, Any]:
    """An agent framework's copy: arguments parsed and serialised again, what is no OpenAI field left out."""
    calls = [
        {**c, "function": {**c["function"], "arguments": json.dumps(json.loads(c["function"]["arguments"]))}}
        for c in message.get("tool_calls", [])
    ]
    return {"role": "assistant", "content": message["content"], **({"tool_calls": calls} if calls else {})}


# --- splicing ---------------------------------------------------------------------------------------------------


def test_what_the_model_wrote_is_spliced_in_however_it_was_tokenised() -> None:
    """A tokenizer with merges; the model writes in single bytes, as no tokenizer would."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant hello hello world"] * 9, trainer)
    merged = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=PLAIN)
    agent = Agent(ChatCodec(merged))
    spelled = [merged.convert_tokens_to_ids(c) for c in "hello"]
    assert len(agent.codec.template.encode("hello")) < len(spelled)
    reply = agent.ask([ASK], "hello", ids=[*spelled, merged.eos_token_id])
    assert reply == {"role": "assistant", "content": "hello"}
    following = agent.encode([ASK, reply, {"role": "user", "content": "hello"}])
    assert following.continues == 0
    assert following.prompt_ids != agent.codec.template.encode(agent.text(following))


def test_a_react_turn_continues_though_the_framework_serialises_arguments_again(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([SYSTEM, ASK], "Let me see.\n" + call(arguments='{"x":"\\u4f60"}'), TOOLS)
    assert reply["content"] == "Let me see."
    assert reply["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"x":"\\u4f60"}'}
    messages = [SYSTEM, ASK, redump(reply), result(reply)]
    following = agent.encode(messages, TOOLS)
    assert following.continues == 0
    assert following.request == (normalise(result(reply)),)
    assert following.tools == ()
    assert agent.text(following).count('{"x":"\\u4f60"}') == 1


def test_consecutive_tool_results_share_one_block_as_the_template_writes_them(codecs: dict[str, ChatCodec]) -> None:
    for codec in codecs.values():
        agent = Agent(codec)
        reply = agent.ask([ASK], call() + "\n" + call("look"), TOOLS)
        messages = [ASK, reply, result(reply, 0, "one"), result(reply, 1, "two"), {"role": "user", "content": "so?"}]
        following = agent.encode(messages, TOOLS)
        assert following.continues == 0
        assert agent.text(following) == agent.whole(messages, TOOLS)
        assert agent.text(following).count("<|im_start|>user\n<tool_response>") == 1


def test_a_truncated_reply_is_ended_in_the_prompt_not_in_the_response(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], "The answer", end="")
    following = agent.encode([ASK, reply, {"role": "user", "content": "Go on."}])
    recorded = agent.generations[0]
    added = following.prompt_ids[len(recorded.prompt_ids) + len(recorded.response_ids) :]
    assert following.continues == 0
    assert added[0] == codec.template.end_of_turn_id not in recorded.response_ids
    assert agent.text(following) == agent.whole([ASK, reply, {"role": "user", "content": "Go on."}])


def test_another_end_token_is_kept_and_the_turn_still_closed(codec: ChatCodec, tokenizer: Any) -> None:
    agent = Agent(ChatCodec(tokenizer))
    agent.codec.stop_token_ids = (*agent.codec.stop_token_ids, tokenizer.convert_tokens_to_ids("<|endoftext|>"))
    reply = agent.ask([ASK], "4", end="<|endoftext|>")
    assert reply["content"] == "4"
    following = agent.encode([ASK, reply, ASK])
    assert following.continues == 0
    assert "\n4<|endoftext|><|im_end|>\n<|im_start|>user" in agent.text(following)


def test_a_reply_cut_inside_a_character_continues_exactly(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], "", ids=codec.template.encode("naïve")[:3], end="")
    assert reply["content"] == "na\ufffd"
    assert agent.encode([ASK, reply, ASK]).continues == 0


def test_a_reply_may_be_continued_twice_and_a_request_sent_twice(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], "four")
    forks = [[ASK, reply, {"role": "user", "content": c}] for c in ("why?", "sure?", "why?")]
    for number, messages in enumerate(forks, start=1):
        encoded = agent.encode(messages)
        assert encoded.continues == 0
        answer = agent.say(encoded, f"because {number}")
        assert agent.encode([*messages, answer, ASK]).continues == number


def test_when_the_same_words_were_drawn_twice_the_later_turn_is_continued(codec: ChatCodec) -> None:
    agent = Agent(codec)
    first = agent.ask([ASK], "four")
    second = agent.ask([ASK, first, ASK], "five")
    assert agent.encode([ASK]).branch_reason == "repeated_request"
    agent.ask([ASK], "four")
    assert agent.encode([ASK, first, {"role": "user", "content": "other"}]).continues == 2
    assert agent.encode([ASK, first, ASK, second, ASK]).continues == 1


def test_a_request_that_ends_with_the_reply_asks_for_another_turn(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], "four")
    following = agent.encode([ASK, reply])
    assert following.continues == 0
    assert following.request == ()
    assert agent.text(following) == agent.whole([ASK, reply])


def test_messages_the_model_did_not_say_are_prompt(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], "four")
    messages = [ASK, reply, ASK, {"role": "assistant", "content": "put in by the framework"}, ASK]
    following = agent.encode(messages)
    assert following.continues == 0
    assert len(following.request) == 3
    assert agent.text(following) == agent.whole(messages)


@table("content", [None, "", [], [{"text": None}], [{"type": "text", "text": ""}]])
def test_every_spelling_of_no_text_is_the_same(codec: ChatCodec, content: Any) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], call(), TOOLS)
    assert reply["content"] == ""
    assert agent.encode([ASK, {**reply, "content": content}, result(reply)], TOOLS).continues == 0


@table("sent_back", [" four \n", "four", " four", "four \n"])
def test_text_parts_are_joined_and_whitespace_may_be_stripped_by_the_framework(
    codec: ChatCodec, sent_back: str
) -> None:
    agent = Agent(codec)
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "2 + 2?"}]
    reply = agent.ask([{"role": "user", "content": parts}], " four \n")
    assert reply["content"] == " four \n"
    asked = {"role": "user", "name": None, "content": "What is\n2 + 2?"}
    following = agent.encode([asked, {"role": "assistant", "content": sent_back, "name": "a"}, ASK])
    assert following.continues == 0
    assert "\n four \n<|im_end|>" in agent.text(following)


# --- branches ---------------------------------------------------------------------------------------------------

HINT = {"role": "user", "content": "<system-hint>plan first</system-hint>"}
OTHER = {"role": "system", "content": "Be long."}


@table(
    ("first", "then", "tools", "reason"),
    [
        ([SYSTEM, ASK], lambda a: [SYSTEM, ASK, a, ASK], TOOLS[:1], "tools_changed"),
        ([SYSTEM, ASK, HINT], lambda a: [SYSTEM, ASK, a, ASK], TOOLS, "messages_removed"),
        ([SYSTEM, ASK], lambda a: [SYSTEM, HINT, ASK, a, ASK], TOOLS, "messages_inserted"),
        ([SYSTEM, ASK], lambda a: [OTHER, ASK, a, ASK], TOOLS, "history_rewritten"),
        ([SYSTEM, ASK], lambda a: [SYSTEM, ASK, {**a, "content": "changed"}, ASK], TOOLS, "history_rewritten"),
        ([SYSTEM, ASK], lambda a: [SYSTEM, ASK], TOOLS, "repeated_request"),
        ([SYSTEM, ASK], lambda a: [OTHER, ASK], TOOLS, "new_conversation"),
        ([SYSTEM, ASK], lambda a: [SYSTEM, {"role": "user", "content": "bob: four"}], TOOLS, "new_conversation"),
    ],
)
def test_what_cannot_be_matched_is_a_branch_that_says_why(
    codec: ChatCodec, first: Any, then: Callable[[Any], Any], tools: Any, reason: str
) -> None:
    agent = Agent(codec)
    reply = agent.ask(first, "four", TOOLS)
    messages = then(reply)
    branch = agent.encode(messages, tools)
    assert (branch.continues, branch.branch_reason) == (None, reason)
    assert agent.text(branch) == agent.whole(messages, tools)
    assert len(branch.request) == len(messages)
    assert list(branch.tools) == tools


def test_a_first_turn_has_no_branch_reason_even_with_history_from_elsewhere(codec: ChatCodec) -> None:
    first = Agent(codec).encode([ASK, {"role": "assistant", "content": "few-shot"}, ASK])
    assert (first.continues, first.branch_reason) == (None, "")


@table(
    "edit",
    [
        lambda c: c["function"].update(arguments='{"x": 2}'),
        lambda c: c["function"].update(arguments='{"x": true}'),
        lambda c: c["function"].update(arguments="broken"),
        lambda c: c["function"].update(name="look"),
        lambda c: c.update(id="call_other"),
    ],
)
def test_an_edited_tool_call_is_not_the_recorded_one(codec: ChatCodec, edit: Callable[[Any], Any]) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], call(), TOOLS)
    changed = copy.deepcopy(reply)
    edit(changed["tool_calls"][0])
    for _ in range(2):
        assert agent.encode([ASK, changed, result(reply)], TOOLS).branch_reason == "history_rewritten"
        assert agent.encode([ASK, redump(reply), result(reply)], TOOLS).continues == 0


def test_a_template_that_is_not_incremental_branches_at_every_turn(tokenizer: Any) -> None:
    counting = "{{ messages | length }}\n" + PLAIN
    assert ChatCodec(tokenizer, chat_template=counting).template.incremental  # only the beginning differs
    looking_ahead = PLAIN.replace("m.content", "(m.content if loop.length < 4 else m.content | upper)")
    agent = Agent(ChatCodec(tokenizer, chat_template=looking_ahead))
    reply = agent.ask([ASK], "four")
    branch = agent.encode([ASK, reply, ASK, reply, ASK])
    assert (branch.continues, branch.branch_reason) == (None, "template_not_incremental")
    assert agent.text(branch) == agent.whole([ASK, reply, ASK, reply, ASK])


def test_caller_edits_of_its_own_tools_and_messages_are_seen(codec: ChatCodec) -> None:
    conversation = codec.conversation()
    tools, messages = copy.deepcopy(TOOLS), [dict(SYSTEM), dict(ASK)]
    encoded = conversation.encode(messages, tools)
    ids = codec.template.encode("four<|im_end|>")
    generation = Generation(
        prompt_ids=encoded.prompt_ids,
        response_ids=ids,
        logprobs=[0.0] * len(ids),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    messages.append(conversation.accept(encoded, generation, 0))
    assert conversation.encode(messages, tools).continues == 0
    tools[0]["function"]["description"] = "other"
    assert conversation.encode(messages, tools).branch_reason == "tools_changed"
    messages[0]["content"] = "other"
    assert conversation.encode(messages, TOOLS).branch_reason == "history_rewritten"


# --- what frameworks do to a reply ---------------------------------------------------------------------------------


class Spoken:
    """A message as an object, such as OpenAI's SDK and pydantic have them."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return copy.deepcopy(self.fields)


def test_messages_parts_calls_and_tools_may_be_objects(codec: ChatCodec) -> None:
    agent = Agent(codec)
    tools = [Spoken(**t) for t in TOOLS]
    reply = agent.ask([Spoken(role="user", content=[Spoken(type="text", text="What is 2 + 2?")])], call(), tools)
    whole = Spoken(**reply, refusal=None, audio=None, function_call=None)
    calls_only = {"role": "assistant", "content": None, "tool_calls": [Spoken(**c) for c in reply["tool_calls"]]}
    function = Spoken(**reply["tool_calls"][0]["function"])
    inner = {**reply, "tool_calls": [{"id": reply["tool_calls"][0]["id"], "function": function}]}
    for back in (whole, calls_only, inner):
        assert agent.encode([ASK, back, Spoken(**result(reply))], TOOLS).continues == 0


def test_openais_own_message_type_is_read(codec: ChatCodec) -> None:
    chat = pytest.importorskip("openai.types.chat")
    agent = Agent(codec)
    reply = agent.ask([ASK], "Let me see.\n" + call(), TOOLS)
    assert agent.encode([ASK, chat.ChatCompletionMessage(**reply), result(reply)], TOOLS).continues == 0


@table("kind", ["input_text", "output_text", "text"])
def test_the_text_parts_of_openais_responses_are_text(codec: ChatCodec, kind: str) -> None:
    agent = Agent(codec)
    reply = agent.ask([{"role": "user", "content": [{"type": kind, "text": "What is 2 + 2?"}]}], "four")
    back = {"role": "assistant", "content": [{"type": kind, "text": "four"}]}
    assert reply["content"] == "four"
    assert agent.encode([ASK, back, ASK]).continues == 0


def pieces(reply: Mapping[str, Any], *, text_first: bool = True) -> list[dict[str, Any]]:
    """A reply in OpenAI's responses: its text and each of its calls are items of their own."""
    calls = [{"role": "assistant", "content": None, "tool_calls": [c]} for c in reply["tool_calls"]]
    text = [{"role": "assistant", "content": reply["content"]}] if reply["content"] else []
    return [*text, *calls] if text_first else [*calls, *text]


@pytest.mark.parametrize("text", ["", "Let me see.\n"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_assistant_messages_in_a_row_that_are_one_reply_together_are_recognised(
    codec: ChatCodec, text: str, calls: int
) -> None:
    agent = Agent(codec)
    first = agent.ask([ASK], text + call() * calls, TOOLS)
    results = [result(first, n) for n in range(calls)]
    messages = [ASK, *pieces(first), *results]
    following = agent.encode(messages, TOOLS)
    assert following.continues == 0
    assert following.request == tuple(normalise(r) for r in results)
    second = agent.say(following, text + call())
    assert agent.encode([*messages, *pieces(second), result(second)], TOOLS).continues == 1
    assert agent.encode([ASK, first, *results, *pieces(second), result(second)], TOOLS).continues == 1


def test_a_split_reply_is_not_taken_for_one_that_said_its_first_piece_only(codec: ChatCodec) -> None:
    agent = Agent(codec)
    agent.ask([ASK], "Let me see.", TOOLS)
    both = agent.ask([ASK], "Let me see.\n" + call(), TOOLS)
    for _ in range(2):
        assert agent.encode([ASK, *pieces(both), result(both)], TOOLS).continues == 1
        assert agent.encode([ASK, {"role": "assistant", "content": "Let me see."}, ASK], TOOLS).continues == 0
    put_in = {"role": "assistant", "content": "put in"}
    assert agent.encode([ASK, {"role": "assistant", "content": "Let me see."}, put_in, ASK], TOOLS).continues == 0


def test_pieces_that_are_not_the_reply_are_not_taken_for_it(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], call() + call("look"), TOOLS)
    one, two = pieces(reply)
    for wrong in ([one], [two, one], [{"role": "assistant", "content": "other"}, one, two]):
        following = agent.encode([ASK, *wrong, result(reply)], TOOLS)
        assert (following.continues, following.branch_reason) == (None, "history_rewritten")


def compact(reply: Mapping[str, Any]) -> dict[str, Any]:
    calls = [
        {
            **c,
            "function": {
                **c["function"],
                "arguments": json.dumps(json.loads(c["function"]["arguments"]), separators=(",", ":")),
            },
        }
        for c in reply["tool_calls"]
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def invalid(reply: Mapping[str, Any]) -> dict[str, Any]:
    (made,) = reply["tool_calls"]
    wrapped = json.dumps({"INVALID_JSON": made["function"]["arguments"]})
    return {**reply, "tool_calls": [{**made, "function": {**made["function"], "arguments": wrapped}}]}


def smol(reply: Mapping[str, Any]) -> dict[str, Any]:
    made = [{"id": c["id"], "type": "function", "function": c["function"]} for c in reply["tool_calls"]]
    return {"role": "assistant", "content": [{"type": "text", "text": f"Calling tools:\n{made}"}]}


@table(
    ("framework", "back", "continues"),
    [
        ("openai-agents keeps every byte", lambda r: {k: v for k, v in r.items() if k != "reasoning_content"}, True),
        ("langchain serialises arguments again", redump, True),
        ("pydantic-ai serialises them compactly", compact, True),
        ("pydantic-ai keeps the reasoning", lambda r: {**r, "content": None, "reasoning_content": "hm"}, True),
        ("AgentScope 1.0.21 drops the text's field", lambda r: {**r, "content": []}, True),
        ("a name is added", lambda r: {**r, "name": "agent"}, True),
        ("pydantic-ai wraps arguments it cannot read", invalid, False),
        ("smolagents writes calls as text", smol, False),
    ],
)
def test_known_rewritings_continue_where_they_say_the_same_and_else_are_counted(
    codecs: dict[str, ChatCodec], framework: str, back: Callable[[Any], Any], continues: bool
) -> None:
    agent = Agent(codecs["thinking"])
    reply = agent.ask([SYSTEM, ASK], "<think>\nhm\n</think>\n\n" + call(arguments='{"x": "caf\\u00e9"}'), TOOLS)
    assert reply["reasoning_content"] == "hm"
    following = agent.encode([SYSTEM, ASK, back(reply), {**result(reply), "name": None}], TOOLS)
    assert following.continues == (0 if continues else None), framework
    assert following.branch_reason == ("" if continues else "history_rewritten")


# --- merge level "text" ---------------------------------------------------------------------------------------------


@pytest.fixture
def relaxed(tokenizer: Any) -> ChatCodec:
    return ChatCodec(tokenizer, chat_template=THINKING, merge_level="text")


def other_call(reply: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**reply, "tool_calls": [{**reply["tool_calls"][0], **changes}]}


@table(
    ("back", "tools", "overlooked"),
    [
        (lambda r: [SYSTEM, ASK, r], TOOLS, ""),
        (lambda r: [{**SYSTEM, "content": " Be\n brief. "}, ASK, r], TOOLS, "whitespace"),
        (lambda r: [SYSTEM, {**ASK, "name": "bob"}, r], TOOLS, "names"),
        (lambda r: [SYSTEM, ASK, other_call(r, id="new")], TOOLS, "call_ids"),
        (lambda r: [SYSTEM, ASK, other_call(r, function={"name": "look", "arguments": "{}"})], TOOLS, "calls"),
        (lambda r: [SYSTEM, ASK, {"role": "assistant", "content": "Let me see."}], TOOLS, "calls"),
        (lambda r: [SYSTEM, ASK, {**r, "reasoning_content": "edited"}], TOOLS, "reasoning"),
        (lambda r: [SYSTEM, {**ASK, "name": "bob"}, r], TOOLS[:1], "tools"),
    ],
)
def test_what_reads_the_same_continues_and_reports_the_gravest_thing_overlooked(
    relaxed: ChatCodec, codecs: dict[str, ChatCodec], back: Callable[[Any], Any], tools: Any, overlooked: str
) -> None:
    for level, agent in (("text", Agent(relaxed)), ("exact", Agent(codecs["thinking"]))):
        reply = agent.ask([SYSTEM, ASK], "<think>\nhm\n</think>\n\nLet me see.\n" + call(), TOOLS)
        following = agent.encode([*back(reply), result(reply)], tools)  # checks that it begins with the recorded ids
        if level == "exact" and overlooked:
            assert (following.continues, following.approximation) == (None, "")
            continue
        assert (following.continues, following.approximation) == (0, overlooked)
        assert following.request == (normalise(result(reply)),)
        again = agent.say(following, "four")
        final = agent.encode([*back(reply), result(reply), again, ASK], tools)
        assert (final.continues, final.approximation) == (1, overlooked)  # its prompt holds the approximation, too
        assert list(following.tools) == (tools if overlooked == "tools" else [])
        assert final.tools == ()


def test_what_does_not_read_the_same_is_a_branch_at_every_level(relaxed: ChatCodec) -> None:
    agent = Agent(relaxed)
    reply = agent.ask([SYSTEM, ASK], "four", TOOLS)
    for messages in (
        [OTHER, ASK, reply, ASK],
        [SYSTEM, ASK, HINT, reply, ASK],
        [SYSTEM, ASK, {**reply, "content": "5"}, ASK],
    ):
        following = agent.encode(messages, TOOLS)
        assert following.continues is None
        assert following.branch_reason
        assert following.approximation == ""
    assert agent.encode([SYSTEM, {**ASK, "role": "assistant"}, reply, ASK], TOOLS).continues is None


def test_of_turns_that_read_the_same_the_one_that_overlooks_least_is_continued(relaxed: ChatCodec) -> None:
    """The tool's result must not land behind another call (which would train the wrong tokens)."""
    agent = Agent(relaxed)
    replies = [agent.ask([ASK], call(arguments=f'{{"x": {n}}}'), TOOLS) for n in range(3)]
    for n, reply in enumerate(replies):
        renamed = other_call(reply, id="new")
        following = agent.encode([ASK, renamed, {"role": "tool", "tool_call_id": "new", "content": "r"}], TOOLS)
        assert (following.continues, following.approximation) == (n, "call_ids")


def test_a_later_turn_found_by_text_is_preferred_to_an_earlier_exact_one(relaxed: ChatCodec) -> None:
    agent = Agent(relaxed)
    first = agent.ask([ASK], "four")
    second = agent.ask([ASK, first, ASK], "still  four")
    following = agent.encode([ASK, first, ASK, {**second, "content": "still four"}, ASK])
    assert (following.continues, following.approximation) == (1, "whitespace")


# --- AgentScope 1.0.7's made-up finish call ----------------------------------------------------------------------


def finish(said: str, outcome: str = "Successfully generated response.") -> list[dict[str, Any]]:
    made_up = {
        "id": "BDiX",
        "type": "function",
        "function": {"name": "generate_response", "arguments": json.dumps({"response": said})},
    }
    return [
        {"role": "assistant", "content": [{"text": None}], "tool_calls": [made_up]},
        {"role": "tool", "tool_call_id": "BDiX", "content": outcome, "name": "generate_response"},
        {"role": "assistant", "content": said},
    ]


@table("repeated", [True, False])
def test_the_made_up_finish_call_is_the_answer_it_stands_for(codec: ChatCodec, repeated: bool) -> None:
    agent = Agent(codec)
    messages = [ASK]
    for turn in range(3):
        encoded = agent.encode(messages, TOOLS)
        assert encoded.continues == (turn - 1 if turn else None)
        said = f"  reply {turn} \n"
        agent.say(encoded, said)
        messages = [*messages, *finish(said)[: 3 if repeated else 2], ASK]
    assert "generate_response" not in agent.text(agent.encode(messages, TOOLS))


def test_a_finish_call_that_failed_or_was_never_the_models_words_is_history(codec: ChatCodec) -> None:
    agent = Agent(codec)
    agent.ask([ASK], "four", TOOLS)
    assert agent.encode([ASK, *finish("four", "Arguments Validation Error"), ASK], TOOLS).continues is None
    assert agent.encode([ASK, *finish("five"), ASK], TOOLS).continues is None


# --- reading replies --------------------------------------------------------------------------------------------


def test_tool_calls_get_ids_of_their_own_and_unreadable_ones_are_exposed(codec: ChatCodec) -> None:
    agent = Agent(codec)
    first = agent.ask([ASK], call() + call(), TOOLS)
    again = agent.ask([ASK], call(), TOOLS)
    ids = [c["id"] for m in (first, again) for c in m["tool_calls"]]
    assert len(set(ids)) == 3
    assert all(i.startswith("call_") for i in ids)
    broken = agent.ask([ASK], "<tool_call>{oops</tool_call>", TOOLS)
    assert broken["content"] == "<tool_call>{oops</tool_call>" == broken["unparsed_tool_calls"][0]
    assert "tool_calls" not in broken


def test_tool_calls_are_read_only_when_tools_were_offered_and_allowed(codec: ChatCodec, tokenizer: Any) -> None:
    agent = Agent(codec)
    assert agent.ask([ASK], call()) == {"role": "assistant", "content": call()}
    encoded = agent.conversation.encode([ASK], TOOLS, callable_tools=())
    assert encoded.prompt_ids == agent.encode([ASK], TOOLS).prompt_ids
    assert agent.say(encoded, call()) == {"role": "assistant", "content": call()}
    without = Agent(ChatCodec(tokenizer, disable_tool_calls=True))
    assert without.text(without.encode([ASK], TOOLS)) == without.whole([ASK])
    assert without.ask([ASK], call(), TOOLS) == {"role": "assistant", "content": call()}


@table(
    ("text", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nfour", "hm", "four"),
        ("<think>\n\n</think>\n\nfour", "", "four"),
        ("<think>never ended", "never ended", ""),
        ("four <think>later</think>", "", "four <think>later</think>"),
        ("four", "", "four"),
    ],
)
def test_reasoning_is_split_off_where_the_template_has_a_place_for_it(
    codecs: dict[str, ChatCodec], text: str, reasoning: str, content: str
) -> None:
    message = Agent(codecs["thinking"]).ask([ASK], text)
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
    assert Agent(codecs["own"]).ask([ASK], text) == {"role": "assistant", "content": text}


def test_a_thought_opened_by_the_generation_prompt_is_reasoning(tokenizer: Any) -> None:
    agent = Agent(
        ChatCodec(
            tokenizer,
            chat_template=THINKING.replace(
                "'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>\n' }}{% endif"
            ),
        )
    )
    assert agent.codec.template.thinking
    assert agent.ask([ASK], "hm\n</think>\n\nfour") == {
        "role": "assistant",
        "content": "four",
        "reasoning_content": "hm",
    }


@table("sent_back", ["four", "<think>\nhm\n</think>\n\nfour"])
def test_dropped_reasoning_is_spliced_back_even_when_the_user_speaks_again(
    codecs: dict[str, ChatCodec], sent_back: str
) -> None:
    agent = Agent(codecs["thinking"])
    assert agent.codec.template.drops_reasoning
    assert not codecs["own"].template.drops_reasoning
    agent.ask([ASK], "<think>\nhm\n</think>\n\nfour")
    following = agent.encode([ASK, {"role": "assistant", "content": sent_back}, ASK])
    assert following.continues == 0
    assert agent.text(following).count("hm") == 1


def test_special_tokens_inside_a_reply_stay_visible(codec: ChatCodec) -> None:
    agent = Agent(codec)
    reply = agent.ask([ASK], "a<|im_start|>b")
    assert reply["content"] == "a<|im_start|>b"
    assert agent.encode([ASK, reply, ASK]).continues == 0


# --- refusals ---------------------------------------------------------------------------------------------------


@table(
    ("messages", "named"),
    [
        ([], "empty"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input_audio"),
        ([{"role": "user", "content": 3}], "int"),
        ([{"role": "user", "content": [3]}], "int"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "int"),
        ([{"role": "function", "content": ""}], "function"),
        ([{"content": ""}], "role"),
        (["hello"], "hello"),
        ([{"role": ["user"], "content": ""}], "role"),
        ([{"role": "assistant", "content": "", "function_call": {"name": "f"}}], "function_call"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}], "tool_calls"),
    ],
)
def test_what_cannot_be_rendered_is_refused_by_name(codec: ChatCodec, messages: Any, named: str) -> None:
    with pytest.raises(UnsupportedRequest, match=named) as error:
        codec.conversation().encode(messages)
    assert isinstance(error.value, EpisodeError)


def test_a_template_that_refuses_a_conversation_says_so(tokenizer: Any) -> None:
    picky = "{% if messages[-1].content == 'bad' %}{{ raise_exception('not bad') }}{% endif %}" + PLAIN
    with pytest.raises(UnsupportedRequest, match="not bad"):
        ChatCodec(tokenizer, chat_template=picky).conversation().encode([{"role": "user", "content": "bad"}])


def test_odd_ids_and_lone_surrogates_do_no_harm(codec: ChatCodec) -> None:
    agent = Agent(codec)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": ["odd"], "function": {"name": "calc", "arguments": {"x": 1}}}],
        },
        {"role": "tool", "tool_call_id": 7, "content": "\udce4"},
    ]
    encoded = agent.encode(messages, TOOLS)
    assert "\ufffd" in agent.text(encoded)
    assert '{"x": 1}' in agent.text(encoded)
    assert agent.encode([*messages, agent.say(encoded, "four"), ASK], TOOLS).continues == 0


@table(
    ("template", "named"),
    [
        (None, "no chat template"),
        ("{% for m in messages %}[INST]{{ m.content }}</s>{% endfor %}", "</s>"),
        ("{% if %}", "cannot render"),
        ("{{ raise_exception('no') }}", "no"),
    ],
)
def test_a_template_of_no_known_family_is_a_config_error(template: str | None, named: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=named) as error:
        ChatCodec(tokenizer)
    assert "astuner.model.chat_template" in str(error.value)


def test_an_end_of_turn_that_is_not_one_token_is_a_config_error() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    with pytest.raises(ConfigError, match=r"<\|im_end\|>.*not a single token"):
        ChatCodec(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=PLAIN))


def test_tools_for_a_template_without_a_place_for_them_are_a_config_error(tokenizer: Any) -> None:
    conversation = ChatCodec(tokenizer, chat_template=PLAIN).conversation()
    assert conversation.encode([ASK], []).continues is None
    with pytest.raises(ConfigError, match="disable_tool_calls"):
        conversation.encode([ASK], TOOLS)


# --- cost -------------------------------------------------------------------------------------------------------


def test_a_turn_tokenises_what_is_new_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = ChatCodec(make_tokenizer())
    agent, spent = Agent(codec), 0
    encode = codec.template.encode

    def counted(text: str) -> list[int]:
        nonlocal spent
        ids = encode(text)
        spent += len(ids)
        return ids

    messages, generated = [SYSTEM, ASK], 0
    for turn in range(40):
        monkeypatch.setattr(codec.template, "encode", counted)
        encoded = agent.encode(messages, TOOLS)
        monkeypatch.setattr(codec.template, "encode", encode)
        reply = agent.say(encoded, f"Step {turn}.\n{call()}")
        generated += len(agent.generations[-1].response_ids)
        messages = [*messages, redump(reply), result(reply)]
    new = len(encoded.prompt_ids) - (generated - len(agent.generations[-1].response_ids))
    assert spent == new + 39  # each continuation is tokenised behind the end token that the reply already has


# --- properties -------------------------------------------------------------------------------------------------

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"], exclude_characters="<>|"), min_size=1, max_size=8)
ARGUMENTS = st.dictionaries(WORDS, WORDS | st.integers() | st.booleans() | st.none(), max_size=2)


def trl_template(name: str) -> str:
    import importlib.util

    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, which ships copies of the real templates, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@pytest.fixture(scope="session", params=["own", "thinking", "trl:qwen2_5", "trl:qwen3", "trl:qwen3_instruct_2507"])
def any_codec(request: pytest.FixtureRequest, codecs: dict[str, ChatCodec], tokenizer: Any) -> ChatCodec:
    if request.param in codecs:
        return codecs[request.param]
    return ChatCodec(tokenizer, chat_template=trl_template(request.param.removeprefix("trl:")))


@pytest.mark.slow
@settings(max_examples=40)
@given(data=st.data())
def test_canonical_conversations_are_what_the_template_writes(any_codec: ChatCodec, data: st.DataObject) -> None:
    """Random forks, retries and parallel calls: every later turn continues, and reads like the whole rendering."""
    agent = Agent(any_codec)
    tools = data.draw(st.sampled_from([TOOLS, TOOLS[:1]]))
    system = data.draw(st.sampled_from([[], [SYSTEM]]))
    histories: list[tuple[list[Any], int | None]] = [([*system, {"role": "user", "content": data.draw(WORDS)}], None)]
    for turn in range(data.draw(st.integers(2, 7))):
        messages, last = data.draw(st.sampled_from(histories))
        encoded = agent.encode(messages, tools)
        assert encoded.continues == last
        assert agent.text(encoded) == agent.whole(messages, tools)
        content = f"{turn} {data.draw(WORDS)}"
        calls = data.draw(st.lists(ARGUMENTS, max_size=3))
        # tojson is what the template writes with, so it is what canonical means
        texts = [content, *(call("calc", json.dumps(c, ensure_ascii=False)) for c in calls)]
        reply = agent.say(encoded, "\n".join(texts), end=data.draw(st.sampled_from(["<|im_end|>", ""])))
        assert reply["content"] == content
        assert len(reply.get("tool_calls", [])) == len(calls)
        heard = [result(reply, n, data.draw(WORDS)) for n in range(len(calls))]
        if not heard or data.draw(st.booleans()):
            heard.append({"role": "user", "content": data.draw(WORDS)})
        histories.append(([*messages, data.draw(st.sampled_from([reply, redump(reply)])), *heard], turn))


@pytest.mark.slow
@given(seed=st.integers(0, 2**32 - 1), texts=st.lists(st.text(max_size=12), min_size=3, max_size=7))
def test_no_history_however_mangled_breaks_a_prefix(any_codec: ChatCodec, seed: int, texts: list[str]) -> None:
    """Agents that drop, repeat, swap and edit messages, change tools, and models that write anything."""
    chance, agent = random.Random(seed), Agent(any_codec)
    messages: list[dict[str, Any]] = [SYSTEM, ASK]
    for text in texts:
        tools = chance.choice([TOOLS, TOOLS, TOOLS[:1], None])
        encoded = agent.encode(messages, tools)  # checks prefix and reason
        if encoded.continues is None:
            assert agent.text(encoded) == any_codec.template.decode(
                any_codec.template.encode(agent.whole(messages, tools))
            )
        said = (
            chance.choice(["", "<think>"]) + text + chance.choice(["", call(), call() + call("look"), "<tool_call>{"])
        )
        reply = agent.say(encoded, said or "x", end=chance.choice(["<|im_end|>", ""]))
        messages = [*messages, chance.choice([reply, redump(reply)])]
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


def test_what_follows_a_rewritten_call_goes_on_from_there(codec: ChatCodec) -> None:
    agent = Agent(codec)
    said = agent.ask([ASK], call(arguments='{"x": 1}'), TOOLS)
    other = redump(said)
    other["tool_calls"][0]["function"]["arguments"] = '{"x": 2}'  # the id is the model's, the call is not
    messages = [ASK, other, result(said)]
    assert agent.encode(messages, TOOLS).branch_reason == "history_rewritten"
    messages = [*messages, agent.ask(messages, "two", TOOLS), ASK]
    assert agent.encode(messages, TOOLS).continues == 1
    assert agent.encode([ASK, redump(said), result(said)], TOOLS).continues == 0


# --- what makes a message the one that was recorded --------------------------------------------------------------


def told(arguments: Any, name: str = "calc", text: str = "", **more: Any) -> dict[str, Any]:
    """An assistant message with a call that the model did not make."""
    made = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": text, "tool_calls": [made], **more}


@table(
    "other",
    [
        told('{"x": "rm -rf /"}', "shell"),
        told('{"x": 2}'),
        told('{"x": 1}', "look"),
        told('{"x": 1}', text="DELETE ALL"),
        told('{"x": 1}', reasoning_content="hm"),
    ],
)
def test_a_call_that_the_model_did_not_make_is_known_by_all_it_says(codec: ChatCodec, other: Any) -> None:
    agent, outcome = Agent(codec), {"role": "tool", "tool_call_id": "c1", "content": "r"}
    shot = [ASK, told('{"x": 1}'), outcome]
    reply = agent.ask(shot, "four", TOOLS)
    messages = [ASK, other, outcome, reply, ASK]
    branch = agent.encode(messages, TOOLS)
    assert (branch.continues, branch.branch_reason) == (None, "history_rewritten")
    assert agent.text(branch) == agent.whole(messages, TOOLS)
    assert agent.encode([*shot, reply, ASK], TOOLS).continues == 0
    more = agent.say(branch, "five")  # what follows the other call goes on from there
    assert agent.encode([*messages, more, ASK], TOOLS).continues == 1


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\nyes"


def test_replies_that_differ_in_their_thoughts_only_are_told_apart_by_them(codecs: dict[str, ChatCodec]) -> None:
    agent = Agent(codecs["thinking"])
    one, other = agent.ask([ASK], thought("AAA")), agent.ask([ASK], thought("BBB"))
    for number, reply, said in ((0, one, "AAA"), (1, other, "BBB")):
        for spelled in (reply, {**reply, "reasoning_content": f" {said}\n"}, {**reply, "content": " yes"}):
            following = agent.encode([ASK, spelled, ASK])
            assert following.continues == number
            assert said in agent.text(following)
        whole = {"role": "assistant", "content": thought(said)}
        assert agent.encode([ASK, whole, ASK]).continues == number
    assert agent.encode([ASK, {"role": "assistant", "content": "yes"}, ASK]).continues == 1
    edited = agent.encode([ASK, {**one, "reasoning_content": "edited"}, ASK])
    assert (edited.continues, edited.branch_reason) == (None, "history_rewritten")


def test_where_the_thought_is_dropped_the_reply_is_the_one_that_the_rest_follows(codecs: dict[str, ChatCodec]) -> None:
    agent = Agent(codecs["thinking"])
    dropped = {"role": "assistant", "content": "yes"}
    one = agent.ask([ASK], thought("AAA"))
    third = agent.ask([ASK, one, HINT], "so")
    other = agent.ask([ASK], thought("BBB"))
    assert agent.encode([ASK, dropped, HINT, third, ASK]).continues == 1
    assert agent.encode([ASK, dropped, ASK]).continues == 2
    assert agent.encode([ASK, other, HINT, third, ASK]).continues == 2  # third answered to AAA
    assert agent.encode([ASK, one, HINT, third, ASK]).continues == 1


def test_an_edited_thought_beside_a_call_is_not_the_recorded_one(codecs: dict[str, ChatCodec]) -> None:
    agent = Agent(codecs["thinking"])
    reply = agent.ask([ASK], "<think>\nhm\n</think>\n\n" + call(), TOOLS)
    for back, continues in (({}, 0), ({"reasoning_content": None}, 0), ({"reasoning_content": "no"}, None)):
        said = {**redump(reply), **back}
        assert agent.encode([ASK, said, result(reply)], TOOLS).continues == continues


def test_words_of_two_turns_are_not_those_of_a_retry_that_said_both(codec: ChatCodec) -> None:
    agent = Agent(codec)
    one = agent.ask([ASK], "A")
    two = agent.ask([ASK, one], "B")
    agent.ask([ASK], "A\nB")
    assert agent.encode([ASK, one, two, ASK]).continues == 1


SAME_NUMBERS = [
    ("105", "105.0"),
    ("105.0", "105"),
    ("1.05e2", "105"),
    ("1e2", "1E+2"),
    ("-0.0", "0"),
    ("0e5", "-0"),
    ("1e-2", "0.01"),
    ("0.1", "0.1000000000000000055511151231257827"),
    ("9007199254740993.0", "9007199254740993"),
    ("1e23", "100000000000000000000000"),
    ("1.5e300", "15" + "0" * 299),
    ('[1.0, [2, {"a": 3e0}]]', '[1, [2.0, {"a": 3}]]'),
    ('{"a": 1, "b": [true, 2.50]}', '{"b": [true, 2.5], "a": 1.0}'),
]
"""Values that are written in two ways and are the same in JSON."""
OTHER_NUMBERS = [
    ("1", "true"),
    ("1.0", "true"),
    ("0", "false"),
    ("0", "null"),
    ("1", '"1"'),
    ("1.0", '"1.0"'),
    ("1", "2"),
    ("105", "105.5"),
    ("9007199254740993", "9007199254740992"),
    ("9007199254740993", "9007199254740992.0"),
    ("12345678901234567890", "12345678901234567000"),
    ("[1, 2]", "[2, 1]"),
    ("[1]", "[1, 1]"),
    ("[true]", "[1.0]"),
    ('{"a": 1}', '{"a": 1, "b": null}'),
    ('{"a": {"b": 1}}', '{"a": {"b": true}}'),
    ("1e400", "1e401"),
]
"""Values that are not."""


def told_back(reply: Any, arguments: Any) -> dict[str, Any]:
    """The reply, with other arguments of its call: text or an object."""
    function = {"name": "calc", "arguments": arguments}
    return {**reply, "tool_calls": [{**reply["tool_calls"][0], "function": function}]}


@pytest.mark.parametrize("level", ["exact", "text"])
@table("spelled, again", SAME_NUMBERS)
def test_a_number_that_is_written_in_another_way_is_the_same_argument(
    tokenizer: Any, level: Any, spelled: str, again: str
) -> None:
    agent = Agent(ChatCodec(tokenizer, merge_level=level))
    reply = agent.ask([ASK], f'<tool_call>{{"name": "calc", "arguments": {{"x": {spelled}}}}}</tool_call>', TOOLS)
    for arguments in (f'{{"x": {again}}}', json.loads(f'{{"x": {again}}}')):
        following = agent.encode([ASK, told_back(reply, arguments), result(reply)], TOOLS)
        assert (following.continues, following.approximation) == (0, "")
        following = agent.encode([ASK, told_back(reply, f'{{"x":   {again}}}'), result(reply), ASK], TOOLS)
        assert (following.continues, following.approximation) == (0, "")


@table("spelled, again", OTHER_NUMBERS)
def test_a_value_of_another_type_or_size_is_another_argument(codec: ChatCodec, spelled: str, again: str) -> None:
    assert not same_arguments(f'{{"x": {spelled}}}', f'{{"x": {again}}}')
    agent = Agent(codec)
    reply = agent.ask([ASK], f'<tool_call>{{"name": "calc", "arguments": {{"x": {spelled}}}}}</tool_call>', TOOLS)
    if not reply.get("tool_calls"):  # a number that no double holds
        return
    for _ in range(2):  # the second time, it was seen before
        for back in (f'{{"x": {spelled}}}', json.loads(f'{{"x": {spelled}}}')):
            assert agent.encode([ASK, told_back(reply, back), result(reply)], TOOLS).continues == 0
        for back in (f'{{"x": {again}}}', json.loads(f'{{"x": {again}}}')):
            following = agent.encode([ASK, told_back(reply, back), result(reply)], TOOLS)
            assert following.branch_reason == "history_rewritten"


def test_a_number_that_no_double_holds_is_no_argument(codec: ChatCodec) -> None:
    """Python reads it as infinity, which JSON cannot write."""
    said = '<tool_call>{"name": "calc", "arguments": {"x": 1e400}}</tool_call>'
    reply = Agent(codec).ask([ASK], said, TOOLS)
    assert (reply["content"], reply["unparsed_tool_calls"]) == (said, [said])


@pytest.mark.parametrize("changed", [{"a": 1, "b": True}, {"a": 1, "b": 1.0}, {"b": 1, "a": 1}])
@pytest.mark.parametrize("level", ["exact", "text"])
def test_tools_that_are_written_in_another_way_are_other_tools(tokenizer: Any, level: Any, changed: Any) -> None:
    agent = Agent(ChatCodec(tokenizer, merge_level=level))

    def tools(schema: Any) -> list[Any]:
        return [{"type": "function", "function": {"name": "calc", "parameters": schema}}]

    reply = agent.ask([ASK], "four", tools({"a": 1, "b": 1}))
    assert agent.encode([ASK, reply, ASK], tools({"a": 1, "b": 1})).continues == 0
    following = agent.encode([ASK, reply, ASK], tools(changed))
    if level == "exact":
        assert following.branch_reason == "tools_changed"
    else:
        assert (following.continues, following.approximation) == (0, "tools")
        assert json.dumps(following.tools) == json.dumps(tools(changed))


def test_the_tools_of_a_prompt_are_those_that_were_offered_whatever_becomes_of_them(codec: ChatCodec) -> None:
    tools = copy.deepcopy(TOOLS)
    encoded = codec.conversation().encode([ASK], tools)
    tools[0]["function"]["name"] = "other"
    assert list(encoded.tools) == list(encoded.callable_tools) == TOOLS


def test_many_assistant_messages_in_a_row_are_looked_at_once_each(
    codec: ChatCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    from astuner.chat import history

    agent, looked = Agent(codec), 0
    reply = agent.ask([ASK], call() + call(), TOOLS)
    role_of = history.role_of

    def counted(message: Any) -> str:
        nonlocal looked
        looked += 1
        return role_of(message)

    row = [{"role": "assistant", "content": f"put in {n}"} for n in range(300)]
    monkeypatch.setattr(history, "role_of", counted)
    assert agent.encode([ASK, *row, ASK], TOOLS).continues is None
    assert looked <= 4 * len(row)
    assert agent.encode([ASK, *pieces(reply), *row, ASK], TOOLS).continues == 0


def test_what_comes_back_in_anothers_message_is_a_history_retold(codec: ChatCodec) -> None:
    agent = Agent(codec)
    agent.ask([SYSTEM, ASK], "The answer is four.\n")
    retold = {"role": "user", "content": "# History\nbob: The answer is four.\nalice: Why?"}
    assert agent.encode([SYSTEM, retold]).branch_reason == "history_retold"
    assert agent.encode([SYSTEM, {**retold, "content": "# History\nbob: The answer"}]).branch_reason == (
        "new_conversation"
    )
    put_in = {"role": "assistant", "content": "put in"}
    assert agent.encode([SYSTEM, retold, put_in, ASK]).branch_reason == "history_rewritten"


# --- counting -------------------------------------------------------------------------------------------------------


@table("thought", ["2 and 2", "zwölf, 十二", "a", "a" * 300, ""])
def test_tokens_of_the_reasoning_are_counted_to_its_end(codecs: dict[str, ChatCodec], thought: str) -> None:
    from astuner.contracts.messages import ChatReply
    from astuner.contracts.types import Turn
    from astuner_gateway.endpoint.request import reasoning_tokens

    template, asked = codecs["thinking"].template, 0
    agent = Agent(codecs["thinking"])
    message = agent.ask([ASK], f"<think>\n{thought}\n</think>\n\nfour" if thought else "four")
    turn = Turn(index=0, agent="a", generation=agent.generations[0], continues=None, message=message)
    ids = turn.generation.response_ids

    def decode(part: Sequence[int]) -> str:
        nonlocal asked
        asked += 1
        return template.decode(part)

    reply = ChatReply(
        message=message,
        finish_reason="stop",
        prompt_tokens=1,
        completion_tokens=len(ids),
        turn_index=0,
        reply_id="r",
        turn=turn,
        _decode=decode,
    )
    assert reasoning_tokens(reply) == (len(template.encode(f"<think>\n{thought}")) if thought else 0)
    assert asked <= 2 + len(ids).bit_length()
    assert reasoning_tokens(replace(reply, turn=None)) == 0  # a model outside of the run
