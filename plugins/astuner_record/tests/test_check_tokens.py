"""`astuner check tokens`: what keeps tokens exact passes, and what does not is named."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import load_config
from astuner.chat.codec import ChatCodec
from astuner.cli import main
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.messages import parse_arguments
from astuner.contracts.types import STARTS, FinishReason, SamplingParams
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner_models.serving import TEMPLATES
from astuner_record.conversations import transcript
from astuner_record.token_check.checks import REPLIES, check_config, check_trace, read_trace, say_again
from astuner_record.token_check.report import ALLOWED, EpisodeFound, Report, find_difference
from astuner_record.token_check.scripted import (
    SCENARIOS,
    SPELLINGS,
    Asked,
    find_object,
    make_arguments,
    respelled,
    write_move,
)
from tests.table import table

AWKWARD = SCENARIOS["tool-call-unicode"].moves[0].arguments
EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent" / "math_agent.yaml"
DATA = Path(__file__).parents[2] / "astuner_families" / "tests" / "templates"
FAMILIES: dict[str, Any] = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look for something.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}},
            "required": ["query", "limit"],
        },
    },
}
OTHER = {
    "type": "function",
    "function": {"name": "clock", "description": "Tell the time.", "parameters": {"type": "object", "properties": {}}},
}


@cache
def template_of(name: str) -> str:
    known = FAMILIES[name]
    if "file" in known:
        return (DATA / known["file"]).read_text(encoding="utf-8")
    if "shipped" in known:
        return TEMPLATES[known["shipped"]].read_text(encoding="utf-8")
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl, from which templates under licences of their own are read, is not installed")
    return (Path(found.origin).parent / "chat_templates" / f"{known['trl']}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(family: str) -> Any:
    known = FAMILIES[family]
    return make_tokenizer(template_of(family), known["special"], eos_token=known["eos"], bos_token=known["bos"])


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[..., Any]:
    """A config of one of the agents above, with a tokenizer in a folder without weights."""
    shutil.copy(Path(__file__).parent / "data" / "check_tokens_agents.py", tmp_path / "agents.py")
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{n}?", "task_id": "t{n}"}}\n' for n in range(3)))

    def make(agent: str, family: str = "", *overrides: str) -> Any:
        made = tokenizer(family) if family else make_tokenizer()
        made.save_pretrained(tmp_path / "model")
        text = f"""
  task_reader:
    type: jsonl
    jsonl: {{training: {{file_path: {tmp_path}/tasks.jsonl}}}}
  rollout: {{workflow: "{tmp_path}/agents.py->{agent}"}}
"""
        return fake_config(tmp_path, text, [f"astuner.model.path={tmp_path}/model", *overrides])

    return make


def episodes(report: Report) -> dict[str, EpisodeFound]:
    (variant,) = report.variants
    return {episode.name: episode for episode in variant.episodes}


# ------------------------------------------------------------------------------------------------------------ agents


def test_the_agentscope_math_agent_of_the_quick_start_is_exact_in_every_scenario() -> None:
    report = check_config(load_config(EXAMPLE, backbone="local"), templates=[DATA / "qwen3.jinja"])
    assert report.frameworks[0].startswith("agentscope 2.")
    for variant in report.variants:
        assert [e.name for e in variant.episodes] == list(SCENARIOS)
        assert all(e.ended in ("completed", "truncated") for e in variant.episodes)
    assert report.problems() == {}
    assert report.counts["exact"] == 2 * 9
    assert set(report.counts) == {"start", "exact"}


@table("family", FAMILIES)
def test_a_plain_agent_is_exact_in_every_family_except_where_the_template_cannot_be(
    experiment: Callable[..., Any], family: str
) -> None:
    known = FAMILIES[family]
    report = check_config(experiment("Agent", family), tools=[bool(known["calls"])])
    (variant,) = report.variants
    assert variant.facts["incremental"] is known["incremental"]
    assert set(report.problems()) <= (set() if known["incremental"] else {"template_not_incremental"}), report.text()
    found = episodes(report)
    assert all(e.ended in ("completed", "truncated") for e in found.values())
    for name, scenario in SCENARIOS.items():
        called = len([m for m in scenario.moves if m.calls and m.end == "stop"]) if known["calls"] else 0
        assert len(found[name].turns) == called + 2, name
        assert found[name].turns[0].what == "start"
    assert report.counts["exact"] > 0


@table(
    ("agent", "rule", "message", "before", "after"),
    [
        ("Drops", "messages_removed", 1, "user: Hint: look twice.", "assistant: The answer is \\boxed{4}."),
        ("Retools", "tools_changed", None, "tools search, clock", "tools search"),
        ("Redescribes", "tools_changed", None, "for something.", "for something else."),
        ("Rewrites", "history_rewritten", 2, '"query":"2 + 2"', '"query": "mine"'),
        ("Inserts", "messages_inserted", 2, "assistant: search(", "user: By the way."),
    ],
)
def test_what_breaks_the_continuation_is_named(
    experiment: Callable[..., Any], agent: str, rule: str, message: int | None, before: str, after: str
) -> None:
    report = check_config(experiment(agent), scenarios=["text" if agent == "Drops" else "tool-call"])
    (found,) = episodes(report).values()
    first, second = found.turns[:2]
    assert (first.what, second.what, second.turn) == ("start", rule, 1)
    assert second.difference is not None
    assert (second.difference.turn, second.difference.message) == (0, message)
    assert before in second.difference.before
    assert after in second.difference.after
    assert set(report.problems()) == {rule}
    assert report.problems([rule]) == {}
    text = report.text()
    assert f"turn 1 of agent 'default': {rule}: " in text
    assert f"turns; not exact: {report.counts[rule]} {rule}" in text


def _schema(**changed: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"default": 1}}, "required": ["a", "n"]}
    return {**schema, **changed}


def _tools(parameters: Any, description: str = "d", **more: Any) -> list[dict[str, Any]]:
    function = {"name": "other", "description": "o", "parameters": {}}
    changed = {"name": "find_order", "description": description, "parameters": parameters, **more}
    return [{"type": "function", "function": function}, {"type": "function", "function": changed}]


@table(
    ("tools", "before", "after"),
    [
        (_tools(dict(reversed(_schema().items()))), '{"type": "object"', '{"required"'),
        (_tools(_schema(required=["n", "a"])), '["a", "n"]', '["n", "a"]'),
        (_tools(_schema(properties={"n": {"default": 1}, "a": {"type": "string"}})), '{"a"', '{"n"'),
        (_tools(_schema(properties={"a": {"type": "string"}, "n": {"default": 1.0}})), "1}", "1.0}"),
        (_tools(_schema(properties={"a": {"type": "string"}, "n": {"default": True}})), "1}", "true}"),
        (_tools(_schema(required=["a"])), '"n"]', '["a"]'),
        (_tools(_schema(strict=True)), '"n"]}', '"strict": true'),
        (_tools(_schema(), description="d "), '"d"', '"d "'),
        (_tools(_schema(), description=""), '"d"', '""'),
        (_tools(_schema(), strict=False), '"n"]}', '"strict": false'),
        (_tools(None), '{"type"', "null"),
        (_tools(_schema())[::-1], "tools other, find_order", "tools find_order, other"),
        (_tools(_schema())[1:], "tools other, find_order", "tools find_order"),
    ],
)
def test_what_changed_in_a_tool_is_shown_and_no_message(tools: list[Any], before: str, after: str) -> None:
    reply = {"role": "assistant", "content": "Four."}
    encoded: Any = None
    asked = Asked(messages=(USER,), tools=tuple(_tools(_schema())), encoded=encoded, turn=0, reply=reply, text="Four.")
    found = find_difference([USER, reply, USER], tools, [asked])
    assert found is not None
    assert (found.turn, found.message) == (0, None)
    assert "find_order" in found.before
    assert "find_order" in found.after
    assert before in found.before
    assert after in found.after


def test_a_conversation_of_its_own_is_no_break(experiment: Callable[..., Any]) -> None:
    report = check_config(experiment("Forgets"), scenarios=["text"])
    assert report.counts == {"start": 3}
    assert report.problems() == {}
    assert "Exact continuation: 0 of 0 turns" in report.text()


def test_a_history_that_is_retold_is_said_to_be(experiment: Callable[..., Any]) -> None:
    report = check_config(experiment("Retells"), scenarios=["text"])
    assert report.counts == {"start": 1, "history_retold": 1}
    assert report.problems() == {"history_retold": 1}
    assert report.problems(["history_retold"]) == {}
    assert episodes(report)["text"].turns[1].why.startswith("repeats the model's reply of turn 0")
    assert "not exact: 1 history_retold" in report.text()


def test_a_workflow_that_fails_is_shown_and_the_others_run(experiment: Callable[..., Any]) -> None:
    report = check_config(experiment("Fails"), scenarios=["tool-call", "text"])
    found = episodes(report)
    assert (found["tool-call"].ended, found["text"].ended) == ("workflow_failed", "completed")
    assert [len(e.turns) for e in found.values()] == [1, 2]
    assert "RuntimeError: no network" in report.text()
    assert report.problems() == {"workflow_failed": 1}
    assert report.problems(["workflow_failed"]) == {}


def test_an_agent_without_an_end_is_ended(experiment: Callable[..., Any]) -> None:
    report = check_config(experiment("Endless"), scenarios=["text"])
    (found,) = episodes(report).values()
    assert (len(found.turns), found.ended) == (REPLIES, "truncated")
    assert f"the check ends after {REPLIES} replies" in found.error
    assert report.problems() == {}


@pytest.mark.slow
def test_an_agent_behind_the_endpoint_is_checked_the_same_way(experiment: Callable[..., Any]) -> None:
    report = check_config(experiment("Client"), scenarios=["parallel-calls", "several-turns"])
    assert report.counts == {"start": 2, "exact": 5}, report.text()
    assert any(name.startswith("openai ") for name in report.frameworks)


def test_no_judge_and_no_outside_model_is_asked_and_no_length_applies(experiment: Callable[..., Any]) -> None:
    report = check_config(
        experiment(
            "Agent",
            "",
            "astuner.task_judge.judge=agents.py->Missing",
            "astuner.rollout.max_response_length_in_one_turn=2",
            "astuner.data.max_prompt_length=3",
            "astuner.agents={default: {model: external, base_url: 'http://127.0.0.1:1', name: none}}",
        ),
        scenarios=["tool-call"],
    )
    assert report.counts == {"start": 1, "exact": 2}
    assert report.problems() == {}


def test_several_tasks_have_names_and_tools_can_be_switched_off(experiment: Callable[..., Any]) -> None:
    report = check_config(experiment("Agent"), scenarios=["tool-call"], tasks=2, tools=[True, False])
    on, off = report.variants
    assert [e.task for e in on.episodes] == ["t0", "t1"]
    assert (on.tools, off.tools) == (True, False)
    assert [len(e.turns) for e in off.episodes] == [2, 2]
    assert off.episodes[0].notes == ("no tools are offered: replies with text",)


def test_a_template_that_cannot_be_used_is_one_problem_and_the_others_are_tried(experiment: Callable[..., Any]) -> None:
    report = check_config(
        experiment("Agent"), scenarios=["text"], templates=[DATA / "glm-4.5.jinja", DATA / "qwen2.5.jinja"]
    )
    assert [v.episodes[0].ended for v in report.variants] == ["completed", "unusable", "completed"]
    assert report.problems() == {"unusable": 1}
    assert "glm-4.5.jinja, tools on" in report.text()
    assert "which is not a single token of its tokenizer" in report.text()


SHOWS_NO_TOOLS = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


def test_a_template_without_tools_is_said_to_be_one(experiment: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bare.jinja").write_text(SHOWS_NO_TOOLS)
    report = check_config(experiment("Agent"), scenarios=["text"], templates=[tmp_path / "bare.jinja"])
    assert report.variants[1].facts["renders_tools"] is False
    assert report.variants[1].episodes[0].ended == "unusable"
    assert "ChatML family, does not render tools" in report.text()
    assert "does not show them" in report.text()


# ----------------------------------------------------------------------------------------------------- what is said


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_the_scripted_model_says_is_read_as_it_is_meant(family: str, name: str) -> None:
    codec = ChatCodec(tokenizer(family))
    template, tools = codec.template, [TOOL, OTHER] if codec.template.renders_tools else []
    for number, move in enumerate(SCENARIOS[name].moves):
        encoded = codec.conversation().encode([{"role": "user", "content": "?"}], tools)
        written, note = write_move(template, move, tools, number, encoded.prompt_ids)
        cut = move.end == "cut"
        assert written.finish_reason is (FinishReason.LENGTH if cut else FinishReason.STOP)
        assert (written.response_ids[-1] in codec.stop_token_ids) is not cut
        if cut or note:
            continue
        read = template.read(template.decode(written.response_ids[:-1]), tools, prompt_ids=encoded.prompt_ids)
        assert len(read.calls) == (move.calls if tools and move.end == "stop" else 0)
        assert bool(read.broken) is (move.end == "broken" and bool(tools)) or move.end == "broken"
        assert read.reasoning.strip() == move.thought
        for call in read.calls:
            assert parse_arguments(call.arguments) in ({"query": move.arguments, "limit": 2}, {})


def test_spellings_differ_where_the_family_writes_json() -> None:
    codec = ChatCodec(tokenizer("qwen2.5"))
    prompt = codec.conversation().encode([{"role": "user", "content": "?"}], [TOOL]).prompt_ids
    texts = {
        name: codec.template.decode(said.response_ids)
        for name in ("tool-call", "tool-call-spaced", "tool-call-escaped", "tool-call-unicode")
        for said, _ in [write_move(codec.template, SCENARIOS[name].moves[0], [TOOL], 0, prompt)]
    }
    assert '{"query":"2 + 2","limit":2}' in texts["tool-call"]
    assert '{\n "query": "2 + 2"' in texts["tool-call-spaced"]
    assert "\\u4f60" in texts["tool-call-escaped"]
    assert "你好" in texts["tool-call-unicode"]


_SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5)
_SCHEMAS = st.recursive(
    st.sampled_from([{}, {"type": "string"}, {"type": "integer", "minimum": 3}, {"type": ["null", "number"]}])
    | st.builds(lambda v: {"enum": [v]}, _SCALARS)
    | st.sampled_from([{"$ref": "#/$defs/Missing"}, {"$ref": "#"}, {"type": "string", "maxLength": 1}]),
    lambda inner: (
        st.builds(lambda i: {"type": "array", "items": i}, inner)
        | st.builds(lambda i: {"anyOf": [{"type": "null"}, i]}, inner)
        | st.builds(
            lambda p, r: {"type": "object", "properties": p, "required": sorted(p)[:r]},
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
            st.integers(0, 3),
        )
    ),
    max_leaves=6,
)


@given(_SCHEMAS, st.sampled_from(list(SPELLINGS)))
def test_arguments_can_be_made_for_any_schema_and_spelled_in_any_way(schema: dict[str, Any], spelling: str) -> None:
    made = make_arguments(schema, AWKWARD)
    text = SPELLINGS[spelling](made)
    assert parse_arguments(text) == made
    around = f'{{"name": "f", "arguments": {json.dumps(made)}}}</tool_call>'
    if made:
        again = respelled(around, [text])
        assert text in again
        span = find_object(again, made)
        assert span is not None
        assert again[slice(*span)] == text


def test_arguments_keep_to_the_schema() -> None:
    schema = {
        "$defs": {"Unit": {"enum": ["cm", "m"]}},
        "properties": {
            "unit": {"$ref": "#/$defs/Unit"},
            "sizes": {"type": "array", "items": {"type": "number"}, "minItems": 2},
            "exact": {"type": "boolean"},
            "where": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "string"}}}]},
            "optional": {"type": "string"},
        },
        "required": ["unit", "sizes", "exact", "where"],
    }
    assert make_arguments(schema) == {"unit": "cm", "sizes": [2, 2], "exact": True, "where": {"x": "2 + 2"}}


# ------------------------------------------------------------------------------------------------------------ traces


def call(label: str, arguments: str = '{"query":"a"}') -> dict[str, Any]:
    return {"id": label, "type": "function", "function": {"name": "search", "arguments": arguments}}


def completion(message: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": finish}]}


USER = {"role": "user", "content": "q"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [call("x")]}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "r"}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def model(tmp_path: Path) -> str:
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_recorded_requests_are_replayed(tmp_path: Path, model: str) -> None:
    redumped = {**CALLED, "tool_calls": [call("x", '{"query": "a"}')]}
    hint = {"role": "user", "content": "hint"}
    rows = [
        {"session": "s", "messages": [USER], "tools": [TOOL], "response": completion(CALLED, "tool_calls")},
        {"session": "t", "body": {"messages": [USER, hint]}, "response": {"content": "a", "tool_calls": None}},
        {
            "session": "s",
            "request": {"messages": [USER, redumped, RESULT], "tools": [TOOL]},
            **completion({"content": "b"}),
        },
        {
            "session": "t",
            "messages": [USER, {"role": "assistant", "content": "a"}, USER],
            "response": {"message": {"content": "c"}},
        },
    ]
    (variant,) = check_trace(write(tmp_path / "t.jsonl", *rows), model=model).variants
    first, second = variant.episodes
    assert [t.what for t in first.turns] == ["start", "exact"]
    assert [t.what for t in second.turns] == ["start", "messages_removed"]
    assert second.turns[1].difference is not None
    assert second.turns[1].difference.before == "user: hint"


def test_ids_that_come_again_and_replies_that_were_cut_off(tmp_path: Path, model: str) -> None:
    turns: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = [USER]
    for n in range(3):
        said = {**CALLED, "tool_calls": [call("x", f'{{"query":"{n}"}}')]}
        turns.append({"messages": list(messages), "tools": [TOOL], **completion(said)})
        messages += [said, {**RESULT, "content": f"r{n}"}]
    turns.append({"messages": list(messages), "tools": [TOOL], **completion({"content": "so it"}, "length")})
    messages += [{"role": "assistant", "content": "so it"}, USER]
    turns.append({"messages": list(messages), "tools": [TOOL], **completion({"content": "is"})})
    report = check_trace(write(tmp_path / "t.jsonl", *turns), model=model)
    assert report.counts == {"start": 1, "exact": 4}, report.text()


def test_agentscope_1_0_7s_made_up_finish_call_is_no_break(tmp_path: Path, model: str) -> None:
    finish = {**call("made-up", '{"response": "four"}')}
    finish["function"] = {**finish["function"], "name": "generate_response"}
    rows = [
        {"messages": [USER], **completion({"content": "four"})},
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [{"type": "text", "text": None}], "tool_calls": [finish]},
                {"role": "tool", "tool_call_id": "made-up", "content": "Successfully generated response."},
                {"role": "assistant", "content": "four"},
                {"role": "user", "content": "and?"},
            ],
            **completion({"content": "so"}),
        },
    ]
    assert check_trace(write(tmp_path / "t.jsonl", *rows), model=model).counts == {"start": 1, "exact": 1}


def test_a_runs_own_transcript_is_replayed(experiment: Callable[..., Any], tmp_path: Path) -> None:
    config = experiment("Agent", "", "astuner.task_judge.judge=astuner_record.token_check.checks->NoJudge")
    engine = FakeEngine(['<tool_call>\n{"name": "search", "arguments": {"query":"x"}}\n</tool_call>', "there", "yes"])
    codec = ChatCodec(engine.tokenizer)
    runner = EpisodeRunner(config)
    episode = asyncio.run(runner.run(workflow_task(), one_model(engine, codec), SamplingParams(max_tokens=500)))
    path = write(tmp_path / "episodes.jsonl", transcript(episode))
    ((name, turns),) = read_trace(path).items()
    assert [len(t.messages) for t in turns] == [2, 4, 6]
    assert turns[1].tools == (TOOL, OTHER)
    found = say_again(codec, name, turns)
    assert [t.what for t in found.turns] == ["start", "exact", "exact"]


def test_replies_that_the_family_cannot_give_are_noted(tmp_path: Path) -> None:
    both = {**CALLED, "content": "Let me look.", "tool_calls": [call("x"), call("y")]}
    path = write(tmp_path / "t.jsonl", {"messages": [USER], "tools": [TOOL], **completion(both)})
    ((name, turns),) = read_trace(path).items()
    found = say_again(ChatCodec(tokenizer("mistral-nemo")), name, turns)
    assert "its text is parsed as ''" in found.notes[0]


@table(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[1]", "a JSON list"),
        ('{"messages": [{"role": "user", "content": "q"}]}', "response is missing"),
        ('{"response": {"content": "a"}}', "neither an episode of a run nor a recorded request"),
        ('{"messages": [{"role": "robot"}], "response": {"content": "a"}}', "role is 'robot'"),
        ('{"turns": [{"agent": "a"}], "episode_id": "e"}', "neither an episode"),
        (
            '{"episode_id": "e", "turns": [{"turn": 3, "agent": "a", "continues": 1}]}',
            "turn 3 continues turn 1",
        ),
    ],
)
def test_a_bad_line_is_an_error_with_its_place(tmp_path: Path, line: str, says: str) -> None:
    good = {"messages": [USER], **completion({"content": "a"})}
    path = write(tmp_path / "t.jsonl", good, line)
    with pytest.raises(DataError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert says in str(error.value)


def test_an_empty_or_missing_trace_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="contains no conversation"):
        read_trace(write(tmp_path / "t.jsonl"))
    with pytest.raises(DataError, match="Cannot read"):
        read_trace(tmp_path / "none.jsonl")


def test_a_key_is_not_shown(tmp_path: Path, model: str) -> None:
    row = {"api_key": "sk-secret", "messages": [USER], **completion({"content": "a"})}
    text = check_trace(write(tmp_path / "t.jsonl", row), model=model).text()
    assert "secret" not in text
    assert "api_key no. 1" in text


def test_a_difference_needs_something_to_differ_from() -> None:
    assert find_difference([USER], [], []) is None


# ------------------------------------------------------------------------------------------------------ command line


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["check", "tokens", *arguments])
    out = capsys.readouterr()
    return int(ended.value.code or 0), out.out, out.err


def test_the_exit_code_says_whether_all_is_exact(
    experiment: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(experiment("Retools").path)
    path = f"astuner.model.path={tmp_path}/model"
    code, out, _ = run(capsys, file, path, "--scenario", "tool-call")
    assert code == 1
    assert "tools_changed" in out
    code, out, _ = run(capsys, file, path, "--scenario", "text", "--tools", "off", "--json")
    assert code == 0
    assert json.loads(out)["exact"] is True
    code, out, _ = run(capsys, file, path, "--scenario", "tool-call", "--allow", "tools_changed", "--json")
    assert (code, json.loads(out)["turns"]) == (0, {"start": 1, "tools_changed": 1, "exact": 1})


def test_a_trace_takes_its_tokenizer_from_its_run_or_from_the_command_line(
    tmp_path: Path, model: str, experiment: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"messages": [USER], **completion({"content": "a"})}
    (tmp_path / "run" / "episodes").mkdir(parents=True)
    trace = str(write(tmp_path / "run" / "episodes" / "t.jsonl", row))
    code, _, err = run(capsys, trace)
    assert code == 2
    assert "--model" in err
    assert run(capsys, trace, "--model", model)[0] == 0
    (tmp_path / "run" / "resolved.yaml").write_text(experiment("Agent").dump_yaml())
    assert run(capsys, trace)[0] == 0


@table(
    ("arguments", "says"),
    [
        (["x.yaml", "--allow", "tool_changed"], "did you mean tools_changed?"),
        (["x.yaml", "--model", "m"], "--model applies to recordings"),
        ([], "astuner check tokens FILE"),
        (["x.jsonl", "--scenario", "text"], "scenario applies to experiments"),
    ],
)
def test_a_wrong_command_line_says_what_to_type(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_the_scenarios_are_listed_and_an_unknown_one_is_refused(
    experiment: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(SCENARIOS)
    with pytest.raises(ConfigError, match=r"--scenario .* Available: text, "):
        check_config(experiment("Agent"), scenarios=["nonsense"])


def test_what_may_be_allowed_is_what_can_be_found() -> None:
    assert {"tools_changed", "history_rewritten", "whitespace", "workflow_failed", "unusable"} <= ALLOWED
    assert not ALLOWED & STARTS
