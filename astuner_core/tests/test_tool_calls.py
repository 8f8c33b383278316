"""Reading Hermes tool calls: exact, in the model's own spelling, never guessing, never raising."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.chat_family import ToolCall, read_hermes
from tests.table import table

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(st.text(), JSON_VALUES, max_size=3)
NAMES = st.text(min_size=1)


def block(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def test_a_call_keeps_the_models_own_spelling_of_its_arguments() -> None:
    spelled = '{"b" :1.50,\t"a": "\\u4f60\\/"}'
    assert read_hermes(block("f", spelled)) == ("", [ToolCall("f", spelled)], [])


def test_text_around_calls_is_kept_and_the_calls_keep_their_order() -> None:
    text = f"First.\n{block('f', '{}')}\n{block('g', '{}')}\n Last. "
    content, calls, broken = read_hermes(text)
    assert (content, [c.name for c in calls], broken) == ("First.\nLast.", ["f", "g"], [])


def test_text_without_a_call_is_returned_as_it_is() -> None:
    assert read_hermes("  two\n") == ("  two\n", [], [])


def test_tags_inside_a_json_string_are_text() -> None:
    arguments = json.dumps({"code": "print('</tool_call><tool_call>')"})
    assert read_hermes(block("f", arguments)) == ("", [ToolCall("f", arguments)], [])


@table(
    "inside",
    [
        "",
        "not json",
        '{"name": "f"}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": {}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}',
        '{"name": "", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "f", "arguments": {"x": "raw\nnewline"}}',
        '{"name": "f", "arguments": {}} trailing',
        '{"name": "f" "arguments": {}}',
        '{"name": "f", "arguments": {},}',
        '[{"name": "f", "arguments": {}}]',
        "{'name': 'f', 'arguments': {}}",
        '{"name": "f", "arguments": ' + '{"x":' * 100_000,
    ],
)
def test_a_block_that_is_not_exactly_a_call_stays_in_the_text_and_is_listed(inside: str) -> None:
    text = f"Now: <tool_call>\n{inside}\n</tool_call> then"
    assert read_hermes(text) == (text, [], [f"<tool_call>\n{inside}\n</tool_call>"])


def test_an_unclosed_call_is_broken_even_when_its_json_is_whole() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {}}\n'
    assert read_hermes(text) == (text, [], [text])


def test_a_good_call_beside_a_broken_one_is_read_and_the_broken_one_stays_in_the_text() -> None:
    bad = "<tool_call>oops</tool_call>"
    content, calls, broken = read_hermes(bad + block("f", "{}"))
    assert (content, calls, broken) == (bad, [ToolCall("f", "{}")], [bad])


@pytest.mark.slow
@given(calls=st.lists(st.tuples(NAMES, ARGUMENTS, st.booleans()), min_size=1, max_size=4))
def test_whatever_json_can_write_is_read_back(calls: list[tuple[str, dict[str, object], bool]]) -> None:
    spelled = [(name, json.dumps(arguments, ensure_ascii=escaped)) for name, arguments, escaped in calls]
    content, read, broken = read_hermes("\n".join(block(*call) for call in spelled))
    assert [(c.name, c.arguments) for c in read] == spelled
    assert content == ""
    assert broken == []


@pytest.mark.slow
@given(
    st.lists(
        st.sampled_from(
            ["<tool_call>", "</tool_call>", "{", "}", '"name"', ":", ",", '"arguments"', '"f"', " ", "\n", "x", "\\"]
        )
        | st.text(max_size=3)
    ).map("".join)
)
def test_no_text_makes_it_raise_and_nothing_is_lost(text: str) -> None:
    content, calls, broken = read_hermes(text)
    if not calls:
        assert content == text
    assert all(piece in content for b in broken if (piece := b.strip()))
