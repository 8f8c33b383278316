"""A tool is called by its name, whatever characters it has, or it is refused by its name when it is offered."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers.normalizers import NFC

from astuner.chat.codec import ChatCodec, Conversation
from astuner.contracts.errors import UnsupportedRequest
from astuner.contracts.types import FinishReason, Generation
from astuner.testing import make_tokenizer
from astuner_models.serving import TEMPLATES
from tests.table import table

DATA = Path(__file__).parent / "templates"
FAMILIES = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
WITH_TOOLS = [name for name, known in FAMILIES.items() if known["calls"]]
TAGS = ["qwen3.5", "glm-4.5", "gpt-oss", "mistral-small-3.2"]
"""Families that do not write names in JSON."""
ASK = {"role": "user", "content": "go"}
NAMES = [
    "Files.Read File",
    "read file now",
    "a<b",
    "a>b",
    "a=b",
    'say "hi"',
    "it's",
    "a\nb",
    "a\tb",
    "a[b]",
    "a{b}",
    "[ARGS]",
    "x[ARGS]{}",
    "back\\slash",
    "functions.read",
    "x json",
    "to=x",
    "</function>",
    "<function=x>",
    "a<arg_key>b",
    "文件 读取",
    "Zoë",
    "🙂",
    "a/b:c,d",
    "a" * 300,
]


@cache
def tokenizer(family: str) -> Any:
    known = FAMILIES[family]
    if "file" in known:
        path = DATA / known["file"]
    elif "shipped" in known:
        path = TEMPLATES[known["shipped"]]
    else:
        found = importlib.util.find_spec("trl")
        if found is None or found.origin is None:
            pytest.skip("trl, from which templates under licences of their own are read, is not installed")
        path = Path(found.origin).parent / "chat_templates" / f"{known['trl']}.jinja"
    text = path.read_text(encoding="utf-8")
    return make_tokenizer(text, known["special"], eos_token=known["eos"], bos_token=known["bos"])


@cache
def codec(family: str) -> ChatCodec:
    return ChatCodec(tokenizer(family))


def tool(name: Any, **arguments: Any) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in arguments or {"k": ""}}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "given", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def say(codec: ChatCodec, conversation: Conversation, text: str, tools: Any) -> dict[str, Any]:
    """The message of a model that answers ``text``."""
    encoded = conversation.encode([ASK], tools)
    ids = [*codec.template.encode(text), codec.stop_token_ids[0]]
    generation = Generation(
        prompt_ids=tuple(encoded.prompt_ids),
        response_ids=tuple(ids),
        logprobs=(0.0,) * len(ids),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    return conversation.accept(encoded, generation, 0)


def names(message: dict[str, Any]) -> list[str]:
    return [made["function"]["name"] for made in message.get("tool_calls", ())]


@pytest.mark.parametrize("family", [*TAGS, "qwen2.5", "mistral-nemo", "llama-3.1"])
@table("name", NAMES)
def test_an_unusual_name_is_called_and_its_turn_continues(family: str, name: str) -> None:
    known, tools = codec(family), [tool("plain"), tool(name)]
    conversation, text = known.conversation(), known.template.write_reply("", [call("NAME", k="v")])
    in_json = family in ("qwen2.5", "mistral-nemo", "llama-3.1")
    escaped = json.dumps(name, ensure_ascii=False)[1:-1] if in_json else name
    message = say(known, conversation, text.replace("NAME", escaped), tools)
    assert names(message) == [name]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"k": "v"}
    assert "unparsed_tool_calls" not in message
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "ok"}
    assert conversation.encode([ASK, message, result], tools).continues == 0


@table(
    ("family", "name"),
    [
        *[(family, name) for family in WITH_TOOLS for name in ("", "\ud800", "x\udfff")],
        ("qwen2.5", "x<|im_end|>"),
        ("hermes", "<|im_end|>x"),
        ("qwen3", "<|im_end|>"),
        ("qwen3.5", "a<|im_end|>b"),
        ("qwen3.5", "x<|im_end|"),  # the template's own bracket completes the token
        ("gpt-oss", "x<|end|>y"),
        ("gpt-oss", "<|call|>"),
        ("glm-4.5", "<|user|>"),
        ("glm-4.5", " find"),
        ("mistral-small-3.2", "</s>"),
        ("mistral-nemo", "x</s>"),
        ("llama-3.1", "<|eot_id|>"),
    ],
)
def test_a_name_that_a_format_cannot_express_is_refused_when_it_is_offered(family: str, name: str) -> None:
    conversation = codec(family).conversation()
    for offered in ([tool(name)], [tool("plain"), tool(name), tool("other")]):
        with pytest.raises(UnsupportedRequest) as refusal:
            conversation.encode([ASK], offered)
        assert repr(name) in str(refusal.value)
        assert codec(family).template.calls.name in str(refusal.value)
    assert conversation.encode([ASK], [tool("plain")]).prompt_ids
    assert conversation.encode([ASK], [tool(name)], callable_tools=[]).prompt_ids  # tool_choice: none


def test_a_name_that_the_tokenizer_changes_is_refused() -> None:
    """Qwen's tokenizers compose letters (NFC), so that the model's call would name another tool."""
    known = FAMILIES["qwen2.5"]
    composing = make_tokenizer(
        (DATA / known["file"]).read_text(encoding="utf-8"), known["special"], eos_token=known["eos"]
    )
    composing.backend_tokenizer.normalizer = NFC()
    conversation = ChatCodec(composing).conversation()
    with pytest.raises(UnsupportedRequest, match="could not be called"):
        conversation.encode([ASK], [tool("caf\u0065\u0301")])
    assert conversation.encode([ASK], [tool("caf\u00e9")]).prompt_ids


@pytest.mark.parametrize("family", TAGS)
def test_the_longest_name_that_is_offered_is_the_one_that_is_called(family: str) -> None:
    known, offered = codec(family), ["find", "find it", "find it now", "find>", "find="]
    for name in offered:
        text = known.template.write_reply("", [call(name, k="v")])
        assert names(say(known, known.conversation(), text, [tool(other) for other in offered])) == [name]


@pytest.mark.parametrize("family", TAGS)
def test_names_that_are_not_offered_are_read_as_before(family: str) -> None:
    """A plain name that no tool has is a call, which the agent answers; a text with spaces is not."""
    known = codec(family)
    plain = say(known, known.conversation(), known.template.write_reply("", [call("missing", k="v")]), [tool("plain")])
    assert names(plain) == ["missing"]
    text = known.template.write_reply("", [call("not a tool", k="v")])
    spaced = say(known, known.conversation(), text, [tool("plain")])
    assert (names(spaced), len(spaced["unparsed_tool_calls"])) == ([], 1)


@pytest.mark.parametrize("family", ["qwen3.5", "glm-4.5"])
@table("key", ["user name", "a<b", "a>b", "$filter", "a=b", "line\nbreak", "名", "</x>"])
def test_arguments_with_unusual_names_are_read(family: str, key: str) -> None:
    known = codec(family)
    text = known.template.write_reply("", [call("f", **{key: "v", "other": "1"})])
    message = say(known, known.conversation(), text, [tool("f", **{key: "", "other": ""})])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {key: "v", "other": "1"}


def test_names_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ChatCodec(tokenizer("qwen3.5"))
    tools = [tool(f"read file {n}") for n in range(20)]
    known.conversation().encode([ASK], tools)
    monkeypatch.setattr(known.template, "write_reply", pytest.fail)
    monkeypatch.setattr(known.template, "read", pytest.fail)
    for asked in ([ASK], [ASK, {"role": "assistant", "content": "a"}, ASK]):
        assert known.conversation().encode(asked, tools).prompt_ids
