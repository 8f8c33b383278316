"""The plugin is found, describes itself without importing anything heavy, and every spelling resolves."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from astuner.plugins import PluginManager
from astuner.registry import find
from astuner_math import plugin

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
    return PluginManager(builtin=[("math", plugin)])


@pytest.mark.parametrize(("kind", "spelling", "name"), SPELLINGS)
def test_every_spelling_resolves(manager, kind, spelling, name):
    provider = find(manager, kind, spelling)
    module, _, attribute = provider.target.partition(":")
    assert attribute == name
    assert getattr(importlib.import_module(module), attribute).__name__ == name
    config_module, _, config = provider.config.partition(":")
    fields = getattr(importlib.import_module(config_module), config).model_fields
    assert all(field.description for field in fields.values())


def test_describing_imports_nothing_heavy():
    heavy = "{'math_verify', 'sympy', 'agentscope', 'torch', 'openai', 'asyncio'}"
    code = (
        "import sys, astuner_math.plugin as p; p.register_judges(); p.register_workflows();"
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_judge_imports_neither_sympy_nor_math_verify():
    code = "import sys, astuner_math.llm_judge; print(sorted({'math_verify', 'sympy', 'openai'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
