"""Cheats against the real AppWorld behind the real service: each scores as a cheat, and none brings the world down.

Except where a test says otherwise the look at the code is switched off (``check_code: false``), so that what holds is
what the processes and the kernel hold.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from astuner.isolation.confine import available
from astuner_appworld.world.guard import objection


def _beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHEATS, SOLUTIONS = _beside("cheats"), _beside("solutions").SOLUTIONS
QUESTION, NO_OP_QUESTION = "a0count_1", 1 / 2
WRITING, NO_OP_WRITING = "c0write_1", 1 / 3

needs_confinement = pytest.mark.skipif(
    bool(available().missing), reason=f"this kernel does not confine completely: {available()}"
)


@pytest.fixture
def fill(root, service_url):
    """Tell a cheat what it could know at most."""

    def fill(code, task):
        truth = root / "data" / "tasks" / task / "ground_truth"
        known = {"task": task, "truth": truth, "root": root, "port": urlsplit(service_url).port}
        for name, value in known.items():
            code = code.replace(f"{{{name}}}", str(value))
        return code.replace("{{", "{").replace("}}", "}")

    return fill


@needs_confinement
def test_stealing_finds_nothing(play, fill):
    """One after the other in one episode: each finishes the task if it comes by anything."""
    codes = [fill(CHEATS.stealing(cheat), QUESTION) for cheat in CHEATS.STEAL]
    played = play(QUESTION, *codes, "print('still here')", check_code=False)
    for cheat, step in zip(CHEATS.STEAL, played.steps, strict=False):
        assert "STOLEN" not in step.observation, cheat
        assert "Execution failed" in step.observation, cheat
    assert "still here" in played.steps[-1].observation
    assert played.evaluation.success is False
    assert played.evaluation.score == pytest.approx(NO_OP_QUESTION)


@needs_confinement
@pytest.mark.parametrize("cheat", CHEATS.TAMPER)
def test_tampering_changes_nothing(play, fill, cheat):
    played = play(WRITING, fill(CHEATS.TAMPER[cheat], WRITING), check_code=False)
    for boast in ("the private routes answered", "accepted", "the token was taken", "called from a thread"):
        assert boast not in played.seen
    assert played.evaluation.success is False
    assert played.evaluation.score == pytest.approx(NO_OP_WRITING)
    labels = [test["label"] for test in played.evaluation.details["passes"]]
    assert labels == ["no_op_pass"]


@needs_confinement
@pytest.mark.parametrize("cheat", CHEATS.ESCAPE)
def test_bringing_down_the_shell_costs_the_variables_only(play, cheat):
    codes = ("kept = 1", CHEATS.ESCAPE[cheat], SOLUTIONS["c0write"])
    played = play(WRITING, *codes, check_code=False, timeout=2)
    assert not played.steps[1].is_over
    assert "sent to" not in played.seen
    assert played.evaluation.success is True


@needs_confinement
def test_a_lost_shell_is_said_and_what_was_done_stays(play):
    write, _, finish = SOLUTIONS["c0write"].rpartition("apis.supervisor")
    codes = (write, '__import__("os").abort()', "print(notes)", "apis.supervisor" + finish)
    played = play(WRITING, *codes, check_code=False)
    assert "it ended the Python process it ran in" in played.steps[1].observation
    assert "what you did in the apps stays done" in played.steps[1].observation
    assert played.steps[1].info["restarts"] == 1
    assert "NameError" in played.steps[2].observation
    assert played.evaluation.success is True


def test_endless_code_is_stopped_and_the_episode_goes_on(play):
    played = play(QUESTION, CHEATS.ESCAPE["swallowing the limit of time"], SOLUTIONS["a0count"], timeout=1)
    assert "it ran for more than 1 seconds and was stopped" in played.steps[0].observation
    assert played.evaluation.success is True


def test_a_cheat_that_is_recognised_is_not_run_and_told_so(play, fill):
    tampering = [name for name in CHEATS.TAMPER if name not in ("a call that asks for what only the package may",)]
    cheats = [CHEATS.stealing(name) for name in CHEATS.STEAL] + [CHEATS.TAMPER[name] for name in tampering]
    played = play(WRITING, *(fill(code, WRITING) for code in cheats))
    for code, step in zip(cheats, played.steps, strict=True):
        assert "This code was not run" in step.observation, code
    assert played.evaluation.score == pytest.approx(NO_OP_WRITING)


def test_no_solution_is_taken_for_a_cheat():
    assert all(objection(code) is None for code in SOLUTIONS.values())


STOCK = """
import json, sys
from appworld import AppWorld
world = AppWorld(task_id=sys.argv[1], experiment_name="stock")
world.execute(sys.argv[2])
tracker = world.evaluate()
print(json.dumps([len(tracker.passes), tracker.num_tests]))
"""


@pytest.mark.parametrize("cheat", ["the task's own ground truth", "the answer's file, by pathlib"])
def test_the_same_cheats_work_on_the_package_as_it_is(appworld_python, root, fill, tmp_path, cheat):
    """So that the tests above are about something."""
    own = tmp_path / "stock"
    own.mkdir()
    (own / "data").symlink_to(root / "data")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "APPWORLD_ROOT": str(own)}
    code = fill(CHEATS.stealing(cheat), QUESTION)
    done = subprocess.run(
        [appworld_python, "-W", "ignore", "-c", STOCK, QUESTION, code],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    passes, tests = json.loads(done.stdout.splitlines()[-1])
    assert passes == tests


WORLD_FAILS = """
import os, signal, sys
from astuner.types import Task
from astuner_appworld.world.environment import AppWorldEnvironment
from astuner_appworld.world.session import WorldFailed
environment = AppWorldEnvironment({})
environment.reset(Task(task_id=sys.argv[1]))
os.kill(environment._session._apps.pid, signal.SIGKILL)
try:
    environment.step({"content": "```python\\nx = 1\\n```"})
except WorldFailed as error:
    print("raised", error)
folder = environment._folder
environment.close()
print(folder.exists())
"""


WORLD_IS_BROUGHT_DOWN = """
import os, signal, sys
from astuner.types import Task
from astuner_appworld.world.environment import AppWorldEnvironment
environment = AppWorldEnvironment({})
environment.reset(Task(task_id=sys.argv[1]))
session = environment._session
pass_on = session._pass_on
def too_much(call):
    os.kill(session._apps.pid, signal.SIGKILL)
    return pass_on(call)
session._pass_on = too_much
step = environment.step({"content": "```python\\napis.supervisor.show_profile()\\n```"})
print(step.terminated, step.truncated, step.info["world_lost"], "more than the apps could bear" in step.observation)
print(environment.evaluate().score, environment.evaluate().success)
os.unlink(os.path.join(environment._folder, "world", "experiments", "outputs", "run", "tasks", sys.argv[1],
                       "dbs", "supervisor.jsonl"))
print(environment.evaluate().success)
environment.close()
"""


def _script(appworld_python, root, tmp_path, code):
    """The lines that ``code`` prints in AppWorld's interpreter."""
    source = [str(Path(sys.modules[name].__file__).parents[1]) for name in ("astuner", "astuner_appworld")]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    environ |= {"APPWORLD_ROOT": str(root), "PYTHONPATH": os.pathsep.join(source)}
    command = [appworld_python, "-W", "ignore", "-c", code, QUESTION]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_world_that_fails_by_itself_is_no_score(appworld_python, root, tmp_path):
    said, left = _script(appworld_python, root, tmp_path, WORLD_FAILS)[-2:]
    assert said.startswith("raised the world of a0count_1 failed to begin")
    assert left == "False"


def test_a_world_that_a_call_brings_down_is_scored_as_it_stood(appworld_python, root, tmp_path):
    ended, score, broken = _script(appworld_python, root, tmp_path, WORLD_IS_BROUGHT_DOWN)[-3:]
    assert ended == "False True True True"
    assert score == f"{NO_OP_QUESTION} False"
    assert broken == "False"
