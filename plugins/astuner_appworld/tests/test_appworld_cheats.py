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

from astuner.plugins.loader import load_plugins
from astuner.plugins.registry import find_provider
from astuner_appworld.world import session as session_module
from astuner_appworld.world.session import MAX_TIMEOUT, Options, Session
from astuner_appworld.world.shell import objection
from tests.table import table


def _beside(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHEATS, SOLUTIONS = _beside("cheats"), _beside("solutions").SOLUTIONS
QUESTION, NO_OP_QUESTION = "a0count_1", 1 / 2
WRITING, NO_OP_WRITING = "c0write_1", 1 / 3

needs_confinement = pytest.mark.needs("confinement")


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
@table("cheat", CHEATS.TAMPER)
def test_tampering_changes_nothing(play, fill, cheat):
    played = play(WRITING, fill(CHEATS.TAMPER[cheat], WRITING), check_code=False)
    for boast in ("the private routes answered", "accepted", "the token was taken", "called from a thread"):
        assert boast not in played.seen
    assert played.evaluation.success is False
    assert played.evaluation.score == pytest.approx(NO_OP_WRITING)
    labels = [test["label"] for test in played.evaluation.details["passes"]]
    assert labels == ["no_op_pass"]


@needs_confinement
@table("cheat", CHEATS.ESCAPE)
def test_bringing_down_the_shell_costs_the_variables_only(play, cheat):
    codes = ("kept = 1", CHEATS.ESCAPE[cheat], SOLUTIONS["c0write"])
    played = play(WRITING, *codes, check_code=False, timeout=5)
    assert not played.steps[1].is_over
    assert "sent to" not in played.seen
    assert played.evaluation.success is True


@table("what", CHEATS.FILL)
def test_filling_the_apps_ends_the_world_as_it_stood(play, what):
    write = SOLUTIONS["c0write"].rpartition("apis.supervisor")[0]
    played = play(WRITING, write, CHEATS.FILL[what], timeout=120)
    assert "more than the apps could bear" in played.steps[1].observation
    assert (played.steps[1].terminated, played.steps[1].truncated) == (False, True)
    assert played.steps[1].info["world_lost"] is True
    assert played.evaluation.success is True  # the note of the first block is there, and nothing else


def test_what_a_block_did_is_gone_with_the_world(play):
    write = SOLUTIONS["c0write"].rpartition("apis.supervisor")[0]
    played = play(WRITING, write + CHEATS.FILL["the disk"])
    assert played.steps[0].info["world_lost"] is True
    assert played.evaluation.success is False
    assert played.evaluation.score == pytest.approx(NO_OP_WRITING)


@table("number", ["nan", "inf"])
def test_a_number_that_is_no_json_is_refused_in_the_call(play, number):
    code = SOLUTIONS["c0write"].replace("complete_task()", f"complete_task(answer=float('{number}'))")
    played = play(WRITING, code, "apis.supervisor.complete_task()")
    assert "complete_task was not called: its arguments are not JSON" in played.steps[0].observation
    assert (played.steps[0].is_over, played.steps[0].info["world_lost"]) == (False, False)
    assert played.steps[1].terminated
    assert played.evaluation.success is True


def test_a_call_carries_a_million_characters_at_most(play):
    long = "apis.simple_note.create_note(access_token='x', title='t', content='x' * 1100000)"
    played = play(QUESTION, long, SOLUTIONS["a0count"])
    assert "its arguments are too large" in played.steps[0].observation
    assert played.evaluation.success is True


def test_calls_that_never_end_do_not_put_off_the_end_of_the_step(monkeypatch, tmp_path):
    options = Options(timeout=2)
    session = Session(tmp_path, "t_1", tmp_path, options)
    asked = []

    class Child:
        """Every answer takes a second of the clock; the shell's is another call."""

        def __init__(self, answer):
            self.answer = answer

        def call(self, message, seconds):
            assert seconds > 0
            asked.append(message)
            return self.answer

    session._shell = Child({"call": {"app": "a", "api": "b", "arguments": {}}})
    session._apps = Child({"completed": False})
    monkeypatch.setattr(session_module.time, "monotonic", lambda: float(len(asked)))
    monkeypatch.setattr(session, "_another_shell", lambda why: why)
    assert session._run("x").output == "it ran for more than 2 seconds and was stopped"
    assert len(asked) <= options.timeout + session_module.GRACE + 2  # the last call, and keeping the state


def test_the_longest_that_everything_takes_is_less_than_the_service_waits():
    provider, options = find_provider(load_plugins(), "environment", "appworld"), Options(timeout=MAX_TIMEOUT)
    margin = 10
    assert options.longest_step + margin <= provider.step_timeout
    assert options.start_timeout + options.shell_timeout + margin <= provider.create_timeout
    assert 2 * options.evaluate_timeout + margin <= provider.evaluate_timeout


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
    played = play(QUESTION, CHEATS.ESCAPE["swallowing the limit of time"], SOLUTIONS["a0count"], timeout=4)
    assert "it ran for more than 4 seconds and was stopped" in played.steps[0].observation
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


# ---------------------------------------------------------------- without the service
#
# Importing the package takes seconds, so that each of these scripts does all that needs one.

STOLEN = ("the task's own ground truth", "the answer's file, by pathlib")
STOCK = """
import json, sys
from appworld import AppWorld
found = []
for code in json.loads(sys.argv[2]):
    world = AppWorld(task_id=sys.argv[1], experiment_name="stock")
    world.execute(code)
    tracker = world.evaluate()
    world.close()
    found.append([len(tracker.passes), tracker.num_tests])
print(json.dumps(found))
"""


def test_the_same_cheats_work_on_the_package_as_it_is(appworld_python, root, fill, tmp_path):
    """So that the tests above are about something."""
    own = tmp_path / "stock"
    own.mkdir()
    (own / "data").symlink_to(root / "data")
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "APPWORLD_ROOT": str(own)}
    codes = json.dumps([fill(CHEATS.stealing(cheat), QUESTION) for cheat in STOLEN])
    done = subprocess.run(
        [appworld_python, "-W", "ignore", "-c", STOCK, QUESTION, codes],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == len(STOLEN)
    for cheat, (passes, tests) in zip(STOLEN, found, strict=True):
        assert passes == tests > 0, cheat


WORLDS_END = """
import os, signal, sys
from astuner.contracts.types import Task
from astuner_appworld.world.environment import AppWorldEnvironment
from astuner.plugins.loader import load_plugins
from astuner.plugins.registry import find_provider
from astuner_appworld.world.session import WorldFailed

def said(what, *values):
    print("said", what, *values, sep="|", flush=True)

# it fails by itself
environment = AppWorldEnvironment({})
environment.reset(Task(task_id=sys.argv[1]))
os.kill(environment._session._apps.pid, signal.SIGKILL)
while environment._session._apps.alive:  # it dies in its own time
    pass
try:
    environment.step({"content": "```python\\nx = 1\\n```"})
except WorldFailed as error:
    said("by itself", error)
folder = environment._folder
environment.close()
said("its folder is left", folder.exists())

# a call brings it down
environment = AppWorldEnvironment({})
environment.reset(Task(task_id=sys.argv[1]))
session = environment._session
pass_on = session._pass_on
def too_much(call):
    os.kill(session._apps.pid, signal.SIGKILL)
    return pass_on(call)
call = {"content": "```python\\napis.supervisor.show_profile()\\n```"}
environment.step(call)
session._pass_on = too_much
step = environment.step(call)
said("by a call", step.terminated, step.truncated, step.info["world_lost"],
     "more than the apps could bear" in step.observation)
said("its score", environment.evaluate().score, environment.evaluate().success)
def spoil(state):
    os.unlink(os.path.join(environment._folder, "world", "experiments", "outputs", state, "tasks", sys.argv[1],
                           "dbs", "supervisor.jsonl"))
spoil("run1")
said("when its state is broken", environment.evaluate().score, environment.evaluate().success)
spoil("run")
try:
    environment.evaluate()
except WorldFailed as error:
    said("when every state is", error)
environment.close()
"""


@pytest.fixture(scope="module")
def worlds_end(appworld_python, root, tmp_path_factory):
    """What the script said, in AppWorld's interpreter; the package prints lines of its own between."""
    folder = tmp_path_factory.mktemp("worlds-end")
    ours = ("astuner", "astuner_appworld", "astuner_sandbox")
    source = [str(Path(sys.modules[name].__file__).parents[1]) for name in ours]
    environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "TMPDIR": str(folder)}
    environ |= {"APPWORLD_ROOT": str(root), "PYTHONPATH": os.pathsep.join(source)}
    command = [appworld_python, "-W", "ignore", "-c", WORLDS_END, QUESTION]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (line.split("|") for line in done.stdout.splitlines() if line.startswith("said|"))
    return {what: values for _, what, *values in lines}


def test_a_world_that_fails_by_itself_is_no_score(worlds_end):
    (error,) = worlds_end["by itself"]
    assert error.startswith("the world of a0count_1 failed to begin")
    assert worlds_end["its folder is left"] == ["False"]


def test_a_world_that_a_call_brings_down_is_scored_as_it_stood(worlds_end):
    assert worlds_end["by a call"] == ["False", "True", "True", "True"]
    assert worlds_end["its score"] == [str(NO_OP_QUESTION), "False"]
    assert worlds_end["when its state is broken"] == ["0.0", "False"]


def test_an_evaluation_that_fails_whatever_the_state_is_no_score(worlds_end):
    (error,) = worlds_end["when every state is"]
    assert error.startswith("the evaluation of a0count_1 failed")
