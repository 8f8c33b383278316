"""docs/environments.md names every route, refusal, metric and option that there is, and none besides."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from astuner import Task, WorkflowTask
from astuner.chat.codec import ChatCodec
from astuner.contracts.types import SamplingParams
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.testing import FakeEngine, fake_config, make_tokenizer
from astuner_env.manager.metrics import Metrics
from astuner_env.manager.refusal import STATUS
from astuner_env.server import Routes

from ._cli_kit import astuner

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_environment_of_the_page_is_played_as_the_page_says(tmp_path):
    code = re.search(r"<!-- file: astuner_vault/world.py -->\n```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "world.py").write_text(code[1], encoding="utf-8")
    command = re.search(r"^astuner (env try '\S+' \S+)$", PAGE, re.MULTILINE)
    shown = astuner(*shlex.split(command[1]), "--json", home=tmp_path / "home", stdin="100\n?\n123\n", cwd=tmp_path)
    assert (shown.code, shown.err) == (0, "")
    start, *steps, end = map(json.loads, shown.out.splitlines())
    assert start["task_id"] == "vault-123"
    assert [step["observation"] for step in steps] == [
        "1 of 3 are right.",
        "Say three digits, such as 407.",
        "It opens.",
    ]
    assert (end["reason"], end["reward"], end["evaluation"]["success"]) == ("terminated", 1, True)


def test_the_workflow_of_the_page_plays_an_episode(tmp_path):
    code = re.search(r"```python\n(from astuner import Workflow, WorkflowOutput\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "workflow.py").write_text(code[1], encoding="utf-8")
    config = fake_config(
        tmp_path, "  rollout: {workflow: workflow.py->MyWorkflow}\n  task_judge: {judge: env_service}\n"
    )
    tokenizer = make_tokenizer()
    models = one_model(FakeEngine(lambda prompt: "5", tokenizer), ChatCodec(tokenizer))
    toy = f"{Path(__file__).with_name('toys.py')}->Counter"
    task = WorkflowTask(task=Task(task_id="train-0", env_type=toy), episode_id="e", group_id="g")
    episode = asyncio.run(EpisodeRunner(config).run(task, models, SamplingParams(max_tokens=20)))
    assert episode.error == ""
    assert episode.reward is not None


def table(head):
    """The rows of the table that begins with this head, as lists of cells."""
    rows = PAGE.partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    assert rows, head
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_routes():
    described = [row[0].strip("`") for head in ("| route | needs |", "| route | what it does |") for row in table(head)]
    routes = [f"{route.method} {route.path}" for route in Routes(None, "").all()]
    assert sorted(described) == sorted([*routes, "GET /healthz", "GET /metrics"])


def test_the_refusals():
    described = {}
    for statuses, codes, *_ in table("| status | `code` |"):
        statuses, codes = statuses.split(", "), re.findall(r"`(\w+)`", codes)
        described.update(zip(codes, map(int, statuses * len(codes) if len(statuses) == 1 else statuses), strict=False))
    assert described == STATUS


def test_the_metrics():
    described = {name for row in table("| metric | what it counts |") for name in re.findall(r"`(\w+)`", row[0])}
    text = Metrics(["x"]).render().decode()
    there = {
        re.sub(r"_total$", "", name) for name in re.findall(r"^# TYPE (\w+) (?:counter|gauge|histogram)$", text, re.M)
    }
    twins = {f"{name}_created" for name in there} & there  # when each was first counted
    assert described == there - twins


@pytest.mark.parametrize("command", [["astuner_env", "serve"], ["astuner", "env", "serve"]])
def test_the_options_of_both_ways_to_serve(command):
    described = {name for row in table("| option | meaning |") for name in re.findall(r"`(--[\w-]+)`", row[0])}
    shown = subprocess.run(
        [sys.executable, "-m", *command, "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"(--[a-z-]+)", shown.partition("ptions:")[2])) - {"--help", "--host"} == described - {
        "--host"
    }
    assert "--host" in shown
