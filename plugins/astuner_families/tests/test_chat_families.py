"""Model families: each real chat template is recognised by rendering, read back, written, and continued exactly."""

from __future__ import annotations

import datetime
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec, EncodedPrompt
from astuner.chat.reply import assistant_message
from astuner.chat.template import ChatTemplate
from astuner.contracts.errors import ConfigError, UnsupportedRequest
from astuner.contracts.messages import normalise
from astuner.contracts.types import BRANCH_REASONS, FinishReason, Generation
from astuner.plugins.loader import load_plugins
from astuner.testing import make_tokenizer
from astuner_families.families import short_ids
from astuner_models.serving import TEMPLATES
from tests.table import table

DATA = Path(__file__).parent / "templates"
FAMILIES: dict[str, dict[str, Any]] = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
WITH_TOOLS = [name for name, known in FAMILIES.items() if known["calls"]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {
                    "x": {"type": "integer"},
                    "s": {"type": "string"},
                    "any": {},
                    "flag": {"type": "boolean"},
                    "maybe": {"type": ["integer", "null"]},
                },
            },
        },
    }
]
SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}
MORE = {"role": "user", "content": "Are you sure?"}


def jinja(name: str) -> str:
    known = FAMILIES[name]
    if "shipped" in known:
        return TEMPLATES[known["shipped"]].read_text(encoding="utf-8")
    return (DATA / known["file"]).read_text(encoding="utf-8") if "file" in known else from_trl(known["trl"])


def from_trl(name: str) -> str:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl, from which templates under licences of their own are read, is not installed")
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(name: str) -> Any:
    known = FAMILIES[name]
    return make_tokenizer(jinja(name), known["special"], eos_token=known["eos"], bos_token=known["bos"])


@cache
def codec(name: str) -> ChatCodec:
    return ChatCodec(tokenizer(name))


def call(arguments: str = '{"x": 1}', name: str = "calc", label: str = "given") -> dict[str, Any]:
    return {"id": label, "type": "function", "function": {"name": name, "arguments": arguments}}


class Agent:
    """A conversation, and a model of the family that says what it is told."""

    def __init__(self, codec: ChatCodec) -> None:
        self.codec, self.template = codec, codec.template
        self.conversation = codec.conversation()
        self.generations: list[Generation] = []

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> EncodedPrompt:
        encoded = self.conversation.encode(messages, tools)
        assert encoded.branch_reason in ("", *BRANCH_REASONS)
        if encoded.continues is not None:
            earlier = self.generations[encoded.continues]
            before = [*earlier.prompt_ids, *earlier.response_ids]
            assert encoded.prompt_ids[: len(before)] == before
        return encoded

    def say(self, encoded: EncodedPrompt, text: str, end: str) -> dict[str, Any]:
        ids = self.template.encode(text + end)
        self.generations.append(
            Generation(
                prompt_ids=tuple(encoded.prompt_ids),
                response_ids=tuple(ids),
                logprobs=(0.0,) * len(ids),
                finish_reason=FinishReason.STOP if end else FinishReason.LENGTH,
                policy_version=0,
            )
        )
        return self.conversation.accept(encoded, self.generations[-1], len(self.generations) - 1)

    def added(self, encoded: EncodedPrompt) -> str:
        """What the prompt holds behind the reply that it continues."""
        assert encoded.continues is not None, encoded.branch_reason
        earlier = self.generations[encoded.continues]
        return self.template.decode(encoded.prompt_ids[len(earlier.prompt_ids) + len(earlier.response_ids) :])

    def whole(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        return self.template.render([normalise(m) for m in messages], tools)


def result(reply: Mapping[str, Any], n: int = 0, content: str = "4") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": reply["tool_calls"][n]["id"], "content": content}


def without_empty_thoughts(text: str) -> str:
    """Qwen3's template writes an empty thought in front of a last reply only; what was recorded is kept."""
    return re.sub(r"<think>\s*</think>\s*", "", text)


def call_end(name: str) -> str:
    """The token at which a model of the family stops for a tool."""
    stops = FAMILIES[name]["stops"]
    return {"gpt-oss": "<|call|>", "glm-4.5": "<|observation|>"}.get(name, stops[0])


# --- what rendering finds out -------------------------------------------------------------------------------------


@table("name", FAMILIES)
def test_a_template_is_recognised_by_what_it_renders(name: str) -> None:
    known, template = FAMILIES[name], codec(name).template
    assert template.format.name == known["family"]
    assert template.renders_tools == bool(known["calls"])
    assert template.calls.name.startswith(known["calls"] or "no tool calls")
    assert (template.reasons, template.drops_reasoning) == (known["reasons"], known["drops_reasoning"])
    assert template.thinking == known["thinking"]
    assert [template.decode([i]) for i in template.stop_token_ids] == known["stops"]
    assert set(template.stop_token_ids) <= set(codec(name).stop_token_ids)
    assert template.incremental == known["incremental"] == (not template.breaks)


def test_a_template_says_when_it_cannot_be_continued() -> None:
    first = min(codec("mistral-small-3.2").template.breaks)
    assert (first.system, first.tools, first.following) == (False, True, (False, True, False))
    agent = Agent(codec("mistral-small-3.2"))
    reply = agent.say(agent.encode([ASK], TOOLS), "four", "</s>")
    branch = agent.encode([ASK, reply, MORE], TOOLS)
    assert (branch.continues, branch.branch_reason) == (None, "template_not_incremental")
    assert agent.template.decode(branch.prompt_ids) == agent.whole([ASK, reply, MORE], TOOLS)
    agent = Agent(codec("mistral-small-3.2"))
    reply = agent.say(agent.encode([ASK]), "four", "</s>")
    assert agent.added(agent.encode([ASK, reply, MORE])) == "[INST]Are you sure?[/INST]"


@table("name", [n for n in FAMILIES if n not in WITH_TOOLS])
def test_tools_are_refused_where_the_template_does_not_show_them(name: str) -> None:
    with pytest.raises(ConfigError, match=r"astuner\.model\.chat_template.*disable_tool_calls"):
        codec(name).conversation().encode([ASK], TOOLS)


@table("trl", ["cohere", "phi3", "gemma4", "idefics3"])
def test_a_template_of_no_known_family_is_refused_and_not_guessed_at(trl: str) -> None:
    with pytest.raises(ConfigError, match=r"astuner\.model\.chat_template"):
        ChatCodec(make_tokenizer(from_trl(trl), ["<turn|>", "<|turn>", "<|end|>", "<|END_OF_TURN_TOKEN|>"]))


# --- continuing -----------------------------------------------------------------------------------------------------


@table("name", WITH_TOOLS)
def test_a_react_loop_continues_exactly_and_reads_like_the_whole_rendering(name: str) -> None:
    """The reply of each turn is what the template itself would write, so the whole prompt is, too."""
    agent, messages = Agent(codec(name)), [ASK]
    for turn in range(4):
        encoded = agent.encode(messages, TOOLS)
        assert encoded.continues == (turn - 1 if turn else None), encoded.branch_reason
        text, whole = agent.template.decode(encoded.prompt_ids), agent.whole(messages, TOOLS)
        assert without_empty_thoughts(text) == without_empty_thoughts(whole)
        said = agent.template.write_reply("", [call(f'{{"x": {turn}}}')])
        reply = agent.say(encoded, said, call_end(name))
        assert [c["function"]["arguments"] for c in reply["tool_calls"]] == [f'{{"x": {turn}}}']
        assert "unparsed_tool_calls" not in reply
        # as a framework gives it back: arguments serialised again, no name on the result
        given = json.dumps(json.loads(reply["tool_calls"][0]["function"]["arguments"]), separators=(",", ":"))
        back = {
            "role": "assistant",
            "content": None,
            "tool_calls": [call(given, label=reply["tool_calls"][0]["id"])],
        }
        messages = [*messages, back, result(reply)]


@table("name", FAMILIES)
def test_a_plain_conversation_continues_in_every_family(name: str) -> None:
    agent = Agent(codec(name))
    end = FAMILIES[name]["stops"][0]
    first = agent.say(agent.encode([ASK]), agent.template.write_reply("four"), end)
    assert first == {"role": "assistant", "content": "four"}
    following = agent.encode([ASK, first, MORE])
    added = agent.added(following)
    assert agent.whole([ASK, first, MORE]).endswith(added)
    # the stop token is never written twice, and something always parts the reply from what follows
    assert not added.startswith(end)
    assert "Are you sure?" in added


@table("name", FAMILIES)
def test_a_truncated_reply_is_ended_in_the_prompt_and_gains_nothing(name: str) -> None:
    agent = Agent(codec(name))
    reply = agent.say(agent.encode([ASK]), agent.template.write_reply("The answer"), "")
    following = agent.encode([ASK, reply, MORE])
    added = agent.added(following)
    ends = agent.template.format.closes or agent.template.format.follows
    assert added.startswith(ends)
    assert agent.whole([ASK, {"role": "assistant", "content": "The answer"}, MORE]).endswith(added)
    assert not set(agent.generations[0].response_ids[-1:]) & set(agent.template.stop_token_ids)


ORDER = {"role": "system", "content": "From now on, be long."}
LATER = {"role": "developer", "content": "Be short again."}


@pytest.mark.parametrize("following", [[ORDER], [ORDER, MORE], [MORE, ORDER], [ORDER, MORE, LATER]])
@pytest.mark.parametrize("first", [[ASK], [SYSTEM, ASK]])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_system_message_is_shown_or_refused_and_never_lost(name: str, first: Any, following: Any) -> None:
    agent = Agent(codec(name))
    reply = agent.say(agent.encode(first), agent.template.write_reply("four"), FAMILIES[name]["stops"][0])
    messages = [*first, reply, *following]
    refused = ""
    try:
        encoded = agent.encode(messages)
    except UnsupportedRequest as refusal:
        refused = str(refusal)
    if " omits " in refused:
        shown = agent.whole(messages)
        assert any(m["content"] in refused and m["content"] not in shown for m in messages)
        return
    if refused:  # these templates say so themselves
        assert name in ("mistral-nemo", "mistral-small-3.2", "qwen3.5", "gemma-3")
        return
    text = agent.template.decode(encoded.prompt_ids)
    assert [text.count(message["content"]) for message in messages] == [1] * len(messages)
    if encoded.continues is None:
        assert encoded.branch_reason == "template_not_incremental"
        assert text == agent.whole(messages)
        assert min(agent.template.breaks).following.systems


def test_a_system_message_that_a_template_never_shows_is_refused_by_name() -> None:
    agent = Agent(codec("gpt-oss"))
    reply = agent.say(agent.encode([SYSTEM, ASK]), agent.template.write_reply("four"), "<|return|>")
    with pytest.raises(UnsupportedRequest, match="omits the system message 'From now on, be long"):
        agent.encode([SYSTEM, ASK, reply, ORDER, MORE])
    assert agent.encode([SYSTEM, ASK, reply, MORE]).continues == 0


@pytest.mark.parametrize("content", ['a "b"\n\\c', "é & <b>", " \n", ""])
@pytest.mark.parametrize("name", WITH_TOOLS)
def test_a_result_that_the_template_escapes_is_not_taken_for_lost(name: str, content: str) -> None:
    agent = Agent(codec(name))
    reply = agent.say(agent.encode([ASK], TOOLS), agent.template.write_reply("", [call()]), call_end(name))
    assert agent.encode([ASK, reply, result(reply, content=content)], TOOLS).continues == 0
    assert agent.encode([SYSTEM, ASK, reply, result(reply, content=content)], TOOLS).continues is None


@table("name", FAMILIES)
def test_a_message_that_speaks_of_stand_ins_is_whole(name: str) -> None:
    agent = Agent(codec(name))
    reply = agent.say(agent.encode([ASK]), agent.template.write_reply("four"), FAMILIES[name]["stops"][0])
    said = {"role": "user", "content": "before astuner-stand-in-reply after astuner-probe-1"}
    assert said["content"] in agent.added(agent.encode([ASK, reply, said]))


@pytest.mark.parametrize("name", ["llama-3.1", "gpt-oss"])
@pytest.mark.parametrize("labels", [(None, None), ("a", "a"), ("a", "b"), (None, "b")])
def test_results_of_calls_that_share_an_id_or_have_none_are_shown_once(name: str, labels: Any) -> None:
    calls = [call(f'{{"x": {n}}}', label=label) for n, label in enumerate(labels)]
    results = [{"role": "tool", "tool_call_id": label, "content": f"RES{n}"} for n, label in enumerate(labels)]
    text = Agent(codec(name)).whole([ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *results], TOOLS)
    places = [text.index(piece) for piece in ('"x": 0' if '"x": 0' in text else '"x":0', "RES0", "RES1")]
    assert places == sorted(places)
    assert (text.count("RES0"), text.count("RES1")) == (1, 1)


@table(
    ("end", "added"),
    [
        ("<|user|>", "\nAre you sure?<|assistant|>"),
        ("<|observation|>", "<|user|>\nAre you sure?<|assistant|>"),
        ("<|endoftext|>", "<|user|>\nAre you sure?<|assistant|>"),
        ("", "<|user|>\nAre you sure?<|assistant|>"),
    ],
)
def test_a_stop_token_that_begins_what_follows_is_not_repeated(end: str, added: str) -> None:
    agent = Agent(codec("glm-4.5"))
    reply = agent.say(agent.encode([ASK]), "\n<think></think>\nfour", end)
    assert reply["content"] == "four"
    assert agent.added(agent.encode([ASK, reply, MORE])) == added


@table(("end", "added"), [("<|return|>", ""), ("<|call|>", ""), ("", "<|end|>")])
def test_harmonys_end_tokens_stand_for_one_another(end: str, added: str) -> None:
    agent = Agent(codec("gpt-oss"))
    reply = agent.say(agent.encode([ASK]), "<|channel|>final<|message|>four", end)
    rest = "<|start|>user<|message|>Are you sure?<|end|><|start|>assistant"
    assert agent.added(agent.encode([ASK, reply, MORE])) == added + rest


def test_llama_ends_a_turn_in_two_ways() -> None:
    agent = Agent(codec("llama-3.1"))
    reply = agent.say(
        agent.encode([ASK], TOOLS), '<|python_tag|>{"name": "calc", "parameters": {"x": 1}}', "<|eom_id|>"
    )
    added = agent.added(agent.encode([ASK, reply, result(reply)], TOOLS))
    assert added.startswith("<|start_header_id|>ipython<|end_header_id|>")


def test_results_of_harmony_name_the_tool_though_the_framework_does_not() -> None:
    agent = Agent(codec("gpt-oss"))
    reply = agent.say(agent.encode([ASK], TOOLS), agent.template.write_reply("", [call()]), "<|call|>")
    assert "<|start|>functions.calc to=assistant" in agent.added(agent.encode([ASK, reply, result(reply)], TOOLS))


def test_the_id_that_a_mistral_model_gave_its_call_is_the_one_its_result_names() -> None:
    agent = Agent(codec("mistral-nemo"))
    said = '[TOOL_CALLS][{"name": "calc", "arguments": {"x": 1}, "id": "VvvODy9mT"}]'
    reply = agent.say(agent.encode([ASK], TOOLS), said, "</s>")
    assert reply["tool_calls"][0]["id"].endswith("_VvvODy9mT")
    assert '"call_id": "VvvODy9mT"' in agent.added(agent.encode([ASK, reply, result(reply)], TOOLS))
    again = agent.say(agent.encode([MORE], TOOLS), said, "</s>")  # models repeat their ids; ours are unique
    assert again["tool_calls"][0]["id"] != reply["tool_calls"][0]["id"]


def test_results_name_their_tool_since_mistrals_v2_refuses_those_that_do_not() -> None:
    reply = {"role": "assistant", "content": "", "tool_calls": [call(label="a")]}
    heard = [{"role": "tool", "tool_call_id": label, "content": "4"} for label in ("a", "b")]
    assert [message.get("name") for message in short_ids([reply, *heard])] == [None, "calc", None]


def test_parallel_calls_from_elsewhere_are_made_one_by_one_where_a_family_makes_one_at_a_time() -> None:
    both = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call('{"x": 1}', label="a"), call('{"x": 2}', label="b")],
    }
    results = [{"role": "tool", "tool_call_id": label, "content": f"result of {label}"} for label in ("b", "a")]
    for name in ("llama-3.1", "gpt-oss"):
        agent = Agent(codec(name))
        text = agent.template.decode(agent.encode([ASK, both, *results, MORE], TOOLS).prompt_ids)
        places = [text.index(piece) for piece in ('{"x": 1}', "result of a", '{"x": 2}', "result of b")]
        assert places == sorted(places)


def test_a_date_in_the_template_does_not_break_a_conversation_at_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.utils import chat_template_utils

    class Clock(datetime.datetime):
        today = datetime.datetime(2026, 12, 31, 23, 59)

        @classmethod
        def now(cls, tz: Any = None) -> datetime.datetime:
            return cls.today

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    agent = Agent(ChatCodec(tokenizer("llama-3.2")))
    first = agent.encode([ASK], TOOLS)
    assert "31 Dec 2026" in agent.template.decode(first.prompt_ids)
    reply = agent.say(first, agent.template.write_reply("", [call()]), "<|eot_id|>")
    Clock.today = datetime.datetime(2027, 1, 1, 0, 1)
    assert "01 Jan 2027" in agent.whole([ASK], TOOLS)
    following = agent.encode([ASK, reply, result(reply)], TOOLS)
    assert following.continues == 0
    assert "Jan 2027" not in agent.template.decode(following.prompt_ids)


# --- writing and reading --------------------------------------------------------------------------------------------


@table("name", FAMILIES)
def test_what_the_template_writes_is_read_back(name: str) -> None:
    template = codec(name).template
    prompt = template.encode(template.render([ASK]))
    for content, calls, thought in (
        ("four", [], ""),
        ("", [call('{"x": 1, "s": "five"}')], ""),
        ("four", [], "hm"),
        ("", [call("{}")], ""),
    ):
        if calls and not template.renders_tools:
            with pytest.raises(UnsupportedRequest, match="no tool calls"):
                template.write_reply(content, calls)
            continue
        text = template.write_reply(content, calls, thought)
        assert not any(text.endswith(stop) for stop in FAMILIES[name]["stops"])
        read = template.read(text, TOOLS, prompt_ids=prompt)
        assert (read.content, read.broken) == (content, [])
        assert [(c.name, json.loads(c.arguments)) for c in read.calls] == [
            (c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls
        ]
        thinks = template.reasons and not (thought and name in ("deepseek-v3.1",))  # it never writes a thought
        assert read.reasoning == (thought if thinks else "")


@table("name", ["qwen2.5", "qwen3", "qwen3.5", "glm-4.5", "mistral-nemo", "mistral-small-3.2"])
def test_parallel_calls_are_written_and_read(name: str) -> None:
    agent = Agent(codec(name))
    calls = [call('{"x": 1}', label="a"), call('{"x": 2}', label="b")]
    reply = agent.say(agent.encode([ASK], TOOLS), agent.template.write_reply("", calls), call_end(name))
    assert [c["function"]["arguments"] for c in reply["tool_calls"]] == ['{"x": 1}', '{"x": 2}']
    messages = [ASK, reply, result(reply, 0, "one"), result(reply, 1, "two")]
    following = agent.encode(messages, TOOLS)
    assert following.continues == 0
    text, whole = agent.template.decode(following.prompt_ids), agent.whole(messages, TOOLS)
    assert without_empty_thoughts(text) == without_empty_thoughts(whole)


@table("name", ["llama-3.1", "gpt-oss"])
def test_two_calls_are_refused_where_a_reply_holds_one(name: str) -> None:
    with pytest.raises(UnsupportedRequest, match="one call"):
        codec(name).template.write_reply("", [call(), call()])


FENCE = "```"
DEEPSEEK_TOOLS = """\
{{- bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'system' %}{{ m.content }}
{%- elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m.content }}
{{- '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}
{%- else %}{{ '<｜Assistant｜>' + m.content }}
{%- if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}{% for c in m.tool_calls %}CALL{% endfor %}
{{- '<｜tool▁calls▁end｜>' }}{% endif %}{{ '<｜end▁of▁sentence｜>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""
FENCED = """\
{{- ('\\n' if not loop.first else '') + '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name }}
{{- '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"""
BARE = """\
{{- '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + (c.function.arguments | tojson) }}
{{- '<｜tool▁call▁end｜>' }}"""


@table(("how", "style"), [(FENCED, "DeepSeek V3's"), (BARE, "DeepSeek V3.1's")])
def test_deepseek_with_a_template_that_shows_tools(how: str, style: str) -> None:
    """DeepSeek's own templates show no tools; people bring theirs. V3's calls take arguments as text."""
    known = FAMILIES["deepseek-v3"]
    agent = Agent(
        ChatCodec(
            make_tokenizer(
                DEEPSEEK_TOOLS.replace("CALL", how), known["special"], eos_token=known["eos"], bos_token=known["bos"]
            )
        )
    )
    assert agent.template.calls.name.startswith(style)
    assert agent.template.incremental, agent.template.breaks
    said = agent.template.write_reply("Let me see.", [call(), call('{"x": 2}')])
    reply = agent.say(agent.encode([ASK], TOOLS), said, "<｜end▁of▁sentence｜>")
    assert reply["content"] == "Let me see."
    assert [c["function"]["arguments"] for c in reply["tool_calls"]] == ['{"x": 1}', '{"x": 2}']
    messages = [ASK, reply, result(reply)]
    following = agent.encode(messages, TOOLS)
    assert agent.template.decode(following.prompt_ids) == agent.whole(messages, TOOLS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("any", 5),
        ("s", "5"),
        ("s", ""),
        ("s", "a\nb"),
        ("flag", True),
        ("maybe", None),
        ("maybe", 3),
        ("any", [1, "x"]),
    ],
)
@pytest.mark.parametrize("name", ["qwen3.5", "glm-4.5"])
def test_bare_arguments_are_what_the_tools_schema_says(name: str, field: str, value: Any) -> None:
    template = codec(name).template
    text = template.write_reply("", [call(json.dumps({field: value}))])
    (found,) = template.read(text, TOOLS, prompt_ids=[0]).calls
    assert json.loads(found.arguments) == {field: value}


@table(
    ("schema", "written", "value"),
    [
        ({"type": "integer"}, "5", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "number"}, "5", 5),
        ({"type": "string"}, "null", "null"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "null", None),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "1.5", "1.5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({}, '"quoted"', '"quoted"'),
        ({}, "NaN", "NaN"),
    ],
)
def test_every_kind_of_schema_decides(schema: Any, written: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"k": schema}}}}
    text = f"<tool_call>f\n<arg_key>k</arg_key>\n<arg_value>{written}</arg_value>\n</tool_call>"
    (found,) = codec("glm-4.5").template.read(text, [tool], prompt_ids=[0]).calls
    assert json.loads(found.arguments) == {"k": value}


ODD_SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(["string", "null", "integer"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "anyOf", "oneOf", "enum", "properties", "x", "parameters"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_TOOLS)
@given(schema=ODD_SCHEMAS, parameters=ODD_SCHEMAS)
@example(schema={"type": None}, parameters=None)
@example(schema={"type": 5}, parameters=None)
@example(schema={"anyOf": 5}, parameters=None)
@example(schema={"oneOf": {"x": 1}}, parameters=None)
@example(schema={"enum": [["x"], {}]}, parameters=None)
def test_reading_never_raises_whatever_a_tools_schema_is(name: str, schema: Any, parameters: Any) -> None:
    template = codec(name).template
    text = template.write_reply("", [call('{"x": 1, "s": "five"}')])
    for given_schema in ({"type": "object", "properties": {"x": schema, "s": schema}}, parameters):
        tool = {"type": "function", "function": {"name": "calc", "description": "d", "parameters": given_schema}}
        (found,) = template.read(text, [tool], prompt_ids=[0]).calls
        assert json.loads(found.arguments).keys() == {"x", "s"}


BROKEN = {
    "qwen3.5": [
        "<tool_call>\n<function=calc>\n<parameter=x>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=calc>\n<parameter=x>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=calc>\n<parameter=x>1</parameter><parameter=x>2</parameter></function></tool_call>",
        "<tool_call>\n<function=calc>\n</function>",
        '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>',
    ],
    "glm-4.5": [
        "<tool_call>calc\n<arg_key>x</arg_key>\n</tool_call>",
        "<tool_call>calc\n<arg_value>1</arg_value>\n</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>calc\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>",
    ],
    "llama-3.1": [
        '{"name": "calc", "parameters": {"x": 1}',
        '{"name": "calc", "parameters": "{}"}',
        '{"name": "calc", "arguments": {}}',
        '{"name": "calc", "parameters": {}} and {"name": "calc", "parameters": {}}',
        "<|python_tag|>print(2 + 2)",
        '{"type": "tool", "name": "calc", "parameters": {}}'.replace("tool", "function") + ";",
    ],
    "mistral-nemo": [
        '[TOOL_CALLS][{"name": "calc", "arguments": {"x": 1}}',
        '[TOOL_CALLS][{"name": "calc", "arguments": "{}"}]',
        '[TOOL_CALLS]{"name": "calc", "arguments": {}}',
        '[TOOL_CALLS][{"name": "calc", "arguments": {}, "more": 1}]',
        '[TOOL_CALLS][{"name": "calc", "arguments": {}}] and text',
        "[TOOL_CALLS][]",
        '[TOOL_CALLS]calc[ARGS]{"x": 1}',
    ],
    "mistral-small-3.2": [
        '[TOOL_CALLS]calc[ARGS]{"x": 1',
        "[TOOL_CALLS]calc[ARGS][1]",
        "[TOOL_CALLS]calc{}",
        '[TOOL_CALLS]calc[CALL_ID]short[ARGS]{"x": 1}',
        '[TOOL_CALLS]calc[ARGS]{"x": 1} and text',
    ],
    "gpt-oss": [
        '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"x": 1',
        ' to=calc<|channel|>commentary json<|message|>{"x": 1}',
        ' to=functions.<|channel|>commentary json<|message|>{"x": 1}',
        ' to=functions.calc<|channel|>somewhere json<|message|>{"x": 1}',
    ],
}


@table(("name", "text"), [(name, text) for name, texts in BROKEN.items() for text in texts])
def test_what_is_not_exactly_a_call_stays_in_the_text_and_is_listed(name: str, text: str) -> None:
    agent = Agent(codec(name))
    said = "</think>\n\n" + text if agent.template.thinking else text
    reply = agent.say(agent.encode([ASK], TOOLS), said, FAMILIES[name]["stops"][0])
    assert "tool_calls" not in reply
    assert reply["content"] == text
    assert "".join(reply["unparsed_tool_calls"]).strip() in text
    complaint = [ASK, reply, {"role": "tool", "content": "no"}]
    if name == "gpt-oss":  # its template takes results of calls only
        with pytest.raises(UnsupportedRequest, match="no previous assistant message with a tool call"):
            agent.encode(complaint, TOOLS)
    else:
        assert agent.encode(complaint, TOOLS).continues == 0


HERMES_CALL = '<tool_call>\n{"name": "calc", "arguments": {"x": 1}}\n</tool_call>'
QWEN_CALL = "<tool_call>\n<function=calc>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>calc\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
FENCED_CALL = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>calc\n```json\n{}\n```<｜tool▁call▁end｜>"
BARE_CALL = "<｜tool▁call▁begin｜>calc<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
HARMONY_CALL = '<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"x": 1}'


@cache
def thinking_template(name: str) -> ChatTemplate:
    """A template whose model thinks, with tools."""
    if name in ("deepseek-fenced", "deepseek-bare"):
        known, how = FAMILIES["r1-distill"], {"fenced": FENCED, "bare": BARE}[name.removeprefix("deepseek-")]
        text = DEEPSEEK_TOOLS.replace("CALL", how).replace("'<｜Assistant｜>' }}", "'<｜Assistant｜><think>\\n' }}")
        return ChatTemplate(make_tokenizer(text, known["special"], eos_token=known["eos"], bos_token=known["bos"]))
    if name == "nemotron":
        return ChatTemplate(make_tokenizer(from_trl("nemotron_3_nano"), ["<|im_start|>", "<|im_end|>"]))
    return codec(name).template


@table(
    ("name", "thought", "calls"),
    [
        ("qwen3", f"<think>\nhm\n{HERMES_CALL}", HERMES_CALL),
        ("qwen3", f"<think>{HERMES_CALL}", HERMES_CALL),
        ("qwen3", f"<think>\nhm\n{HERMES_CALL}\n{HERMES_CALL}\n", f"{HERMES_CALL}\n{HERMES_CALL}"),
        ("qwen3", f"<think>\nhm\n{HERMES_CALL}\nWaiting for the result.", f"{HERMES_CALL}\nWaiting for the result."),
        ("qwen3", f"<think>\nhm\n{HERMES_CALL}\n</think>", HERMES_CALL),
        ("qwen3", f"<think>\nhm\n{HERMES_CALL}\n</think>\n\n", HERMES_CALL),
        ("qwen3", "<think>\nhm\n<tool_call>\n{oops", "<tool_call>\n{oops"),
        ("qwen3", f"<think>\nhm\n<tool_call>x</tool_call>{HERMES_CALL}", HERMES_CALL),
        ("qwen3.5", f"hm\n{QWEN_CALL}", QWEN_CALL),
        ("qwen3.5", f"hm\n{QWEN_CALL}\n</think>\n", QWEN_CALL),
        ("qwen3.5", f"{QWEN_CALL}{QWEN_CALL}", f"{QWEN_CALL}{QWEN_CALL}"),
        ("qwen3.5", "hm\n<tool_call>\n<function=calc>\n", "<tool_call>\n<function=calc>"),
        ("nemotron", f"hm\n{QWEN_CALL}", QWEN_CALL),
        ("glm-4.5", f"\n<think>hm\n{GLM_CALL}", GLM_CALL),
        ("glm-4.5", f"\n<think>{GLM_CALL}</think>", GLM_CALL),
        ("deepseek-fenced", f"hm <｜tool▁calls▁begin｜>{FENCED_CALL}<｜tool▁calls▁end｜>", FENCED_CALL),
        ("deepseek-bare", f"hm <｜tool▁calls▁begin｜>{BARE_CALL}<｜tool▁calls▁end｜>", BARE_CALL),
        ("gpt-oss", f"<|channel|>analysis<|message|>hm{HARMONY_CALL}", HARMONY_CALL),
        ("gpt-oss", f"<|channel|>analysis<|message|>hm assistant{HARMONY_CALL}<|end|>", HARMONY_CALL),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm to=functions.calc<|channel|>commentary json<|message|>{}",
            "to=functions.calc<|channel|>commentary json<|message|>{}",
        ),
    ],
)
def test_calls_inside_a_thought_that_nothing_follows_are_listed(name: str, thought: str, calls: str) -> None:
    template = thinking_template(name)
    prompt_ids = template.encode(template.render([ASK], TOOLS))
    read = template.read(thought, TOOLS, prompt_ids=prompt_ids)
    assert (read.content.strip(), read.calls) == ("", [])
    assert calls in read.reasoning or calls == read.reasoning.strip()
    (listed,) = read.broken
    assert calls in listed
    assert listed in read.reasoning
    message = assistant_message(read, id_prefix="call_")
    assert message["unparsed_tool_calls"] == [listed]
    assert template.read(thought, [], prompt_ids=prompt_ids).broken == []


@table(
    ("name", "text", "calls"),
    [
        ("qwen3", f"<think>\n{HERMES_CALL}? No.\n</think>\n\nfour", 0),
        ("qwen3", f"<think>\n{HERMES_CALL}? Yes.\n</think>\n\n{HERMES_CALL}", 1),
        ("qwen3", "<think>\nI could use the tool.", 0),
        ("qwen3.5", f"{QWEN_CALL}? No.\n</think>\n\nfour", 0),
        ("qwen3.5", f"{QWEN_CALL}? Yes.\n</think>\n\n{QWEN_CALL}", 1),
        ("glm-4.5", f"\n<think>{GLM_CALL}</think>\nfour", 0),
        ("gpt-oss", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{HARMONY_CALL}", 1),
        ("gpt-oss", "<|channel|>analysis<|message|>Shall I write to=functions.calc?", 0),
        ("gpt-oss", f"<|channel|>analysis<|message|>{HARMONY_CALL}<|end|><|channel|>final<|message|>four", 0),
    ],
)
def test_a_thought_that_an_answer_follows_may_speak_of_calls(name: str, text: str, calls: int) -> None:
    template = thinking_template(name)
    read = template.read(text, TOOLS, prompt_ids=template.encode(template.render([ASK], TOOLS)))
    assert (len(read.calls), read.broken) == (calls, [])


def test_calls_inside_a_thought_are_listed_where_the_tokenizer_describes_its_replies() -> None:
    described = make_tokenizer(
        """
{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|turn>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<|call>' + c.function.name + '|' + (c.function.arguments | tojson) + '<call|>' }}
{%- endfor %}{{ '<turn|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>assistant\n' }}{% endif %}""",
        ["<|turn>", "<turn|>"],
        eos_token="<turn|>",
    )
    pytest.importorskip("transformers.utils.chat_parsing")
    call_field = {"open_pattern": r"<\|call>(?P<name>\w+)\|", "close": "<call|>", "repeats": True, "content": "json"}
    function = {"name": "{name}", "arguments": "{content}"}
    described.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|turn>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": r"</think>|$", "content": "text"},
            "tool_calls": {**call_field, "transform": {"type": "function", "function": function}},
            "content": {"close_pattern": r"<turn\|>|$", "content": "text"},
        },
    }
    template = ChatTemplate(described)
    prompt_ids = template.encode(template.render([ASK], TOOLS))
    read = template.read('<think>hm <|call>calc|{"x": 1}<call|>', TOOLS, prompt_ids=prompt_ids)
    assert (read.content, read.calls) == ("", [])
    assert read.broken == [read.reasoning]
    assert "<|call>calc|" in read.reasoning
    read = template.read('<think>hm</think><|call>calc|{"x": 1}<call|>', TOOLS, prompt_ids=prompt_ids)
    assert ([call.name for call in read.calls], read.broken) == (["calc"], [])
    assert template.read("<think>hm", TOOLS, prompt_ids=prompt_ids).broken == []


@table("text", ['{"answer": 4}', '{"name": "Bob", "age": 3}', "[1]", "{", "four {}"])
def test_an_answer_in_json_is_an_answer(text: str) -> None:
    assert Agent(codec("llama-3.1")).say(Agent(codec("llama-3.1")).encode([ASK], TOOLS), text, "<|eot_id|>") == {
        "role": "assistant",
        "content": text,
    }


def test_harmony_channels_are_taken_apart() -> None:
    template = codec("gpt-oss").template
    text = (
        "<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Looking.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.calc <|constrain|>json<|message|>{"x":1}'
    )
    read = template.read(text, TOOLS, prompt_ids=[0])
    assert (read.reasoning, read.content, read.broken) == ("hm", "Looking.", [])
    assert [(c.name, c.arguments) for c in read.calls] == [("calc", '{"x":1}')]
    without = template.read(text, [], prompt_ids=[0])
    assert (without.calls, without.broken) == ([], [])
    assert '{"x":1}' in without.content
    assert template.read("just text", TOOLS, prompt_ids=[0]).content == "just text"


def test_a_library_template_reads_families_that_only_the_tokenizer_describes() -> None:
    pytest.importorskip("transformers.utils.chat_parsing")
    jinja_text = r"""
{%- if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|turn>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '<|call>' + c.function.name + '|' + (c.function.arguments | tojson) + '<call|>' }}
{%- endfor %}{{ '<turn|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|turn>assistant\n' }}{% endif %}"""
    described = make_tokenizer(jinja_text, ["<|turn>", "<turn|>"], eos_token="<turn|>")
    with pytest.raises(ConfigError, match="no installed chat family"):
        ChatCodec(described)
    described.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|turn>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": r"<\|call>(?P<name>\w+)\|",
                "close": "<call|>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close_pattern": r"<turn\|>|$", "content": "text"},
        },
    }
    agent = Agent(ChatCodec(described))
    assert agent.template.renders_tools
    reply = agent.say(agent.encode([ASK], TOOLS), agent.template.write_reply("Well.", [call()]), "<turn|>")
    assert reply["content"] == "Well."
    assert reply["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"x": 1}'}
    assert agent.encode([ASK, reply, result(reply)], TOOLS).continues == 0
    broken = agent.say(agent.encode([MORE], TOOLS), "<|call>calc|{oops<call|>", "<turn|>")
    assert broken["content"] == "<|call>calc|{oops<call|>"
    assert broken["unparsed_tool_calls"] == [broken["content"]]
    assert "unparsed_tool_calls" not in agent.say(agent.encode([ASK]), "<|call>calc|{oops<call|>", "<turn|>")


def test_what_a_template_refuses_is_refused_in_its_own_words() -> None:
    """Mistral's allows no user message behind tool results, neither behind a reply nor in a whole conversation."""
    agent = Agent(codec("mistral-nemo"))
    reply = agent.say(agent.encode([ASK], TOOLS), agent.template.write_reply("", [call()]), "</s>")
    with pytest.raises(UnsupportedRequest, match="must alternate"):
        agent.encode([ASK, reply, result(reply), MORE], TOOLS)


def test_tokens_made_of_text_are_counted_and_remembered_ones_are_not() -> None:
    template = ChatTemplate(tokenizer("qwen2.5"))
    before = template.tokens_encoded
    assert before > 0  # the probes
    ids = template.whole([ASK], TOOLS).ids
    assert template.whole([ASK], TOOLS).ids == ids
    assert template.tokens_encoded == before + len(ids)
    added = [template.continuation_ids([MORE], last=last) for last in (None, template.end_of_turn_id, ids[0])]
    assert added[0] == added[2] == [template.end_of_turn_id, *added[1]]
    assert template.tokens_encoded == before + len(ids) + len(added[0])


# --- variables ------------------------------------------------------------------------------------------------------


def test_variables_reach_every_rendering() -> None:
    quiet = ChatCodec(tokenizer("qwen3"), chat_template_kwargs={"enable_thinking": False})
    agent = Agent(quiet)
    assert quiet.template.generation_prompt == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    reply = agent.say(agent.encode([ASK]), quiet.template.write_reply("four"), "<|im_end|>")
    assert quiet.template.write_reply("four") == "four"
    following = agent.encode([ASK, reply, MORE])
    assert following.continues == 0
    assert agent.template.decode(following.prompt_ids).endswith("<think>\n\n</think>\n\n")


@table("name", ["enable_thinkng", "messages", "tools", "tokenize", "add_generation_prompt"])
def test_a_variable_that_the_template_does_not_have_or_that_is_ours_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"chat_template_kwargs.*{name}"):
        ChatTemplate(tokenizer("qwen3"), chat_template_kwargs={name: False})


def test_ids_are_given_by_turn_and_number() -> None:
    template = codec("qwen2.5").template
    text = template.write_reply("", [call(), call()])
    message = assistant_message(template.read(text, TOOLS, prompt_ids=[0]), id_prefix="call_7_")
    assert [c["id"] for c in message["tool_calls"]] == ["call_7_0", "call_7_1"]


def test_families_that_are_turned_off_are_not_known():
    with pytest.raises(ConfigError, match="come with: pip install astuner-families"):
        ChatCodec(tokenizer("llama-3.1"), plugins=load_plugins(["families"]))
