"""The example experiment: its workflow drives a real AgentScope agent, its files are valid, its data is readable."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from astuner.builtin.jsonl import JsonlConfig, JsonlTaskReader
from astuner.config.schema import AstunerSection
from astuner.contracts.types import Split
from astuner.testing import check_judge, check_workflow, workflow_task
from astuner_datasets.reader import HuggingFaceConfig
from astuner_math.judges import MathAnswerAsJudge
from tests.table import table

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "math_agent"
CALL = '<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{}"}}}}\n</tool_call>'


@functools.cache
def load_example():
    """The workflow's module; property tests take no fixtures."""
    spec = importlib.util.spec_from_file_location("math_agent_workflow", EXAMPLE / "workflow.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example():
    return load_example()


def reader() -> JsonlTaskReader:
    section = yaml.safe_load((EXAMPLE / "math_agent.yaml").read_text())["astuner"]["task_reader"]["jsonl"]
    return JsonlTaskReader(JsonlConfig.model_validate(section), base_dir=EXAMPLE)


@table(("answer", "reward"), [("\\boxed{21}", 1.0), ("\\boxed{10}", 0.0), ("", 0.0)])
def test_an_episode_calls_the_tool_and_is_judged_by_its_box(example, answer, reward):
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        return answer if "<tool_response>" in prompt else CALL.format("7 * 3")

    task = workflow_task("Mia has 7 boxes with 3 pens in each. How many pens?", answer="7 * 3 = 21\n#### 21")
    output = check_workflow(example.MathAgentWorkflow, task, replies=reply)
    assert output.metadata == {"final_answer": answer}
    answered = [prompt for prompt in prompts if "<tool_response>" in prompt]
    assert len(answered) * 2 == len(prompts)
    assert all("<tool_response>\n21\n</tool_response>" in prompt for prompt in answered)
    assert check_judge(MathAnswerAsJudge(), task, output).reward == reward


def test_a_wrong_expression_is_answered_and_the_agent_goes_on(example):
    replies = [CALL.format("seven times 3"), CALL.format("7 / 0"), "\\boxed{21}"]
    output = check_workflow(example.MathAgentWorkflow, workflow_task(), replies=replies)
    assert output.metadata == {"final_answer": "\\boxed{21}"}


@given(expression=st.text(max_size=60) | st.text("0123456789+-*/(). ", max_size=60))
def test_the_calculator_always_answers_in_one_line_of_text(expression):
    text = load_example().calculator(expression)
    if not text.startswith("error: "):
        number = ast.literal_eval(text)
        assert isinstance(number, int) or math.isfinite(number)  # an exact integer may be beyond a float


@table("expression", ["__import__('os').getpid()", "9**9**9**9", "().__class__", "1;2", "f(3)"])
def test_the_calculator_runs_no_code(example, expression):
    assert example.calculator(expression).startswith("error: ")


@table(("expression", "value"), [("7 * 3", "21"), ("(1 + 2) / 4", "0.75"), ("2 / 3", "0.6667"), ("84 / 12", "7")])
def test_the_calculator_calculates(example, expression, value):
    assert example.calculator(expression) == value


@table(
    ("name", "readers"),
    [("math_agent.yaml", {"jsonl": JsonlConfig}), ("math_agent_qwen.yaml", {"huggingface": HuggingFaceConfig})],
)
def test_the_experiment_files_are_valid_and_every_key_is_known(name, readers):
    tree = yaml.safe_load((EXAMPLE / name).read_text())
    section = tree["astuner"]["task_reader"]
    assert readers.keys() == section.keys() - {"type"} == {section["type"]}
    for reader_name, schema in readers.items():
        schema.model_validate(section[reader_name])
    settings = AstunerSection.model_validate(tree["astuner"])
    assert settings.rollout.workflow == "workflow.py->MathAgentWorkflow"
    assert not set(tree) - {"astuner"}
    assert not settings.rollout.__pydantic_extra__


def test_the_tasks_can_be_read_and_no_held_out_question_is_trained_on():
    train, held_out = (list(reader().read(split)) for split in (Split.TRAIN, Split.VALIDATION))
    assert len(train) >= 1500
    assert len(held_out) >= 256
    assert all(task.metadata["answer"].rpartition("#### ")[2].isdigit() for task in (*train, *held_out))
    assert not {task.main_query for task in train} & {task.main_query for task in held_out}
    assert len({task.main_query for task in train}) == len(train)


@pytest.mark.needs("agentscope-1.0.21")
def test_the_agents_of_agentscope_1_and_2_make_the_same_requests(tmp_path):
    """The tiny model learned one prompt. With equal seeds, equal requests lead to equal replies."""

    def episodes(python, *overrides):
        run_dir = tmp_path / str(len(overrides))
        command = [str(python), "-m", "astuner", "run", str(EXAMPLE / "math_agent.yaml"), "--backbone", "debug"]
        arguments = ["--no-resume", "--run-dir", str(run_dir), *overrides]
        done = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        lines = run_dir.with_name(f"{run_dir.name}.debug").joinpath("episodes/debug.jsonl").read_text().splitlines()
        return {episode["task_id"]: episode for episode in map(json.loads, lines)}

    old = ROOT / ".venv-agentscope-1.0.21" / "bin" / "python"
    ours, theirs = (
        episodes(sys.executable),
        episodes(old, "astuner.rollout.workflow=agentscope1.py->MathAgentWorkflow"),
    )
    assert ours.keys() == theirs.keys()
    for task, episode in ours.items():
        assert (episode["stop_reason"], theirs[task]["stop_reason"]) == ("completed", "completed")
        assert len(episode["turns"]) > 1
        for key in ("tools", "reward"):
            assert episode[key] == theirs[task][key]
        for turn, other in zip(episode["turns"], theirs[task]["turns"], strict=True):
            assert turn["prompt_tokens"] == other["prompt_tokens"]
            assert turn["reply"] == other["reply"]
