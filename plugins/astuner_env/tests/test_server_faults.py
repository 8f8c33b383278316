"""What goes wrong in a world, and what its client is told: the truth, and never a made-up answer."""

from __future__ import annotations

import os
import re
import signal
import uuid
from pathlib import Path

import pytest

from astuner.contracts.errors import RunError
from tests.table import table

from ._service import Live, eventually, in_background, is_alive, processes_with, served


@pytest.fixture
def id(service):
    instance_id = uuid.uuid4().hex
    yield instance_id
    service.release(instance_id)


@table(("said", "how"), [("exit", "exit code 3"), ("segfault", "killed by SIGSEGV")])
def test_a_crash_is_told_at_once_and_ever_after(service, id, said, how):
    lost = service.metric("astuner_env_lost_total", environment="counter", reason="crashed")
    service.create(id)
    for answer in (service.step(id, said), service.step(id), service.evaluate(id), service.get(f"/v1/instances/{id}")):
        assert (answer.status, answer.code) == (410, "instance_lost")
        assert answer.detail["reason"] == "crashed"
        assert how in answer.detail["message"]
    assert service.release(id).json == {"success": False, "data": None}
    assert service.metric("astuner_env_lost_total", environment="counter", reason="crashed") == lost + 1


def test_a_process_that_dies_while_nothing_is_asked_is_noticed(service, id):
    service.create(id)
    os.kill(service.pid(id), signal.SIGKILL)
    answer = eventually(lambda: (a := service.get(f"/v1/instances/{id}")).status == 410 and a)
    assert "killed by SIGKILL (out of memory?)" in answer.detail["message"]
    assert service.step(id).code == "instance_lost"


@table("operation", ["step", "evaluate"])
def test_what_hangs_is_killed(service, id, operation):
    service.create(id, env_type="hasty", evaluate="hang")
    pid = service.pid(id)
    answer = service.step(id, "hang") if operation == "step" else service.evaluate(id)
    assert (answer.status, answer.code, answer.detail["reason"]) == (504, "timeout", "timeout")
    assert f"{operation} took longer than 0.7 s" in answer.detail["message"]
    eventually(lambda: not is_alive(pid))
    later = service.step(id)
    assert (later.status, later.detail["reason"]) == (410, "timeout")


def test_whatever_hangs_is_told_as_that_and_never_as_a_crash(service):
    def lost(reason):
        return service.metric("astuner_env_lost_total", environment="hasty", reason=reason)

    before = lost("timeout"), lost("crashed")
    ids = [uuid.uuid4().hex for _ in range(6)]
    for instance_id in ids:
        service.create(instance_id, env_type="hasty")
    answers = [in_background(lambda instance_id=i: service.step(instance_id, "hang")) for i in ids]
    assert [answer().detail["reason"] for answer in answers] == ["timeout"] * len(ids)
    assert [service.step(instance_id).detail["reason"] for instance_id in ids] == ["timeout"] * len(ids)
    assert (lost("timeout"), lost("crashed")) == (before[0] + len(ids), before[1])


def test_a_release_does_not_wait_for_a_step_that_hangs(service, id):
    service.create(id)
    pid = service.pid(id)
    step = in_background(lambda: service.step(id, "hang"))
    eventually(lambda: service.get(f"/v1/instances/{id}").json["is_busy"])
    assert service.release(id).data is None
    assert not is_alive(pid)
    answer = step()
    assert (answer.status, answer.code, answer.detail["reason"]) == (400, "unknown_instance", "released")


def test_what_is_asked_of_an_instance_that_is_still_being_made_waits(service, id):
    create = in_background(lambda: service.create(id, reset="wait 0.4"))
    eventually(lambda: service.get(f"/v1/instances/{id}").status == 200)
    steps = [in_background(lambda: service.step(id)) for _ in range(2)]
    assert {step().data["info"]["count"] for step in steps} == {1, 2}
    assert create().data["state"]


def test_what_waits_for_an_instance_that_cannot_be_made_is_told(service, id):
    create = in_background(lambda: service.create(id, env_type="hasty", reset="hang"))
    eventually(lambda: service.get(f"/v1/instances/{id}").status == 200)
    answer = service.step(id)
    assert (answer.status, answer.detail["reason"]) == (410, "timeout")
    assert create().status == 504


def test_one_thing_happens_at_a_time(service, id):
    service.create(id, goal=100)
    steps = [in_background(lambda: service.step(id, "wait 0.01")) for _ in range(6)]
    counts = [step().data["info"]["count"] for step in steps]
    assert sorted(counts) == [1, 2, 3, 4, 5, 6]


@table(
    ("said", "error"),
    [("raise", "RuntimeError: the world is broken"), ("value error", "ValueError"), ("sys.exit", "SystemExit: bye")],
)
def test_an_environment_that_raises_is_a_500_without_its_traceback(service, id, said, error):
    service.create(id)
    answer = service.step(id, said)
    assert (answer.status, answer.code) == (500, "env_error")
    where = r" \(\S+/toys\.py:\d+ in _misbehave\)"
    assert re.fullmatch(f"{error}.*{where}", answer.detail["message"])
    assert "traceback" not in answer.detail
    assert service.step(id).data["info"]["count"] == 1, "it lives on, for whoever knows what they do"


@table("debug", [False, True])
def test_other_machines_are_told_where_the_code_lies_with_debug_only(counter, toys, tmp_path, debug):
    with Live([counter], host="0.0.0.0", token="t" * 16, debug=debug, parent=tmp_path) as live:
        live.create("a")
        answer = live.step("a", "raise")
        assert answer.detail["message"].startswith("RuntimeError: the world is broken")
        assert (b"toys.py" in answer.raw) == debug
        assert ('RuntimeError("the world is broken")' in answer.detail.get("traceback", "")) == debug


def test_other_machines_are_not_told_why_a_world_cannot_be_imported(toys, tmp_path):
    world = tmp_path / "world.py"
    world.write_text("from toys import Counter as World\n")
    it = served("world", f"{world}:World", path=[str(toys.parent)])
    with Live([it], host="0.0.0.0", token="t" * 16, parent=tmp_path) as live:
        world.write_text("import no_such_module\n")
        os.kill(live.on_loop(lambda s: s.manager.zygotes()["world"]), signal.SIGKILL)
        answer = eventually(lambda: (a := live.create("b", "world")).status == 500 and a)
        assert answer.detail["message"].endswith("See the service's log.")


@pytest.mark.parametrize("how", ["raise", "exit", "hang", "value error", "unknown"])
def test_a_failed_create_leaves_nothing(service, toys, id, how):
    task = "moon" if how == "unknown" else "train-0"
    before = eventually(lambda: service.taken == 0 and processes_with(str(toys)))
    answer = service.create(id, env_type="hasty", task_id=task, reset=how)
    expected = {"raise": 500, "exit": 410, "hang": 504, "value error": 400, "unknown": 400}
    assert answer.status == expected[how]
    eventually(lambda: service.taken == 0)
    assert processes_with(str(toys)) == before
    root = service.on_loop(lambda s: s.manager._root.path)
    eventually(lambda: not list(Path(root).glob("*/i-*")))


def test_numbers_that_are_none_are_errors_and_never_rewards(toys, tmp_path):
    it = served("bad", f"{toys}:NotANumber")
    with Live([it], parent=tmp_path) as live:
        live.create("a", env_type="bad")
        answer = live.step("a")
        assert (answer.status, answer.code) == (500, "env_error")
        assert "reward is nan; it must be a finite number" in answer.detail["message"]
        assert "the score must be a finite number, not inf" in live.evaluate("a").detail["message"]


def test_what_is_no_data_is_an_error_that_says_so(toys, tmp_path):
    it = served("bad", f"{toys}:NoData")
    with Live([it], parent=tmp_path) as live:
        live.create("a", env_type="bad")
        assert "JSON cannot represent" in live.step("a").detail["message"]
        assert live.step("a", "none").detail["message"].endswith("instead of a StepResult")
        info = live.step("a", "infinity").data["info"]
        assert info["value"] is None
        assert info["set"] == [1]
        assert info["nested"] == {"key": [1, 2]}


@pytest.mark.slow
def test_a_big_observation_arrives_and_one_that_is_too_big_is_said_to_be(service, id):
    service.create(id)
    assert len(service.step(id, f"big {5 << 20}").data["state"][0]["content"]) == 5 << 20
    answer = service.step(id, f"big {65 << 20}")
    assert (answer.status, answer.code) == (500, "env_error")
    assert "exceeds the limit" in answer.detail["message"]
    assert service.step(id).data["info"]["count"] == 3


def test_what_an_instance_leaves_running_ends_with_it(service, toys, id):
    before = eventually(lambda: service.taken == 0 and processes_with(str(toys)))
    service.create(id)
    service.step(id, "daemon")
    eventually(lambda: len(processes_with(str(toys)) - before) >= 2)
    service.release(id)
    eventually(lambda: processes_with(str(toys)) == before)


def test_an_environment_is_closed_before_its_process_ends_and_has_so_long(counter, tmp_path, monkeypatch):
    monkeypatch.setattr("astuner_env.manager.manager.CLOSE_TIMEOUT", 0.3)
    with Live([counter], parent=tmp_path) as live:
        live.create("a", closed=str(tmp_path / "closed"))
        live.release("a")
        assert (tmp_path / "closed").read_text() == "closed"
        for how in ("hang", "raise", "exit"):
            live.create("a", close=how)
            pid = live.pid("a")
            assert live.release("a").data is None
            assert not is_alive(pid)


def test_each_instance_has_a_folder_of_its_own_that_is_removed(service, id):
    folder = Path(service.create(id).data["info"]["folder"])
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o077 == 0
    service.step(id, "print")
    assert "on the standard error" in folder.with_name(f"{folder.name}.log").read_text()
    service.release(id)
    assert not folder.exists()
    assert not list(folder.parent.glob(f"{folder.name}*"))


def test_a_dead_zygote_is_started_anew_and_its_instances_are_lost(counter, tmp_path):
    with Live([counter], parent=tmp_path) as live:
        live.create("a")
        pid, zygote = live.pid("a"), live.on_loop(lambda s: s.manager.zygotes()["counter"])
        os.kill(zygote, signal.SIGKILL)
        answer = eventually(lambda: (a := live.get("/v1/instances/a")).status == 410 and a)
        assert "zygote" in answer.detail["message"]
        eventually(lambda: not is_alive(pid))
        assert live.create("b").data["state"]
        assert live.step("b").data["info"]["count"] == 1
        assert live.metric("astuner_env_zygote_restarts_total", environment="counter") == 1
        assert live.metric("astuner_env_lost_total", environment="counter", reason="crashed") == 1


def test_idle_instances_are_ended_by_a_clock_that_only_goes_forward(counter, tmp_path):
    with Live([counter], idle_ttl=100.0, parent=tmp_path) as live:
        now = [1000.0]

        def hold_the_clock(s):
            s.manager._clock = lambda: now[0]

        def is_busy():
            answer = live.get("/v1/instances/hung")
            assert answer.status == 200, answer.raw
            return answer.json["is_busy"]

        live.on_loop(hold_the_clock)
        for name in ("idle", "used", "hung"):
            live.create(name, closed=str(tmp_path / name))
        now[0] += 60
        live.step("used")
        hung = in_background(lambda: live.step("hung", "hang"))
        eventually(is_busy)
        now[0] += 60
        live.on_loop(lambda s: s.manager.sweep())
        answer = live.step("idle")
        assert (answer.status, answer.code, answer.detail["reason"]) == (410, "instance_lost", "expired")
        assert "after 100 s" in answer.detail["message"]
        assert live.step("used").data["info"]["count"] == 2
        assert is_busy(), "what is busy is not idle"
        eventually((tmp_path / "idle").exists)
        assert live.metric("astuner_env_lost_total", environment="counter", reason="expired") == 1
        live.release("hung")
        hung()


def test_asking_for_status_does_not_keep_an_instance_alive(counter, tmp_path):
    with Live([counter], idle_ttl=0.4, parent=tmp_path) as live:
        live.create("a")
        answer = eventually(lambda: (a := live.get("/v1/instances/a")).status == 410 and a)
        assert answer.detail["reason"] == "expired"


def test_memory_comes_back(counter, tmp_path):
    with Live([counter], parent=tmp_path) as live:
        size = lambda: live.metric("astuner_env_resident_bytes", environment="counter")  # noqa: E731
        before = size()
        for name in "abc":
            live.create(name)
            live.step(name, "eat 40")
        assert size() > before + (100 << 20)
        for name in "abc":
            live.release(name)
        assert size() < before + (10 << 20)


def test_endless_output_is_cut(counter, tmp_path, monkeypatch):
    monkeypatch.setattr("astuner_env.manager.manager._LARGEST_OUTPUT", 10)
    with Live([counter], parent=tmp_path) as live:
        folder = Path(live.create("a").data["info"]["folder"])
        live.step("a", "print")
        log = folder.with_name(f"{folder.name}.log")
        assert log.stat().st_size > 10
        live.on_loop(lambda s: s.manager.sweep())
        assert log.stat().st_size == 0
        live.step("a", "print")
        assert 10 < log.stat().st_size < 100


def test_tasks_that_hang_or_crash_are_an_error_and_leave_nothing(toys, tmp_path):
    (tmp_path / "lists.py").write_text(
        "import os, time\nfrom toys import Counter\n"
        "class Lists(Counter):\n    @classmethod\n    def tasks(cls, split, params):\n"
        "        os._exit(4) if split == 'crash' else time.sleep(60)\n"
    )
    it = served("lists", f"{tmp_path}/lists.py:Lists", path=[str(toys.parent)], create_timeout=0.7)
    with Live([it], parent=tmp_path) as live:
        answer = live.post("/get_env_profile", params={"split": "crash"})
        assert (answer.status, answer.code) == (500, "env_error")
        assert "exit code 4" in answer.detail["message"]
        answer = live.post("/get_env_profile", params={"split": "hang"})
        assert (answer.status, answer.code) == (504, "timeout")
        eventually(lambda: len(processes_with(f"{tmp_path}/lists.py")) == 1)


@table(
    ("entry", "says"),
    [
        ("world.py:Wrold", "{folder}/world.py has no 'Wrold'; did you mean World?"),
        (
            "raises.py:World",
            "{folder}/raises.py:1: importing '{folder}/raises.py:World' failed: ZeroDivisionError: division by zero",
        ),
        (
            "syntax.py:World",
            "{folder}/syntax.py:1: importing '{folder}/syntax.py:World' failed: SyntaxError: invalid syntax",
        ),
        ("world.py:World", "{folder}/world.py:World: World is not a subclass of astuner.Environment"),
        ("world.py:number", "{folder}/world.py:number is 1, not a class"),
    ],
)
def test_a_mistake_in_ones_own_world_is_one_clear_line(tmp_path, entry, says):
    (tmp_path / "world.py").write_text("class World: pass\nnumber = 1\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "syntax.py").write_text("class World(:\n")
    it = served("world", f"{tmp_path}/{entry}")
    with pytest.raises(RunError) as refused, Live([it], parent=tmp_path):
        pass
    message = str(refused.value)
    assert message.startswith("Could not start the environment 'world': " + says.format(folder=tmp_path))
    assert "\n" not in message


def test_a_service_that_cannot_import_an_environment_does_not_start(tmp_path, counter):
    (tmp_path / "broken.py").write_text("import no_such_module\nclass World: pass\n")
    broken = served("broken", f"{tmp_path}/broken.py:World", hint="make it")
    with pytest.raises(Exception, match="no_such_module") as caught, Live([counter, broken], parent=tmp_path):
        pass
    assert "'broken'" in str(caught.value)
    assert str(caught.value).endswith("Run: make it")
    assert not list(tmp_path.glob("astuner-env-*"))
    (tmp_path / "nothing.py").write_text("class World: pass\n")
    nothing = served("nothing", f"{tmp_path}/nothing.py:World")
    with pytest.raises(Exception, match=r"not a subclass of astuner\.Environment"), Live([nothing], parent=tmp_path):
        pass


def test_an_environment_that_breaks_while_the_service_runs_is_a_500_with_what_to_type(toys, tmp_path):
    world = tmp_path / "world.py"
    world.write_text("from toys import Counter as World\n")
    it = served("world", f"{world}:World", path=[str(toys.parent)], hint="make it")
    with Live([it], parent=tmp_path) as live:
        live.create("a", "world")
        world.write_text("import no_such_module\n")
        os.kill(live.on_loop(lambda s: s.manager.zygotes()["world"]), signal.SIGKILL)
        for _ in range(2):  # the second one is not another start
            answer = eventually(lambda: (a := live.create("b", "world")).status == 500 and a)
            assert answer.code == "env_error"
            assert "no_such_module" in answer.detail["message"]
            assert "Run: make it (" in answer.detail["message"]
        assert live.step("a").code == "instance_lost"
        eventually(lambda: live.taken == 0)
