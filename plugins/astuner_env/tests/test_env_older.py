"""Classes written for the older environment service run as they are."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astuner.contracts.environment import Environment, Evaluation, StepResult
from astuner.contracts.errors import PluginError
from astuner.contracts.types import Task
from astuner.plugins.loader import load_plugins
from astuner.plugins.registry import resolve
from astuner.testing import check_environment
from astuner_env.older_environment import adapt, is_older, stand_in
from tests.table import table

FILE = '''
from env_service.base import BaseEnv
from env_service.registry import Registry


@Registry.register("counter")
class CounterEnv(BaseEnv):
    """Counts down."""

    def __init__(self, task_id, instance_id, params):
        if task_id not in ("1", "2"):
            raise ValueError(f"no task {task_id}")
        self.task_id, self.instance_id, self.left, self.seen = task_id, instance_id, 2, [params]

    def get_init_state(self, params=None):
        self.seen.append(params)
        messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": f"task {self.task_id}"}]
        return {"state": messages, "info": {"instance_id": self.instance_id, "task_id": self.task_id}}

    def step(self, action, params=None):
        self.left -= 1
        said = {"role": "user", "content": f"{self.left} left", "tool_calls": []}
        return {"state": [said], "reward": 0.5, "is_terminated": self.left <= 0, "info": {}}

    def evaluate(self, messages=None, params=None):
        return float(self.left <= 0) if (params or {}).get("sparse") else 1 - self.left / 2

    def get_info(self, messages=None, params=None):
        return "say anything"

    def close(self):
        self.closed = True

    @staticmethod
    def get_query_list(split="train", params=None):
        if split not in ("train", "dev"):
            raise ValueError(f"no split {split}")
        return [1, 2]
'''


@pytest.fixture
def older(tmp_path: Path) -> type[Environment]:
    (tmp_path / "counter_env.py").write_text(FILE)
    found: type[Environment] = resolve(load_plugins(), "environment", "counter_env.py->CounterEnv", base_dir=tmp_path)
    return found


def test_it_keeps_to_the_contract(older: type[Environment]) -> None:
    check_environment(older)
    assert (older.__name__, older.__doc__) == ("CounterEnv", "Counts down.")


def test_an_episode(older: type[Environment]) -> None:
    assert [t.task_id for t in older.tasks("train", {})] == ["1", "2"]  # numbers there, names here
    env = older({"simple": True})
    first = env.reset(Task(task_id="1", main_query="q", metadata={"a": 1}))
    assert (first.observation, len(first.messages), first.info["task_id"]) == ("task 1", 2, "1")
    inner: Any = env._inner  # type: ignore[attr-defined]
    assert inner.seen == [{"simple": True, "task": {"main_query": "q", "metadata": {"a": 1}}}] * 2
    assert len(inner.instance_id) == 32
    assert env.step({"role": "assistant", "content": "x"}) == StepResult(
        observation="1 left", reward=0.5, messages=({"role": "user", "content": "1 left"},)
    )
    assert env.evaluate() == Evaluation(score=0.5)
    assert env.step({"role": "assistant", "content": "x"}).terminated
    assert env.describe() == {"info": "say anything"}
    env.close()
    env.close()
    assert inner.closed


class Bare:
    """As few parameters, and as little said, as any of them has."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id

    def get_init_state(self) -> dict[str, Any]:
        return {"state": "one text"}

    def step(self, action: Any) -> dict[str, Any]:
        return {"state": {"role": "user", "content": ""}, "reward": 0, "is_terminated": False}

    def evaluate(self, messages: Any, params: dict[str, Any]) -> Any:
        return 1.0 if params["sparse"] else {"valid": True}

    @classmethod
    def get_query_list(cls, split: str) -> list[str]:
        return ["a"]


def test_less_said_is_enough() -> None:
    bare = adapt(Bare)
    assert adapt(Bare) is bare
    assert adapt(bare) is bare
    assert [t.task_id for t in bare.tasks("any", {"x": 1})] == ["a"]
    env = bare()
    assert env.reset(Task(task_id="a")).messages == ({"role": "user", "content": "one text"},)
    assert env.step({"content": "x"}) == StepResult(observation="", messages=({"role": "user", "content": ""},))
    assert env.evaluate() == Evaluation(score=1.0, details={"valid": True})  # a report without a score
    assert env.describe() == {}
    env.close()


GOES_ON = {"reward": 0.0, "is_terminated": False}


@table(
    ("changes", "says"),
    [
        ({"get_init_state": lambda self: "text"}, "get_init_state of an older environment: .* state: 'text'"),
        ({"get_init_state": lambda self: {"state": []}}, "must be a message"),
        ({"get_init_state": lambda self: {"state": ["x"]}}, "must have a role and content"),
        ({"get_init_state": lambda self: {"state": "x", "is_terminated": None}}, "is_terminated is None"),
        ({"step": lambda self, action: {"state": "x", **GOES_ON, "reward": None}}, "reward is None; it must be a fin"),
        ({"step": lambda self, action: {"state": "x", **GOES_ON, "reward": "1"}}, "reward is '1'; it must be a finite"),
        ({"step": lambda self, action: {"state": "x", **GOES_ON, "reward": math.nan}}, "reward is nan"),
        ({"step": lambda self, action: {"state": "x", "is_terminated": False}}, "lacks reward"),
        ({"step": lambda self, action: {"state": "x", "reward": 0.0}}, "lacks is_terminated"),
        ({"step": lambda self, action: {"state": "x", **GOES_ON, "is_terminated": "false"}}, "must be true or false"),
        ({"step": lambda self, action: {"state": "x", **GOES_ON, "info": ["x"]}}, "info is .*; it must be an object"),
        ({"evaluate": lambda self, messages, params: None}, "evaluate of an .* score is None; it must be a finite"),
        ({"evaluate": lambda self, messages, params: {"score": "1"}}, "evaluate of an .* score is '1'"),
        ({"evaluate": lambda self, messages, params: math.inf}, "score is inf"),
    ],
)
def test_what_makes_no_sense_raises(changes: dict[str, Any], says: str) -> None:
    env = adapt(type("Odd", (Bare,), changes))()

    def play() -> None:
        env.reset(Task(task_id="a"))
        env.step({"content": "x"})
        env.evaluate()

    with pytest.raises(TypeError, match=says):
        play()


def test_a_number_of_numpys_is_one() -> None:
    np = pytest.importorskip("numpy")

    class Weighed(Bare):
        def step(self, action: Any) -> dict[str, Any]:
            return {"state": "x", "reward": np.float32(0.5), "is_terminated": True, "info": {"truncated": True}}

    env = adapt(Weighed)()
    env.reset(Task(task_id="a"))
    found = env.step({"content": "x"})
    assert (found.reward, type(found.reward), found.terminated, found.truncated) == (0.5, float, False, True)


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    assert not is_older(Environment)
    assert not is_older(len)
    with pytest.raises(TypeError, match="lacks get_init_state"):
        adapt(dict)
    (tmp_path / "x.py").write_text("class X:\n    pass\n")
    with pytest.raises(PluginError, match="must be a subclass of Environment"):
        resolve(load_plugins(), "environment", "x.py->X", base_dir=tmp_path)


def test_the_real_modules_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in()
    stand_in()
    for name in [n for n in sys.modules if n.partition(".")[0] == "env_service"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "env_service").mkdir()
    (tmp_path / "env_service" / "__init__.py").touch()
    (tmp_path / "env_service" / "base.py").write_text("class BaseEnv:\n    real = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert importlib.import_module("env_service.base").BaseEnv.real
    registry = importlib.import_module("env_service.registry").Registry  # which it lacks
    registry.register("x")(Bare)
    assert registry.get("x") is Bare
    with pytest.raises(ValueError, match="not found"):
        registry.get("y")
    for name in [n for n in sys.modules if n.partition(".")[0] == "env_service"]:
        del sys.modules[name]


def test_an_interpreter_that_has_nothing_of_ours_can_borrow_it(tmp_path: Path) -> None:
    """Only the standard library is imported, beside what is lent."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import astuner_env.older_environment, astuner.contracts.environment, astuner_env.environment_setup\n"
        "new = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    lent = [str(Path(importlib.import_module(n).__file__ or "").parents[1]) for n in ("astuner", "astuner_env")]
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {lent!r}\n{code}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert shown.stdout.strip() == "['astuner', 'astuner_env']"
