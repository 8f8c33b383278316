"""A chat template that is called directly writes and refuses what transformers' `apply_chat_template` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner.chat.rendering import _outcome, fastest_writer, through_transformers
from tests.table import table

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.name is defined %}({{ m.name }}){% endif %}"
    "{% if m.thinking %}[{{ m.thinking }}{{ m.reasoning_content }}]{% endif %}"
    "{% if m.role == 'system' and not m.content %}{{ raise_exception('an empty order') }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ documents }}{{ extra }}"
)
SAYS = {"role": "user", "content": "a"}


class Label(str):
    """Text with a method of its own, which no template may call."""

    def own(self) -> str:
        return "own"


def tokenizer(template: Any = TEMPLATE) -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    build: Any = PreTrainedTokenizerFast
    return build(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", chat_template=template)


def is_direct(write: Any) -> bool:
    return "_direct" in write.__qualname__


@table(
    ("messages", "tools"),
    [
        ([SAYS], []),
        ([SAYS, {"role": "assistant", "content": "b", "reasoning_content": "t"}, SAYS], []),
        ([SAYS, {"role": "assistant", "content": "b", "thinking": "t"}, SAYS], []),
        ([SAYS, {"role": "assistant", "content": "b", "reasoning_content": None}], []),
        ([{"role": "tool", "content": "r", "tool_call_id": None, "name": None}], []),
        ([{"role": "assistant", "content": None, "tool_calls": [{"n": [1, 2.5, True, None, "é"]}]}], []),
        ([SAYS], [{"type": "function", "function": {"name": "f", "strict": False}}]),
        ([{"role": "user", "content": Label("a")}], []),
        ([{"role": Label("user"), "content": ("a", "b")}], []),
        ([{"role": "user", "content": b"a"}], []),
        ([{"role": "user", "content": {1: 2, None: 3}}], []),
        ([{"role": "system", "content": ""}], []),
        ([SAYS], ["no tool"]),
        ([SAYS], [Label]),
        ([], []),
        (["no message"], []),
    ],
)
def test_a_direct_call_writes_what_transformers_does(messages: Any, tools: Any) -> None:
    made = tokenizer()
    for variables in ({}, {"extra": [1, "x"]}, {"documents": [{"title": "t", "text": "x"}]}):
        slow = through_transformers(made, None, variables)
        fast = fastest_writer(made, None, variables, [([SAYS], [])])
        assert is_direct(fast)
        for asks in (True, False):
            assert _outcome(fast, messages, tools, asks) == _outcome(slow, messages, tools, asks)


@table(
    ("changed", "template", "variables"),
    [
        ("apply_chat_template", TEMPLATE, {}),
        ("get_chat_template", TEMPLATE, {}),
        ("", {"default": TEMPLATE, "tool_use": "{{ 1 }}"}, {}),
        ("", TEMPLATE, {"extra": Label("x")}),
    ],
)
def test_transformers_is_asked_where_a_direct_call_might_write_something_else(
    changed: str, template: Any, variables: Mapping[str, Any]
) -> None:
    made = tokenizer(template)
    if changed:
        own = getattr(made, changed)
        setattr(made, changed, lambda *args, **kwargs: own(*args, **kwargs) + "!")
    assert not is_direct(fastest_writer(made, None, variables, [([SAYS], [])]))
