"""The plugin is found, describes itself without importing anything heavy, and every spelling resolves."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys

import pytest

from astuner.contracts.types import WorkflowOutput
from astuner.plugins.loader import PluginManager, load_plugins
from astuner.plugins.registry import find_provider
from astuner.testing import check_judge, check_plugin, check_workflow, workflow_task
from astuner_math.judges import MathAnswerAsJudge
from astuner_math.workflow import MathAgentConfig, MathAgentWorkflow
from tests.table import table

SPELLINGS = [
    ("judge", "math_answer", "MathAnswerAsJudge"),
    ("judge", "astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge", "MathAnswerAsJudge"),
    ("judge", "astune.task_judge.math_answer_as_judge->MathAnswerAsJudge", "MathAnswerAsJudge"),
    ("judge", "MathAnswerAsJudge", "MathAnswerAsJudge"),
    ("judge", "math_answer_llm", "MathAnswerAndLlmAsJudge"),
    ("judge", "astuner.task_judge.math_answer_as_judge->MathAnswerAndLlmAsJudge", "MathAnswerAndLlmAsJudge"),
    ("judge", "astune.task_judge.math_answer_as_judge->MathAnswerAndLlmAsJudge", "MathAnswerAndLlmAsJudge"),
    ("workflow", "math_agent", "MathAgentWorkflow"),
    ("workflow", "tutorial.math_agent->MathAgentWorkflow", "MathAgentWorkflow"),
]


@pytest.fixture(scope="module")
def manager() -> PluginManager:
    return load_plugins()


@table(("kind", "spelling", "name"), SPELLINGS)
def test_every_spelling_resolves(manager, kind, spelling, name):
    provider = find_provider(manager, kind, spelling)
    module, _, attribute = provider.target.partition(":")
    assert attribute == name
    assert getattr(importlib.import_module(module), attribute).__name__ == name
    config_module, _, config = provider.config.partition(":")
    fields = getattr(importlib.import_module(config_module), config).model_fields
    assert all(field.description for field in fields.values())


def test_the_plugin_keeps_the_contract():
    assert check_plugin("math").dist == "astuner-math"


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "reward"), [("4", 1.0), ("5", 0.0), ("x+4-x", 1.0)])
def test_the_judge_keeps_the_contract(answer, reward):
    judge = MathAnswerAsJudge()
    output = WorkflowOutput(metadata={"final_answer": rf"\boxed{{{answer}}}"})
    assert check_judge(judge, workflow_task(answer="#### 4"), output).reward == reward
    judge.close()


def test_the_workflow_keeps_the_contract():
    task = workflow_task("What is 6 * 7?", answer="#### 42")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'
    workflow = functools.partial(MathAgentWorkflow, MathAgentConfig(tool="calculator"))
    output = check_workflow(workflow, task, replies=(call, r"\boxed{42}"))
    assert output.metadata["final_answer"] == r"\boxed{42}"


def test_describing_imports_nothing_heavy():
    heavy = "{'math_verify', 'sympy', 'agentscope', 'torch', 'openai'}"
    code = (
        "import sys; from astuner.plugins.loader import load_plugins; assert list(load_plugins().offers('judge'));"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_judge_imports_neither_sympy_nor_math_verify():
    code = "import sys, astuner_math.llm_judge; print(sorted({'math_verify', 'sympy', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
