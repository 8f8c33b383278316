"""The tiny model: its template and tokenizer are what they claim, it is re-made from its script, and it starts low."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import random
import re
import subprocess
import sys
import types
import unicodedata
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from astuner import ModelTuner
from astuner.chat.codec import ChatCodec
from astuner.chat.template import ChatTemplate
from astuner.config.schema import AstunerSection
from astuner.contracts.types import SamplingParams
from astuner.plugins.loader import load_plugins
from astuner.rollout.models import one_model
from astuner.rollout.turns import EpisodeRecorder
from astuner.testing import FakeEngine, workflow_task
from astuner_local.plugin import locate_model
from astuner_local.tiny import make
from astuner_local.tiny import tokenizer as bpe
from astuner_local.tiny.problems import (
    LARGEST,
    OPERATORS,
    SMALLEST,
    WORDINGS,
    distinct,
    draw,
    evaluate,
    is_held_out,
)
from astuner_local.tiny.transcripts import SYSTEM_PROMPT, TOOLS, transcript
from astuner_local.tiny.warmup import IGNORED, build_model, encode, warm_up

from ._played import play

EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent"
MODEL = Path(str(locate_model("tiny-calculator")))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def load_tokenizer():
    """For property tests, which take no fixtures."""
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def tokenizer():
    return load_tokenizer()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL)


# --- finding it -----------------------------------------------------------------------------------------------------


def test_locating_imports_nothing_heavy():
    code = (
        "import sys; from astuner_local.plugin import locate_model; "
        "assert locate_model('tiny-calculator') and locate_model('Qwen/Qwen2.5-0.5B-Instruct') is None; "
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_is_small_enough_to_ship(model):
    assert sum(file.stat().st_size for file in MODEL.iterdir()) < 4 * 2**20
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.eos_token_id == 2


# --- problems -------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), held_out=st.booleans())
def test_a_problem_is_on_its_side_of_the_split_and_its_answer_follows_from_its_words(seed, held_out):
    problem = draw(random.Random(seed), held_out=held_out)
    assert is_held_out(problem.wording, problem.a, problem.b) is held_out
    numbers = [int(n) for n in re.findall(r"\d+", problem.question)]
    assert sorted(numbers) == sorted([problem.left, problem.right])
    value = eval(f"{problem.left} {problem.operator} {problem.right}")
    assert value == int(value) >= 0
    assert problem.as_gsm8k()["answer"].endswith(f"#### {int(value)}")


def test_about_a_fifth_of_the_triples_is_held_out_in_every_wording():
    numbers = range(SMALLEST, LARGEST + 1)
    for wording in range(len(WORDINGS)):
        triples = [is_held_out(wording, a, b) for a in numbers for b in numbers]
        assert 0.1 < sum(triples) / len(triples) < 0.3


def test_every_operation_has_as_many_wordings():
    assert {operator: sum(o == operator for o, _ in WORDINGS) for operator in OPERATORS} == dict.fromkeys(OPERATORS, 2)


def test_the_example_data_is_what_the_script_makes(tmp_path):
    train, held_out = make.make_tasks(tmp_path, seed=0)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (EXAMPLE / "data" / name).read_bytes()
    assert len(train) >= 1500
    assert len(held_out) >= 256
    assert not {(p.wording, p.a, p.b) for p in train} & {(p.wording, p.a, p.b) for p in held_out}


def test_the_script_says_how_to_measure_what_it_made(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(make, "warm_up", lambda *_, **__: None)
    make.main(["--out", str(tmp_path / "mine")])
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'mine'}; measure it: astuner eval FILE ")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {p.name for p in (tmp_path / "mine").iterdir()}


def test_the_script_says_what_it_can_make(capsys):
    with pytest.raises(SystemExit):
        make.main([])
    assert "--out DIR, --tasks-out DIR, or both" in capsys.readouterr().err


# --- the chat template ----------------------------------------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "7 * 3"}}}


def test_a_conversation_is_rendered_like_this(tokenizer):
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "21"},
        {"role": "assistant", "content": "\\boxed{21}"},
    ]
    expected = (
        "<|im_start|>system\nS\nTool: calculator(expression)<|im_end|>\n"
        "<|im_start|>user\nQ<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "7 * 3"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{21}<|im_end|>\n"
    )
    assert tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False) == expected
    as_text = {**CALL, "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])}}
    messages[2] = {"role": "assistant", "content": None, "tool_calls": [as_text]}
    assert tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False) == expected


_words = st.text(st.characters(codec="utf-8", exclude_characters="<|"), max_size=12).map(str.strip)
_turn = st.one_of(
    _words.map(lambda text: [{"role": "user", "content": text}]),
    _words.map(lambda text: [{"role": "assistant", "content": text}]),
    st.tuples(_words, st.lists(_words, min_size=1, max_size=3)).map(
        lambda t: [
            {"role": "assistant", "content": t[0], "tool_calls": [CALL] * len(t[1])},
            *({"role": "tool", "content": result} for result in t[1]),
        ]
    ),
)
_conversation = st.tuples(_words, st.lists(_turn, min_size=1, max_size=5)).map(
    lambda t: [
        {"role": "system", "content": t[0]},
        {"role": "user", "content": "q"},
        *(message for turn in t[1] for message in turn),
    ]
)


@given(messages=_conversation)
def test_the_template_only_ever_appends(messages):
    tokenizer = load_tokenizer()
    whole = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(
                messages[:turn], tools=TOOLS, tokenize=False, add_generation_prompt=True
            )
            assert whole.startswith(prompt)


@given(messages=_conversation)
def test_apart_from_the_tools_it_renders_as_qwen25_does(messages):
    folder = Path(str(importlib.util.find_spec("trl").origin)).parent / "chat_templates"
    qwen = (folder / "qwen2_5.jinja").read_text(encoding="utf-8")
    tokenizer = load_tokenizer()
    ours, theirs = (
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, chat_template=template)
        for template in (None, qwen)
    )
    assert ours == theirs


def test_the_chat_codec_can_extend_conversations_with_it(tokenizer):
    template = ChatTemplate(tokenizer)
    assert template.incremental
    assert template.renders_tools


# --- the tokenizer --------------------------------------------------------------------------------------------------


@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_survives_the_tokenizer(text):
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == unicodedata.normalize("NFC", text)  # Qwen2's tokenizer normalises


def test_transcripts_are_short_and_encode_the_same_by_turns_and_as_a_whole(tokenizer):
    rng = random.Random(1)
    for _ in range(50):
        messages = transcript(draw(rng, held_out=False), rng)
        ids, labels = encode(tokenizer, messages)
        whole = tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)
        assert [*ids, *tokenizer.encode("\n")] == whole
        written = tokenizer.decode([label for label in labels if label != IGNORED]).split("<|im_end|>")
        assert written[0].startswith("<tool_call>\n")
        assert written[1:] == [messages[-1]["content"], ""]
        assert sum(label != IGNORED for label in labels) < 35 < len(ids) < 110


def test_digits_and_the_fixed_parts_of_a_call_are_single_tokens(tokenizer):
    text = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12 * 7"}}\n</tool_call>'
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text)]
    assert pieces == [
        *("<tool_call>", "\n", '{"name": "', "calculator", '", "arguments": {"', "expression", '": "'),
        *("1", "2", " *", " ", "7", '"}}', "\n", "</tool_call>"),
    ]


def test_the_tokenizer_survives_being_saved(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    text = transcript_text(tokenizer)
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.eos_token, again.pad_token) == (bpe.END, bpe.PAD)
    assert again.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>user\nhi<|im_end|>\n"
    )


def transcript_text(tokenizer):
    rng = random.Random(2)
    return tokenizer.apply_chat_template(transcript(draw(rng, held_out=False), rng), tools=TOOLS, tokenize=False)


# --- making it again ------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_remade_byte_for_byte(tmp_path):
    make.make_tokenizer(tmp_path, seed=0)
    for file in sorted(tmp_path.iterdir()):
        assert file.read_bytes() == (MODEL / file.name).read_bytes(), file.name
    assert {f.name for f in MODEL.iterdir()} == {f.name for f in tmp_path.iterdir()} | {
        "config.json",
        "model.safetensors",
    }


@pytest.mark.slow
def test_warm_up_is_deterministic_and_learns(tokenizer):
    def run(seed):
        model = build_model(tokenizer, seed)
        losses = []
        warm_up(model, tokenizer, steps=12, seed=seed, report=lambda step, loss: losses.append(loss))
        return model.state_dict(), losses

    (first, losses), (second, _) = run(0), run(0)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert losses[-1] < 0.7 * losses[0]
    assert not torch.equal(first["lm_head.weight"], build_model(tokenizer, 1).state_dict()["lm_head.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_the_shipped_model_writes_well_and_understands_nothing(model, tokenizer, temperature):
    played = play(model, tokenizer, list(distinct(256, 0, held_out=True)), temperature=temperature)
    assert fmean(p.well_formed for p in played) > 0.8
    assert (0.05 if temperature else 0.0) < fmean(p.success for p in played) < 0.40
    assert max(p.prompt_tokens for p in played) < 60


# --- the real agent -------------------------------------------------------------------------------------------------


def example_workflow():
    spec = importlib.util.spec_from_file_location("math_agent_example", EXAMPLE / "workflow.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rendered(tokenizer, messages, *, prompt):
    return tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=prompt)


def replies_of(tokenizer, messages):
    """The assistant's messages of a transcript, as the text that the model generates."""
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            text = rendered(tokenizer, messages[: number + 1], prompt=False)
            yield text.removeprefix(rendered(tokenizer, messages[:number], prompt=True)).removesuffix("<|im_end|>\n")


async def play_example(workflow, engine, question):
    """Play the example's workflow with this engine; return its output and the tools that the model was offered."""
    config = types.SimpleNamespace(
        astuner=AstunerSection.model_validate({"model": {"path": "fake"}}), plugins=load_plugins()
    )
    recorder, task = EpisodeRecorder(), workflow_task(question)
    tuner = ModelTuner(
        models=one_model(engine, ChatCodec(engine.tokenizer)),
        recorder=recorder,
        sampling=SamplingParams(max_tokens=1000),
        config=config,
        workflow_task=task,
    )
    output = await workflow.execute(task, tuner)
    return output, list(recorder.turns[0].tools)


def test_the_transcripts_are_what_the_real_agent_sends(tokenizer):
    module = example_workflow()
    assert module.SYSTEM_PROMPT == SYSTEM_PROMPT
    rng = random.Random(3)
    for _ in range(20):
        problem = draw(rng, held_out=False)
        messages = transcript(problem, rng)
        engine = FakeEngine(list(replies_of(tokenizer, messages)), tokenizer)
        output, tools = asyncio.run(play_example(module.MathAgentWorkflow(), engine, problem.question))
        assert output.metadata == {"final_answer": messages[-1]["content"]}
        assert tools == TOOLS
        prompts = [tokenizer.decode(call[0]) for call in engine.calls]
        assert prompts == [rendered(tokenizer, messages[:turn], prompt=True) for turn in (2, 4)]


def test_the_calculator_of_the_transcripts_is_the_examples():
    calculator = example_workflow().calculator
    for left in range(SMALLEST, LARGEST**2 + 1):
        for right in (*range(SMALLEST, LARGEST + 1), left):
            for operator in OPERATORS:
                assert calculator(f"{left} {operator} {right}") == evaluate(left, operator, right)
