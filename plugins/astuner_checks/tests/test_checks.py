"""Checks on the model's output fire on what no sane model writes, and never on ordinary text."""

from __future__ import annotations

import inspect
import json
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from astuner import Provider, hookimpl
from astuner.contracts.errors import ConfigError, JudgeFailed, PluginError
from astuner.contracts.output_check import OutputView
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins
from astuner.rollout.parts import OutputChecks
from astuner.testing import check_output_check, fake_config
from astuner_checks import characters
from astuner_checks import named as checks
from astuner_checks import repetition as loops
from tests.table import table

CASES = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "model_outputs" / "cases.jsonl")
    .read_text("utf-8")
    .rstrip("\n")
    .split("\n")
]
"""Replies with the check that must fire on them, or ``ordinary``; ``note`` says what each is."""
TEXT_CHECKS = ("control_tokens", "garbled", "repetition")
ORDINARY = [case["text"] for case in CASES if case["label"] == "ordinary"]
DEFAULT = OutputChecks(["nonsense", "wrong_toolcall"])


def view(text: str) -> OutputView:
    return OutputView({"role": "assistant", "content": text})


def calling(name: str, arguments: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# ------------------------------------------------------------------------------------------- the labelled set


def test_the_set_is_large_and_nothing_is_in_it_twice() -> None:
    labels = Counter(case["label"] for case in CASES)
    assert set(labels) == {"ordinary", *TEXT_CHECKS}
    assert labels["ordinary"] >= 200
    assert labels.total() - labels["ordinary"] >= 100
    assert len({case["text"] for case in CASES}) == len({(c["label"], c["note"]) for c in CASES}) == len(CASES)


@table("name", ["nonsense", *TEXT_CHECKS])
def test_precision_and_recall_over_the_set(name: str) -> None:
    check = getattr(checks, name)
    labels = TEXT_CHECKS if name == "nonsense" else (name,)
    others = () if name == "nonsense" else set(TEXT_CHECKS) - {name}  # one reply may be wrong in two ways
    hits, misses, false_alarms = 0, [], []
    for case in CASES:
        complaint = check(view(case["text"]))
        assert complaint is None or complaint.startswith(f"{name}: ")
        if case["label"] in labels:
            hits += complaint is not None
            misses += [] if complaint else [case["note"]]
        elif complaint and case["label"] not in others:
            false_alarms.append(f"{case['note']}: {complaint}")
    precision, recall = hits / (hits + len(false_alarms)), hits / (hits + len(misses))
    print(f"{name}: precision {precision:.1%}, recall {recall:.1%} over {len(CASES)} replies")
    assert (precision, recall) == (1, 1), f"silent on {misses}; fires on {false_alarms}"


@given(st.sampled_from(ORDINARY), st.sampled_from(ORDINARY), st.sampled_from(["\n\n", "\n"]))
def test_ordinary_texts_are_ordinary_together(one: str, other: str, between: str) -> None:
    assert one == other or checks.nonsense(view(one + between + other)) is None


@given(
    st.sampled_from([c["text"] for c in CASES if c["label"] == "repetition" and "recovery" not in c["note"]]),
    st.sampled_from(ORDINARY),
    st.booleans(),
)
def test_a_loop_is_seen_after_ordinary_text_and_before_less_of_it(loop: str, ordinary: str, first: bool) -> None:
    less = ordinary[: len("".join(loop.split())) // 4]
    assert checks.repetition(view(f"{loop}\n\n{less}" if first else f"{ordinary}\n\n{loop}"))


def test_a_loop_that_much_else_follows_is_a_part_of_an_answer() -> None:
    rest = " ".join(f"Line {i} says {i * i}." for i in range(60))
    assert checks.repetition(view(rest + " nop" * 100 + " no"))
    assert checks.repetition(view("nop " * 100 + rest)) is None


@table("module", ["argparse", "asyncio.base_events", "decimal", "difflib", "json.decoder", "typing"])
def test_code_that_people_wrote_is_ordinary(module: str) -> None:
    source = inspect.getsource(__import__(module, fromlist=["x"]))
    assert checks.nonsense(view(source)) is None


@table("field", ["content", "reasoning_content"])
def test_thoughts_are_looked_at_too_and_arguments_of_calls_are_not(field: str) -> None:
    assert str(DEFAULT.check({"content": "", field: "wait " * 60})).startswith("nonsense: 'wait' repeated 60 times")
    assert DEFAULT.check(calling("write", json.dumps({"text": "wait " * 60}))) is None


def test_both_texts_are_joined_by_nothing() -> None:
    assert DEFAULT.check({"reasoning_content": "wait " * 30, "content": "wait " * 30}) is None


# ----------------------------------------------------------------------------------------- nothing breaks it

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
)
FIELDS = ["content", "reasoning_content", "tool_calls", "unparsed_tool_calls"]
EVERY_NAME = sorted(name for _, name, _ in load_plugins().offers("output check"))
ANY_TEXT = st.text(st.characters()) | st.text('a ab<|\n`"[]!0é的�\x00', max_size=60)


@given(ANY_TEXT, ANY_TEXT, st.integers(1, 300), ANY_TEXT)
def test_no_text_makes_a_check_raise(before: str, unit: str, times: int, after: str) -> None:
    text = before + unit * times + after
    for name in EVERY_NAME:
        complaint = getattr(checks, name)(view(text))
        assert complaint is None or (complaint.startswith(f"{name}: ") and "\n" not in complaint)


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(FIELDS), ANYTHING), ANYTHING, ANYTHING)
def test_no_message_makes_a_check_raise(message: dict[str, Any], schema: Any, arguments: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    called = calling("f", json.dumps(arguments))
    for name in EVERY_NAME:
        for shown in (OutputView(message), OutputView(message, tools, cut_off=True), OutputView(called, tools)):
            assert getattr(checks, name)(shown) is None or isinstance(getattr(checks, name)(shown), str)


SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "string", "integer", "number", "array", "null", "other"]),
        "required": st.lists(st.sampled_from("ab") | ANYTHING, max_size=2),
        "properties": st.dictionaries(st.sampled_from("abc"), ANYTHING | st.just({"type": ["integer", "null"]})),
        "anyOf": ANYTHING,
        "additionalProperties": ANYTHING,
    },
)


@pytest.mark.slow
@given(SCHEMAS, st.dictionaries(st.sampled_from("abc"), ANYTHING))
def test_no_schema_makes_a_check_raise(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    complaint = checks.wrong_arguments(OutputView(calling("f", json.dumps(arguments)), tools))
    assert complaint is None or complaint.startswith("wrong_arguments: ")


# ------------------------------------------------------------------------------------------------ linear time

SHAPES: dict[str, Callable[[int], str]] = {
    "one letter": lambda n: "a" * n,
    "words": lambda n: "word " * (n // 5),
    "all different": lambda n: " ".join(f"{i:x}" for i in range(n // 6)),
    "almost a loop": lambda n: ("yes " * 11 + "no ") * (n // 47),
    "loops of all lengths": lambda n: " ".join("ab"[bin(i).count("1") % 2] for i in range(n // 2)),
    "short letter runs": lambda n: ("a" * 39 + " ") * (n // 40),
    "blanks": lambda n: (" " * 1999 + "x") * (n // 2000),
    "line breaks": lambda n: "\n" * n,
    "signs": lambda n: "!-" * (n // 2),
    "opening brackets": lambda n: "<|" * (n // 2),
    "quoted control tokens": lambda n: "`<|im_end|>`" * (n // 12),
    "one long line of quotes": lambda n: '"<|im_end|>" ' * (n // 13),
    "end of sequence": lambda n: "</s> " * (n // 5),
    "code fences": lambda n: "```<|im_end|>```" * (n // 16),
    "foreign": lambda n: "Ã© é" * (n // 4),
    "marks": lambda n: ("e" + "\u0301" * 19) * (n // 20),
    "many scripts": lambda n: "аbв的 " * (n // 5),
    "Chinese": lambda n: "我们再想一想" * (n // 6),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_work_grows_with_the_text_and_not_faster(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: items compared, units looked at, matches of a pattern."""

    def work(text: str) -> int:
        done = 0

        def counted(function: Callable[..., Any], cost: Callable[..., int]) -> Callable[..., Any]:
            def wrapper(*args: Any) -> Any:
                nonlocal done
                done += cost(*args)
                return function(*args)

            return wrapper

        with monkeypatch.context() as patch:
            patch.setattr(loops, "_agreement", counted(loops._agreement, lambda whole, size, shift: size))
            patch.setattr(loops, "_repeats", counted(loops._repeats, len))
            patch.setattr(loops, "_too_often", counted(loops._too_often, len))
            patch.setattr(characters, "_is_misread", counted(characters._is_misread, len))
            for find in (loops.find_repetition, characters.find_control_token, characters.find_garbage):
                find(text)
        return done

    small, large = work(SHAPES[shape](20_000)), work(SHAPES[shape](200_000))
    print(f"{shape}: {small} steps for 20 000 characters, {large} for 200 000")
    assert large <= 10 * max(small, 1000) * 2.5  # 2: with more kinds of words, a number is two bytes wide
    assert large <= 600 * 200_000


def explosive(pattern: re.Pattern[Any]) -> bool:
    """Whether it refers back to a group, or holds an endless repetition inside another: the two that can explode."""
    if sys.version_info >= (3, 11):
        from re import _parser as parser  # type: ignore[attr-defined]
    else:
        import sre_parse as parser

    def inner(value: Any) -> list[Any]:
        if isinstance(value, parser.SubPattern):
            return [value]
        return [part for item in value for part in inner(item)] if isinstance(value, (list, tuple)) else []

    def look(part: Any, inside: bool) -> bool:
        for kind, value in part:
            endless = str(kind).endswith("REPEAT") and value[1] > 100
            if str(kind).startswith("GROUPREF") or (endless and inside):
                return True
            if any(look(below, inside or endless) for below in inner(value)):
                return True
        return False

    flags = pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else 0
    return look(parser.parse(pattern.pattern, flags), False)


def test_no_pattern_can_explode() -> None:
    patterns = {
        f"{module.__name__}.{name}": pattern
        for module in (characters, loops, checks)
        for name, found in vars(module).items()
        for pattern in (found if isinstance(found, tuple) else (found,))
        if isinstance(pattern, re.Pattern)
    }
    assert len(patterns) >= 8
    assert [name for name, pattern in patterns.items() if explosive(pattern)] == []


@table("pattern", ["(a+)+", "(?:ab*)*c", r"(.)\1{9,}", "(?:x|(?:y{2,}z)*)"])
def test_a_pattern_that_can_explode_would_be_seen(pattern: str) -> None:
    assert explosive(re.compile(pattern))


def naive(sequence: Sequence[str], longest: int, least: int) -> set[tuple[int, int, int]]:
    """Every maximal repetition of a unit that is none itself, found by looking everywhere."""
    found = set()
    for period in range(1, min(longest, len(sequence) // least) + 1):
        equal = [sequence[i] == sequence[i + period] for i in range(len(sequence) - period)]
        starts = [i for i, same in enumerate(equal) if same and not (i and equal[i - 1])]
        for start in starts:
            stop = next((i for i in range(start, len(equal)) if not equal[i]), len(equal))
            repeats = (stop - start) // period + 1
            unit = sequence[start : start + period]
            itself = any(unit == unit[:part] * (period // part) for part in range(1, period) if period % part == 0)
            if repeats >= least and not itself:
                found.add((start, period, repeats))
    return found


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.text("abc", min_size=1, max_size=5), st.integers(1, 8)), max_size=6),
    st.integers(1, 6),
    st.integers(2, 5),
    st.sampled_from([0, 300, 70_000]),
)
def test_every_cycle_is_found_exactly(blocks: list[tuple[str, int]], longest: int, least: int, kinds: int) -> None:
    text = "".join(unit * times for unit, times in blocks)
    others = "".join(map(chr, range(0x4E00, 0x4E00 + min(kinds, 300)))) if kinds else ""
    sequence = text + others  # more kinds of items need wider numbers
    found = {(c.start, c.period, c.repeats) for c in loops.cycles(sequence, longest=longest, least=least)}
    assert found == naive(sequence, longest, least)


def test_wide_numbers_are_compared_whole() -> None:
    """From 65 536 kinds of items on, a number has bytes that are zero by chance."""
    sequence = [str(i) for i in range(70_000)] + ["256", "65536"] * 6
    found = list(loops.cycles(sequence, longest=8, least=5))
    assert [(c.start, c.period, c.repeats) for c in found] == [(70_000, 2, 6)]


# ------------------------------------------------------------------------------------------------- tool calls

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "limit": {"type": "integer"},
                    "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "score": {"type": ["number", "null"]},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "where": {"$ref": "#/$defs/Where"},
                    "after": {"type": "string", "nullable": True},
                },
                "required": ["query"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {"name": "strict", "parameters": {"properties": {"a": {}}, "additionalProperties": False}},
    },
]


def test_a_tool_call_that_cannot_be_read_is_named() -> None:
    broken = {"role": "assistant", "content": "", "unparsed_tool_calls": ['{"name": "calc", "arguments": ']}
    assert str(DEFAULT.check(broken)).startswith("wrong_toolcall: cannot parse")


@table("arguments", [None, "", "{", "[1]", '"text"', [1], "{'a': 1}"])
def test_arguments_that_are_no_object_are_a_wrong_call(arguments: Any) -> None:
    assert str(DEFAULT.check(calling("search", arguments))).startswith("wrong_toolcall: the arguments of the call to")


@table(
    ("name", "arguments"),
    [
        ("search", {"query": "x"}),
        ("search", {"query": "x", "limit": 3, "exact": None, "score": 1, "tags": [], "where": {"anything": 1}}),
        ("search", {"query": "x", "limit": 3.0, "exact": True, "score": None, "more": "is the tool's business"}),
        ("search", {"query": "x", "after": None}),
        ("now", {}),
        ("now", {"zone": "UTC"}),
        ("strict", {"a": 1}),
    ],
)
def test_a_call_that_fits_passes_every_check(name: str, arguments: Any) -> None:
    everything = OutputChecks([n for n in EVERY_NAME if n != "format_type_1"])
    assert everything.check(calling(name, json.dumps(arguments)), TOOLS) is None
    assert everything.check(calling(name, arguments), TOOLS) is None


def test_a_tool_that_was_not_offered_is_named_and_only_where_the_offer_is_known() -> None:
    check = OutputChecks(["unknown_tool"]).check
    assert check(calling("serch", "{}"), TOOLS) == (
        "unknown_tool: 'serch' was not offered; the tools are search, now, strict"
    )
    assert check(calling("serch", "{}"), []) == "unknown_tool: 'serch' was not offered; the tools are none"
    assert check(calling("serch", "{}"), None) is None
    assert DEFAULT.check(calling("serch", "{}"), TOOLS) is None


@table(
    ("name", "arguments", "says"),
    [
        ("search", {"limit": 3}, "'search' lacks 'query'"),
        ("search", {"query": 3}, "gives 'query' as 3; it must be string"),
        ("search", {"query": "x", "limit": "3"}, "gives 'limit' as \"3\"; it must be integer"),
        ("search", {"query": "x", "limit": 3.5}, "it must be integer"),
        ("search", {"query": "x", "limit": True}, "gives 'limit' as true; it must be integer"),
        ("search", {"query": "x", "exact": "yes"}, "it must be boolean or null"),
        ("search", {"query": "x", "score": "high"}, "it must be number or null"),
        ("search", {"query": "x", "tags": "a, b"}, "it must be array"),
        ("strict", {"b": 1}, "has 'b', which is not an argument of the tool"),
    ],
)
def test_arguments_that_do_not_fit_are_named(name: str, arguments: Any, says: str) -> None:
    message = calling(name, json.dumps(arguments))
    complaint = str(OutputChecks(["wrong_arguments"]).check(message, TOOLS))
    assert complaint.startswith(f"wrong_arguments: the call to {name!r} ")
    assert says in complaint
    assert DEFAULT.check(message, TOOLS) is None
    assert OutputChecks(["wrong_arguments"]).check(message) is None


CUT_OFF = [
    '<tool_call>\n{"name": "search", "argu',
    '<tool_call>\n{"name": "search", "arguments": {"query": "x"}}',
    '{"name": "search", "parameters": {"query": "x"',
    '<|python_tag|>{"name": "search", "parameters": {"query": "x"',
    '[TOOL_CALLS][{"name": "search", "arguments": {"query": "x"}',
    '[TOOL_CALLS]search[ARGS]{"query"',
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search",
    '<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "x',
]
CLOSED = [
    "<tool_call>\noops\n</tool_call>",
    '{"name": "search", "arguments": {"query": "x"}}',
    '[TOOL_CALLS][{"name": "search", "arguments": "{}"}]',
    "<｜tool▁calls▁begin｜>oops<｜tool▁calls▁end｜>",
    "<|channel|>commentary to=functions.search json<|message|>[1]<|end|>",
]


@table("call", CUT_OFF)
def test_a_call_that_was_cut_off_is_not_the_models_mistake(call: str) -> None:
    message = {"role": "assistant", "content": f"Let me see.\n{call}\n", "unparsed_tool_calls": [call]}
    wrong = OutputChecks(["wrong_toolcall"])
    assert str(wrong.check(message, TOOLS)).startswith("wrong_toolcall: ")
    assert DEFAULT.check(message, TOOLS, cut_off=True) is None
    shown = OutputView(message, TOOLS, cut_off=True)
    assert (shown.text, list(shown.unparsed_tool_calls)) == ("Let me see.\n", [])
    earlier = {**message, "unparsed_tool_calls": [CLOSED[0], call]}
    assert "oops" in str(wrong.check(earlier, TOOLS, cut_off=True))
    inside = {**message, "content": f"{call} and more"}
    assert str(wrong.check(inside, TOOLS, cut_off=True)).startswith("wrong_toolcall: ")
    assert DEFAULT.check({**message, "content": f"<|im_start|> {call}"}, TOOLS, cut_off=True) is not None


@table("call", CLOSED)
def test_a_call_that_was_ended_is_wrong_wherever_the_reply_was_cut_off(call: str) -> None:
    message = {"role": "assistant", "content": call, "unparsed_tool_calls": [call]}
    assert str(OutputChecks(["wrong_toolcall"]).check(message, TOOLS, cut_off=True)).startswith("wrong_toolcall: ")


@table("call", [*CUT_OFF, *CLOSED])
def test_a_call_inside_a_thought_is_wrong_unless_the_thought_was_cut_off(call: str) -> None:
    message = {"content": "", "reasoning_content": f"Let me see.\n{call}", "unparsed_tool_calls": [call]}
    wrong = OutputChecks(["wrong_toolcall"])
    assert str(wrong.check(message, TOOLS)).startswith("wrong_toolcall: ")
    assert "inside the thought" in str(wrong.check(message, TOOLS))
    assert wrong.check(message, TOOLS, cut_off=True) is None


# ----------------------------------------------------------------------------------- names of older experiments


@table(
    ("message", "fires"),
    [
        ({"content": "<think>Add.</think>\n```python\nprint(4)\n```"}, False),
        ({"content": "```python\nprint(4)\n```\n", "reasoning_content": "Add."}, False),
        ({"content": "```python\nprint(4)\n```"}, True),
        ({"content": "<think></think>```python\nprint(4)\n```"}, True),
        ({"content": "<think>Add.\n```python\nprint(4)\n```"}, True),
        ({"content": "<think>Add.</think>The code:\n```python\nprint(4)\n```"}, True),
        ({"content": "<think>Add.</think>```python\nprint(4)\n```\nThat prints 4."}, True),
        ({"content": "<think>Add.</think>```python\na\n```\n```python\nb\n```"}, True),
        ({"content": "<think>Add.</think>```python\nprint(4)"}, True),
        ({"content": "<think>Add.</think>```js\nprint(4)\n```"}, True),
        ({"content": "<think>Add.</think>4"}, True),
        ({"content": None}, True),
    ],
)
def test_a_thought_and_one_block_of_python(message: dict[str, Any], fires: bool) -> None:
    assert (checks.format_type_1(OutputView(message)) is not None) is fires


def test_the_names_of_older_experiments_are_known_and_harmless() -> None:
    older = OutputChecks(["nonsense", "non_ascii", "wrong_toolcall"])
    assert older.check({"content": "café €5 你好"}) is None
    assert str(older.check({"content": "word " * 60})).startswith("nonsense: ")


# -------------------------------------------------------------------------------------------------- by name


def test_checks_are_chosen_by_name_and_asked_in_order() -> None:
    loop = {"content": "word " * 60}
    assert OutputChecks([]).check(loop) is None
    assert str(OutputChecks(["repetition", "nonsense"]).check(loop)).startswith("repetition: ")
    assert str(OutputChecks(["checks/repetition"]).check(loop)).startswith("repetition: ")
    with pytest.raises(ConfigError, match=r"compute_madness_checklist: unknown output check 'nonsens'; did you mean"):
        OutputChecks(["nonsens"])
    with pytest.raises(ConfigError, match=r"'typo'; installed: control_tokens, .*, wrong_toolcall"):
        OutputChecks(["typo"])


def test_two_plugins_with_one_name_are_told_apart() -> None:
    def plugin(name: str) -> Any:
        made = ModuleType(name)
        offered = {"polite": Provider(target=f"{__name__}:{name}", summary="is it polite")}
        made.register_output_checks = hookimpl(lambda: offered)  # type: ignore[attr-defined]
        distribution = SimpleNamespace(name=f"acme-{name}", version="1.0", requires=[])
        return SimpleNamespace(name=name, value=name, dist=distribution, load=lambda: made)

    manager = PluginManager().load([plugin("one"), plugin("two")])
    with pytest.raises(ConfigError, match="write one/polite or two/polite"):
        OutputChecks(["polite"], manager)
    assert registry.find_provider(manager, "output check", "two/polite").target.endswith(":two")


USERS = """
    def plain(message):
        return "plain: rude" if "fool" in message["content"] else None

    def modern(view):
        return f"modern: {len(view.tools)} tools" if view.tools else None

    def raises(view):
        return view.message["nothing"]

    def yes(view):
        return True

    async def later(view):
        return None

    class Polite:
        def __call__(self, view):
            return None

    polite = Polite()
"""


@pytest.fixture
def users_file(tmp_path: Path) -> Path:
    (tmp_path / "polite_checks.py").write_text(textwrap.dedent(USERS), encoding="utf-8")
    return tmp_path


def build(folder: Path, *names: str) -> OutputChecks:
    text = f"rollout: {{compute_madness_checklist: {json.dumps(list(names))}}}"
    return OutputChecks.build(fake_config(folder, textwrap.indent(text, "  ")))


def test_functions_of_the_users_own_are_found_beside_the_experiment(users_file: Path) -> None:
    own = build(users_file, "polite_checks->plain", "polite_checks.py->modern", "polite_checks.py:polite", "nonsense")
    assert own.check({"content": "You fool"}) == "plain: rude"
    assert own.check({"content": "Dear"}, TOOLS) == "modern: 3 tools"
    assert own.check({"content": "Dear"}) is None
    with pytest.raises(ConfigError, match=r"compute_madness_checklist: .*has no 'plian'; did you mean plain\?"):
        build(users_file, "polite_checks.py->plian")


@table("name", ["Polite", "later"])
def test_what_is_no_plain_function_is_refused_before_anything_runs(users_file: Path, name: str) -> None:
    with pytest.raises(PluginError, match="plain function of one OutputView"):
        build(users_file, f"polite_checks.py->{name}")


def test_a_check_that_breaks_is_never_taken_for_silence(users_file: Path) -> None:
    with pytest.raises(JudgeFailed, match=r"the output check 'polite_checks.py->raises' raised KeyError: 'nothing'"):
        build(users_file, "polite_checks.py->raises").check({"content": ""})
    with pytest.raises(JudgeFailed, match="returned bool"):
        build(users_file, "polite_checks.py->yes").check({"content": ""})


# ---------------------------------------------------------------------------------------- the conformance check


@table(
    ("name", "wrong", "options"),
    [
        ("nonsense", ["word " * 60, {"role": "assistant", "content": "", "reasoning_content": "ja nein " * 60}], {}),
        ("control_tokens", ["<|im_end|>"], {}),
        ("garbled", ["\x00" * 30], {}),
        ("repetition", ["word " * 60], {}),
        ("wrong_toolcall", [{"content": "", "unparsed_tool_calls": ["{"]}], {}),
        ("unknown_tool", [calling("nope", "{}")], {"tools": TOOLS}),
        ("wrong_arguments", [calling("search", "{}")], {"tools": TOOLS}),
        ("format_type_1", ["4"], {"ordinary": ["<think>Add.</think>```python\nprint(4)\n```"]}),
    ],
)
def test_our_own_checks_keep_to_the_contract(name: str, wrong: Any, options: Any) -> None:
    said = check_output_check(getattr(checks, name), wrong, **options)
    assert [text.partition(":")[0] for text in said] == [name] * len(wrong)


def test_every_check_of_ours_is_registered_and_says_what_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "plugins.md").read_text("utf-8")
    public = {name for name in checks.__all__ if name.islower()}
    assert public == set(EVERY_NAME)
    for name in EVERY_NAME:
        assert registry.resolve(load_plugins(), "output check", name) is getattr(checks, name)
        assert inspect.getdoc(getattr(checks, name))
        assert f"\n| `{name}` | " in page


class Counting:
    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, view: OutputView) -> str | None:
        self.asked += 1
        return f"asked {self.asked} times"


async def in_time(view: OutputView) -> str | None:
    return "late"


def spoils(view: OutputView) -> str | None:
    view.message.pop("content", None)  # type: ignore[attr-defined]
    return "spoilt" if "role" in view.message else None


BROKEN: list[tuple[Any, Any, str]] = [
    (lambda view: None, ["bad"], "which it must reject"),
    (lambda view: "always", ["bad"], "rejects ordinary text"),
    (lambda view: "bad" in view.text, ["bad"], "returned True. Return a text or None"),
    (lambda view: "two\nlines" if "bad" in view.text else None, ["bad"], "Return a single line"),
    (lambda view: "bad" if "bad" in view["content"] else None, ["bad"], "raised KeyError: 'content'"),
    (Counting(), ["bad"], "not keep state"),
    (spoils, ["bad"], "Copy what you want to change"),
    (in_time, ["bad"], "is async, but a check is a plain function"),
    (Counting, ["bad"], "is a class, but a check is a plain function"),
    (checks.nonsense, [], "at least one text"),
    ("nonsense", ["bad"], "pass the check itself"),
]


@pytest.mark.parametrize(("check", "wrong", "says"), BROKEN, ids=[says for _, _, says in BROKEN])
def test_checks_that_break_the_contract_are_told_how(check: Any, wrong: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(says)):
        check_output_check(check, wrong)
