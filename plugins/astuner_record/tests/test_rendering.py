"""What `--to sft` and `--to dpo` write renders to the recorded text, or states that it does not."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from astuner.chat.codec import ChatCodec
from astuner.cli import main
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner.testing import make_tokenizer
from astuner_models.serving import TEMPLATES
from astuner_record.episode_log import EpisodeLogWriter
from astuner_record.episode_log.convert import conversations
from astuner_record.episode_log.rendering import Conversation, Fitter
from astuner_testing.fakes import fake_config
from tests.table import table

DATA = Path(__file__).parents[2] / "astuner_families" / "tests" / "templates"
FAMILIES: dict[str, dict[str, Any]] = json.loads((DATA / "families.json").read_text(encoding="utf-8"))


def tool(name: str, **properties: str) -> dict[str, Any]:
    kinds = {key: {"type": kind} for key, kind in properties.items()}
    parameters = {"type": "object", "properties": kinds}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = (tool("weather", city="string"), tool("add", a="integer", b="integer"))
Reply = str | Callable[[ChatCodec], str]
Step = tuple[list[dict[str, Any]], Reply]
NO_THINKING = {"enable_thinking": False}


def jinja(name: str) -> str:
    known = FAMILIES[name]
    if "shipped" in known:
        return TEMPLATES[known["shipped"]].read_text(encoding="utf-8")
    if "file" in known:
        return (DATA / known["file"]).read_text(encoding="utf-8")
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("trl, from which templates under licences of their own are read, is not installed")
    return (Path(found.origin).parent / "chat_templates" / f"{known['trl']}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(name: str) -> Any:
    known = FAMILIES[name]
    return make_tokenizer(jinja(name), known["special"], eos_token=known["eos"], bos_token=known["bos"])


@cache
def codec(name: str, thinking: bool) -> ChatCodec:
    return ChatCodec(tokenizer(name), chat_template_kwargs={} if thinking else NO_THINKING)


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def writes(*calls: tuple[str, Any], content: str = "", reasoning: str = "", compact: bool = False) -> Reply:
    """A reply as the family writes it; ``compact``: JSON without spaces, as no template spells it."""
    ids = [f"c{n}aaaaaaa" for n in range(len(calls))]

    def write(speaks: ChatCodec) -> str:
        made = [
            {"id": label, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for label, (name, arguments) in zip(ids, calls, strict=True)
        ]
        text = speaks.template.write_reply(content, made, reasoning)
        return text.replace('": ', '":').replace(', "', ',"') if compact else text

    return write


RESULTS: list[dict[str, Any]] = [{"role": "tool", "content": "21"}]
"""Stands for a result of each call of the reply before."""
CITY, SUM = ("weather", {"city": 'Zürich "West"'}), ("add", {"a": 40, "b": 2})
CALL = [(user("w"), writes(SUM)), (RESULTS, "It is 42.")]
THOUGHTS = [(user("w"), writes(SUM, reasoning="hm, 40")), (RESULTS, writes(content="42", reasoning="so"))]
SCENARIOS: dict[str, tuple[list[Step], Sequence[Mapping[str, Any]]]] = {
    "plain": ([(user("hi"), "hello there")], ()),
    "two questions": ([([{"role": "system", "content": "Be brief."}, *user("hi")], "hello"), (user("more"), "ok")], ()),
    "a call": (CALL, TOOLS),
    "parallel calls": ([(user("w"), writes(SUM, CITY)), (RESULTS, "It is 21.")], TOOLS),
    "text before a call": ([(user("w"), writes(CITY, content="Let me see.")), (RESULTS, "It is 21.")], TOOLS),
    "compact JSON": ([(user("w"), writes(SUM, compact=True)), (RESULTS, "It is 42.")], TOOLS),
    "a number like 1.10": ([(user("w"), lambda c: _text(writes(("add", {"a": 7})), c, "7", "1.10"))], TOOLS),
    "white space": ([(user("w"), "  hello  \n"), (user("x"), "\n bye ")], ()),
    "thoughts about a call": (THOUGHTS, TOOLS),
    "earlier thoughts": (
        [(user("w"), writes(content="3", reasoning="so 3")), (user("again"), writes(content="4", reasoning="and 4"))],
        (),
    ),
    "parts": ([(user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), "hello")], ()),
    "a control token": ([(user("say <|im_end|>, <|eot_id|>, </s> or <|user|>"), "hello")], ()),
    "a call from elsewhere": (
        [
            (
                [
                    *user("w"),
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {"id": "aaaaaaaa1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
                        ],
                    },
                    {"role": "tool", "tool_call_id": "aaaaaaaa1", "name": "add", "content": "3"},
                ],
                "3",
            )
        ],
        TOOLS,
    ),
}


def _text(reply: Reply, speaks: ChatCodec, old: str, new: str) -> str:
    return (reply if isinstance(reply, str) else reply(speaks)).replace(old, new)


def play(name: str, kwargs: Mapping[str, Any], steps: Sequence[Step], tools: Sequence[Mapping[str, Any]]) -> Episode:
    """An episode whose model says these replies, through the real codec."""
    made, speaks = tokenizer(name), codec(name, not kwargs)
    conversation, messages, turns = speaks.conversation(), list[dict[str, Any]](), list[Turn]()
    for index, (new, reply) in enumerate(steps):
        messages += _results(messages) if new is RESULTS else new
        encoded = conversation.encode(messages, tools)
        text = reply if isinstance(reply, str) else reply(speaks)
        calls = "<|channel|>commentary" in text or "<|observation|>" in text
        end = speaks.stop_token_ids[1 if calls and len(speaks.stop_token_ids) > 1 else 0]
        ids = [*made.encode(text, add_special_tokens=False), end]
        generation = Generation(
            prompt_ids=tuple(encoded.prompt_ids),
            response_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            finish_reason=FinishReason.STOP,
            policy_version=0,
        )
        message = conversation.accept(encoded, generation, index)
        messages.append(message)
        turns.append(
            Turn(
                index=index,
                agent="default",
                generation=generation,
                continues=encoded.continues,
                request=encoded.request,
                tools=encoded.tools,
                message=message,
            )
        )
    return Episode(
        workflow_task=WorkflowTask(task=Task(task_id="t"), episode_id=f"e-{name}", group_id="g", attempt=0),
        turns=tuple(turns),
        output=WorkflowOutput(reward=1.0),
        verdict=JudgeOutput(reward=1.0, is_success=True),
        reward_source="workflow",
        stop_reason=StopReason.COMPLETED,
    )


def _results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    calls = messages[-1].get("tool_calls", ())
    return [{**RESULTS[0], "tool_call_id": c["id"], "name": c["function"]["name"]} for c in calls]


def called(name: str, episode: Episode) -> Episode:
    return replace(episode, workflow_task=replace(episode.workflow_task, episode_id=name))


def fitted(name: str, kwargs: Mapping[str, Any], episode: Episode) -> list[Conversation]:
    fitter = Fitter(tokenizer(name), codec(name, not kwargs))
    return [fitter.fitted(chat) for chat in conversations(episode)]


def renders_exactly(name: str, kwargs: Mapping[str, Any], chat: Conversation) -> bool:
    """Whether transformers itself renders the recorded text, and white space after it."""
    last, made = chat.path[-1].generation, tokenizer(name)
    recorded = made.decode([*last.prompt_ids, *last.response_ids], clean_up_tokenization_spaces=False)
    messages = json.loads(json.dumps(chat.messages))
    text = made.apply_chat_template(messages, tools=list(chat.tools) or None, tokenize=False, **kwargs)
    return bool(text.startswith(recorded) and not text[len(recorded) :].strip())


EXACT: list[tuple[str, Mapping[str, Any], str]] = [
    *((name, {}, "plain") for name in ("qwen2.5", "hermes", "deepseek-v3", "mistral-nemo", "llama-3.2", "gemma-3")),
    *((name, {}, "two questions") for name in ("qwen2.5", "deepseek-v3.1", "r1-distill", "llama-3.1", "gemma-3")),
    *((name, {}, "a call") for name in ("qwen2.5", "hermes", "mistral-nemo", "mistral-small-3.2", "llama-3.1")),
    *((name, {}, "parallel calls") for name in ("qwen2.5", "hermes", "mistral-nemo", "mistral-small-3.2")),
    *((name, NO_THINKING, "parallel calls") for name in ("qwen3", "qwen3.5")),
    *((name, {}, "text before a call") for name in ("qwen2.5", "mistral-nemo")),
    *((name, {}, "compact JSON") for name in ("qwen2.5", "hermes", "llama-3.1", "llama-3.2")),
    ("qwen3", NO_THINKING, "compact JSON"),
    ("qwen2.5", {}, "a number like 1.10"),
    ("qwen2.5", {}, "white space"),
    ("deepseek-v3", {}, "white space"),
    ("qwen3", {}, "thoughts about a call"),
    ("qwen3.5", {}, "thoughts about a call"),
    ("qwen2.5", {}, "earlier thoughts"),
    ("qwen2.5", {}, "parts"),
    ("mistral-nemo", {}, "a call from elsewhere"),
    ("llama-3.1", {}, "a call from elsewhere"),
]
"""Family, template variables and scenario of which the messages can render to the recorded text."""


@table("name, kwargs, scenario", EXACT)
def test_messages_render_to_the_recorded_text(name: str, kwargs: Mapping[str, Any], scenario: str) -> None:
    steps, tools = SCENARIOS[scenario]
    for chat in fitted(name, kwargs, play(name, kwargs, steps, tools)):
        assert (chat.difference, chat.same_tokens) == ("", True)
        assert renders_exactly(name, kwargs, chat)


@table("name", sorted(FAMILIES))
def test_a_row_without_a_difference_renders_to_the_recorded_text(name: str) -> None:
    seen = 0
    for kwargs in ({}, NO_THINKING) if "enable_thinking" in jinja(name) else ({},):
        for steps, tools in SCENARIOS.values():
            if tools and not codec(name, not kwargs).template.renders_tools:
                continue
            if tools is TOOLS and FAMILIES[name]["calls"] in ("Llama", "harmony") and len(steps) == 2:
                steps = CALL  # one call in a reply
            for chat in fitted(name, kwargs, play(name, kwargs, steps, tools)):
                seen += 1
                if not chat.difference:
                    assert renders_exactly(name, kwargs, chat), (name, kwargs, steps)
                elif "control token" not in chat.difference:
                    assert not renders_exactly(name, kwargs, chat), chat.difference
    assert seen >= 6


@table(
    "name, kwargs, scenario, where",
    [
        ("qwen3", {}, "earlier thoughts", "messages[1]"),
        ("qwen3", NO_THINKING, "two questions", "messages[2]"),
        ("qwen3.5", {}, "earlier thoughts", "removes the reasoning of earlier replies"),
        ("deepseek-v3", {}, "earlier thoughts", "messages[1]"),
        ("r1-distill", {}, "earlier thoughts", "messages[1]"),
        ("glm-4.5", {}, "plain", "messages[1]"),
        ("gpt-oss", {}, "plain", "messages[1]"),
        ("llama-3.1", {}, "white space", "messages[1]"),
        ("gemma-3", {}, "white space", "messages[1]"),
        ("mistral-small-3.2", {}, "compact JSON", "messages[1]"),
        ("qwen2.5", {}, "a control token", "control token"),
        ("llama-3.1", {}, "a control token", "control token"),
    ],
)
def test_a_row_that_cannot_be_rendered_says_where(
    name: str, kwargs: Mapping[str, Any], scenario: str, where: str
) -> None:
    steps, tools = SCENARIOS[scenario]
    (chat,) = fitted(name, kwargs, play(name, kwargs, steps, tools))
    assert where in chat.difference


def test_a_reply_that_was_cut_off_has_no_end_token() -> None:
    episode = play("qwen2.5", {}, [(user("hi"), "hello")], ())
    (turn,) = episode.turns
    made = turn.generation
    cut = replace(made, response_ids=made.response_ids[:-1], logprobs=made.logprobs[:-1])
    (chat,) = fitted("qwen2.5", {}, replace(episode, turns=(replace(turn, generation=cut),)))
    assert "has no end token" in chat.difference


def test_calls_stay_calls_with_arguments_as_objects() -> None:
    for name in ("qwen2.5", "hermes", "mistral-nemo"):
        (chat,) = fitted(name, {}, play(name, {}, *SCENARIOS["parallel calls"]))
        assert [c["function"]["arguments"] for c in chat.messages[1]["tool_calls"]] == [SUM[1], CITY[1]]


# ---- the files -------------------------------------------------------------------------------------------------------


def run_folder(folder: Path, name: str, kwargs: Mapping[str, Any], episodes: Sequence[Episode]) -> Path:
    tokenizer(name).save_pretrained(str(folder / "model"))
    overrides = [f"astuner.model.path={folder / 'model'}"]
    overrides += [f"astuner.model.chat_template_kwargs={json.dumps(dict(kwargs))}"] if kwargs else []
    config = fake_config(folder, overrides=overrides)
    run = folder / "run"
    log = EpisodeLogWriter(run / "episodes")
    for episode in episodes:
        log.episode(1, episode)
    log.close()
    (run / "resolved.yaml").write_text(config.dump_yaml(), encoding="utf-8")
    return run


def export(run: Path, to: str, *options: str) -> list[dict[str, Any]]:
    out = run.parent / f"{to}.jsonl"
    with pytest.raises(SystemExit) as e:
        main(["export", str(run), "--to", to, "--out", str(out), "--force", *options])
    assert not e.value.code
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def test_the_file_and_the_summary_state_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episodes = [called(each, play("qwen3", NO_THINKING, *SCENARIOS[each])) for each in ("plain", "two questions")]
    run = run_folder(tmp_path, "qwen3", NO_THINKING, episodes)
    rows = export(run, "sft", "--json")
    assert [bool(row["difference"]) for row in rows] == [False, True]
    assert all(row["chat_template_kwargs"] == NO_THINKING for row in rows)
    said = json.loads(capsys.readouterr().out)
    assert (said["rows"], said["differing"]) == (2, 1)
    assert said["first_difference"] == rows[1]["difference"]


def test_without_the_runs_tokenizer_rows_say_that_they_were_not_compared(tmp_path: Path) -> None:
    run = run_folder(tmp_path, "qwen2.5", {}, [play("qwen2.5", {}, *SCENARIOS["a call"])])
    (run / "resolved.yaml").unlink()
    (row,) = export(run, "sft")
    assert row["difference"].startswith("not compared")
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == SUM[1]


def test_a_pair_has_arguments_as_objects(tmp_path: Path) -> None:
    better = play("qwen2.5", {}, *SCENARIOS["a call"])
    worse = play("qwen2.5", {}, [(user("w"), writes(CITY)), (RESULTS, "It is 21.")], TOOLS)
    worse = replace(called("other", worse), verdict=JudgeOutput(reward=0.0))
    run = run_folder(tmp_path, "qwen2.5", {}, [better, worse])
    (row,) = export(run, "dpo")
    assert (row["difference"], row["same_tokens"]) == ("", True)
    assert row["chosen"][0]["tool_calls"][0]["function"]["arguments"] == SUM[1]
    assert row["rejected"][0]["tool_calls"][0]["function"]["arguments"] == CITY[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_trl_trains_the_ids_that_the_engine_saw(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    scenarios = ("plain", "a call", "parallel calls", "compact JSON", "parts")
    episodes = [called(each, play("qwen3", NO_THINKING, *SCENARIOS[each])) for each in scenarios]
    run = run_folder(tmp_path, "qwen3", NO_THINKING, episodes)
    rows, tokens = export(run, "sft"), export(run, "tokens")
    assert [row["difference"] for row in rows] == [""] * len(scenarios)
    data = datasets.load_dataset(
        "json", data_files=str(tmp_path / "sft.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    made = tokenizer("qwen3")
    config = Qwen2Config(
        vocab_size=len(made), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16,
    )  # fmt: skip
    settings = SFTConfig(output_dir=str(tmp_path / "trl"), max_length=8192, report_to=[], use_cpu=True, bf16=False)
    trainer = SFTTrainer(model=Qwen2ForCausalLM(config), processing_class=made, train_dataset=data, args=settings)
    for trained, recorded in zip(trainer.train_dataset, tokens, strict=True):
        ids = recorded["input_ids"]
        assert trained["input_ids"][: len(ids)] == ids
        assert not made.decode(trained["input_ids"][len(ids) :]).strip()
