"""The plugin: its names, its reader, its workflow with a scripted model on AgentScope 1.x or 2.x, and a run."""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from astuner import StopReason
from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import DataError
from astuner.contracts.types import SamplingParams, Split, Task, WorkflowTask
from astuner.plugins.loader import load_plugins
from astuner.plugins.registry import find_provider
from astuner.rollout.models import one_model
from astuner.rollout.parts import build_task_reader
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import FakeEngine, check_plugin, fake_config, make_tokenizer
from astuner_appworld.synthetic.__main__ import FAMILIES, SPLITS, task_id
from tests.table import table

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # AgentScope's dependencies warn while they are imported
    pytest.importorskip("agentscope")
    import agentscope.agent  # noqa: F401

REPOSITORY = Path(__file__).resolve().parents[3]
SEED = "tutorial.example_appworld.appworld->ExampleAgentScopeLearnProtocol"


def _beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SOLUTIONS = _beside("solutions").SOLUTIONS


def test_the_plugin_keeps_the_contract():
    assert check_plugin("appworld").dist == "astuner-appworld"


@table(
    ("kind", "spelling", "name"),
    [
        ("workflow", "appworld", "AppWorldWorkflow"),
        ("workflow", SEED, "AppWorldWorkflow"),
        ("workflow", "tutorial/appworld.py->ExampleAgentScopeLearnProtocol", "AppWorldWorkflow"),
        ("judge", "appworld", "AppWorldJudge"),
        ("task reader", "appworld", "AppWorldTaskReader"),
        ("environment", "appworld", "AppWorldEnvironment"),
    ],
)
def test_every_spelling_resolves(kind, spelling, name):
    module, _, attribute = find_provider(load_plugins(), kind, spelling).target.partition(":")
    assert attribute == name
    assert functools.reduce(getattr, [attribute], importlib.import_module(module)).__name__ == name


def test_describing_the_plugin_imports_nothing_heavy():
    code = (
        "import sys; from astuner.plugins.loader import load_plugins;"
        "offering = [p.name for p in load_plugins().plugins if p.name == 'appworld' and p.provides];"
        "print({'agentscope', 'pydantic', 'torch'} & set(sys.modules), offering)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() ['appworld']"


def _config(folder, url, judge="appworld", workflow="appworld", more=""):
    return fake_config(
        folder,
        f"""\
  env_service:
    url: {url}
  task_reader:
    type: appworld
  task_judge:
    judge: {judge}
  rollout:
    workflow: {workflow}
    max_retries: 0
    multi_turn:
      max_steps: 4
{more}""",
    )


def _episode(config, replies, name):
    tokenizer = make_tokenizer()
    engine = FakeEngine(replies, tokenizer)
    task = WorkflowTask(task=Task(task_id=name, env_type="appworld"), episode_id="e", group_id="g")
    run = EpisodeRunner(config).run(task, one_model(engine, ChatCodec(tokenizer)), SamplingParams(max_tokens=3000))
    return asyncio.run(run), [tokenizer.decode(call[0]) for call in engine.calls]


@table("workflow", ["appworld", SEED])
def test_a_scripted_agent_is_rewarded(tmp_path, service_url, workflow):
    replies = [
        "Let me look.\n```python\nprint(apis.supervisor.show_active_task()['instruction'])\n```",
        "I should think first.",
        f"```python\n{SOLUTIONS['c0write']}\n```",
    ]
    episode, prompts = _episode(_config(tmp_path, service_url, workflow=workflow), replies, "c0write_1")
    assert (episode.stop_reason, episode.error) == (StopReason.COMPLETED, "")
    assert (episode.reward, episode.is_success) == (1.0, True)
    assert episode.verdict.metrics == {"pass_fraction": 1.0, "no_op_adjusted": 1.0, "task_completed": 1.0}
    assert episode.output.metadata == {"terminated": True}
    assert episode.output.metrics == {"env_steps": 3.0}
    assert "Ada Quill" in prompts[0]
    assert "The task: Add a note with the title 'Groceries 0'" in prompts[0]
    assert "Output:\n```\nAdd a note with the title 'Groceries 0' to Simple Note.\n```" in prompts[1]
    assert "No code was found in your message" in prompts[2]


def test_an_agent_that_never_finishes_is_judged_as_it_stands(tmp_path, service_url):
    section = "  trainer_common:\n    total_steps: 1\n"
    config = _config(tmp_path, service_url, more=section)
    episode, prompts = _episode(config, ["```python\nx = 1\n```"] * 4, "c0write_1")
    assert len(prompts) == 4
    assert (episode.reward, episode.is_success) == (0.0, False)
    assert episode.output.metadata == {"terminated": False}
    assert episode.verdict.metrics["pass_fraction"] == pytest.approx(1 / 3)


def test_the_first_documents_judge_reads_the_share_of_tests(tmp_path, service_url):
    config = _config(tmp_path, service_url, judge='"astuner.task_judge.env_service_as_judge->EnvServiceJudge"')
    episode, _ = _episode(config, ["```python\napis.supervisor.complete_task()\n```"], "a0count_1")
    assert (episode.reward, episode.is_success) == (0.5, False)


def test_the_reader_yields_the_splits(tmp_path, service_url):
    reader = build_task_reader(_config(tmp_path, service_url))
    for split, people in ((Split.TRAIN, SPLITS["train"]), (Split.VALIDATION, SPLITS["dev"])):
        tasks = list(reader.read(split))
        assert [task.task_id for task in tasks] == [task_id(f, person) for person in people for f in FAMILIES]
        assert {task.env_type for task in tasks} == {"appworld"}


def test_a_split_that_is_not_there_is_named(tmp_path, service_url):
    config = fake_config(
        tmp_path,
        f"  env_service:\n    url: {service_url}\n"
        "  task_reader:\n    type: appworld\n    appworld:\n      training_split: tran\n      validation_split: null\n",
    )
    reader = build_task_reader(config)
    assert list(reader.read(Split.VALIDATION)) == []
    with pytest.raises(DataError, match="unknown split 'tran'"):
        list(reader.read(Split.TRAIN))


def test_the_example_runs_with_its_service(tmp_path, service_home, monkeypatch):
    from astuner import run

    monkeypatch.setenv("ASTUNER_HOME", str(service_home))
    overrides = [f"astuner.experiment_dir={tmp_path}"]
    example = REPOSITORY / "examples" / "appworld" / "appworld.yaml"
    result = run(example, overrides, backbone="debug", services=["appworld"])
    told = (result.run_dir / "run.log").read_text(encoding="utf-8")
    assert "a0count_1: " in told
    assert "No code was found in your message" in told
