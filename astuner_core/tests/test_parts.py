"""Parts that packages bring: there, missing or turned off; where one is needed, the core says what to type."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from astuner import Environment, Provider, StepResult, Task, hookimpl
from astuner.chat.codec import ChatCodec
from astuner.contracts.errors import AmbiguousName, ConfigError, EnvironmentFailed, MissingDependency, PluginError
from astuner.contracts.parts import PARTS, EpisodeContextPart, Waiting
from astuner.contracts.types import Episode, SamplingParams, StopReason
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins
from astuner.rollout.models import one_model
from astuner.rollout.parts import build_judge
from astuner.rollout.runner import EpisodeRunner
from astuner.rollout.world import World
from astuner.runs import services
from astuner.testing import FakeEngine, check_environment, fake_config, make_tokenizer, workflow_task
from tests.table import table

TOKENIZER = make_tokenizer()
PLUGINS = {
    "agentscope": "agentscope",
    "debugger": "debug",
    "downloads": "models",
    "endpoint": "gateway",
    "environments": "env",
    "episode_context": "trackers",
    "external_model": "helpers",
    "helper_models": "helpers",
    "looser_history": "families",
    "older_spellings": "compat",
    "task_check": "report",
}
"""Part -> the plugin of ours that brings it."""

FLOW = """
from astuner import Workflow, WorkflowOutput

class Flow(Workflow):
    async def execute(self, workflow_task, model_tuner):
        {body}
        return WorkflowOutput(reward=1.0)
"""


def plugin(name: str, **parts: str) -> Any:
    made = ModuleType(name)
    made.register_parts = hookimpl(  # type: ignore[attr-defined]
        lambda: {part: Provider(target=target) for part, target in parts.items()}
    )
    distribution = SimpleNamespace(name=f"acme-{name}", version="1.0", requires=[])
    return SimpleNamespace(name=name, value=name, dist=distribution, load=lambda: made)


def run(folder: Path, body: str, *, without: Sequence[str] = (), settings: str = "") -> Episode:
    folder.mkdir(exist_ok=True)
    (folder / "flow.py").write_text(FLOW.format(body=body))
    config = fake_config(folder, settings, ["astuner.rollout.workflow=flow.py->Flow"], disabled_plugins=without)
    runner = EpisodeRunner(config)

    async def play() -> Episode:
        try:
            models = one_model(FakeEngine(["fine"] * 9, TOKENIZER), ChatCodec(TOKENIZER))
            return await runner.run(workflow_task(), models, SamplingParams(max_tokens=100))
        finally:
            await runner.close()

    return asyncio.run(play())


# ------------------------------------------------------------------------------------------------------------- found


def test_ours_bring_every_part_there_is() -> None:
    assert PLUGINS.keys() == PARTS.keys()
    offers = {name: plugin.name for plugin, name, _ in load_plugins().offers("part")}
    assert offers == PLUGINS


@table("name", PLUGINS)
def test_a_part_that_is_there_is_of_its_class(name: str) -> None:
    found = registry.find_part(load_plugins(), name, wanted_by="x")
    assert issubclass(found, PARTS[name])
    assert not getattr(found, "__abstractmethods__", None)
    assert registry.find_optional_part(load_plugins(), name) is found


@table("name", PLUGINS)
def test_a_part_that_is_missing_names_its_package(name: str) -> None:
    with pytest.raises(MissingDependency) as e:
        registry.find_part(PluginManager(), name, wanted_by="this")
    dist = f"astuner-{PLUGINS[name]}"
    assert str(e.value) == f"this needs the part {name!r}; install it: pip install {dist}"
    assert registry.find_optional_part(PluginManager(), name) is None


@table("name", PLUGINS)
def test_a_part_that_is_turned_off_says_so(name: str) -> None:
    manager = load_plugins([PLUGINS[name]])
    with pytest.raises(MissingDependency) as e:
        registry.find_part(manager, name, wanted_by="this")
    assert f"this needs the part {name!r}: the plugin {PLUGINS[name]} (astuner-" in str(e.value)
    assert f"is disabled: by -p no:{PLUGINS[name]}" in str(e.value)
    assert registry.find_optional_part(manager, name) is None


def test_two_that_bring_one_part_are_told_apart_by_turning_one_off() -> None:
    both = [plugin("a", endpoint="x:Y"), plugin("b", endpoint="x:Y")]
    with pytest.raises(AmbiguousName, match="2 plugins register the part 'endpoint'; disable one with -p no:a or"):
        registry.find_optional_part(PluginManager().load(both), "endpoint")


def test_another_package_may_bring_one_and_must_keep_to_the_class() -> None:
    theirs = PluginManager().load([plugin("a", endpoint="astuner_gateway.endpoint:Endpoint")])
    assert registry.find_part(theirs, "endpoint", wanted_by="x").__name__ == "Endpoint"
    with pytest.raises(PluginError, match="it must be a subclass of EndpointPart"):
        registry.find_part(PluginManager().load([plugin("a", endpoint="json:JSONDecoder")]), "endpoint", wanted_by="x")


def test_without_looser_histories_the_merge_level_text_is_refused_before_anything_runs(tmp_path: Path) -> None:
    config = fake_config(
        tmp_path, "  rollout: {merge_level: text, workflow: json->loads}\n", disabled_plugins=["families"]
    )
    with pytest.raises(ConfigError, match="merge_level: text needs the part 'looser_history': the plugin families"):
        EpisodeRunner(config).prepare()


# ------------------------------------------------------------------------------------------------------------ endpoint


def test_without_the_endpoint_an_agent_of_another_framework_ends_the_run(tmp_path: Path) -> None:
    body = "model_tuner.base_url_and_key()"
    assert run(tmp_path / "with", body).stop_reason is StopReason.COMPLETED
    swallowed = "try: model_tuner.base_url_and_key()\n        except Exception: pass"
    for number, each in enumerate((body, swallowed)):
        with pytest.raises(ConfigError, match=r"^model_tuner.base_url_and_key needs the part 'endpoint': the plugin"):
            run(tmp_path / str(number), each, without=["gateway"])
    assert run(tmp_path / "neither", "pass", without=["gateway"]).reward == 1.0


def test_a_section_of_the_endpoint_is_not_ignored(tmp_path: Path) -> None:
    with pytest.raises(MissingDependency, match="the part 'endpoint'"):
        run(tmp_path, "pass", without=["gateway"], settings="  endpoint:\n    port: 9\n")


# ---------------------------------------------------------------------------------------------------------- agentscope


@table(
    "asked",
    [
        "await model_tuner([])",
        "model_tuner.as_agentscope_model()",
        "model_tuner.formatter",
        "model_tuner.context_size",
        "await model_tuner.count_tokens([])",
        "await model_tuner.generate_structured_output([], None)",
    ],
)
def test_without_agentscope_such_a_model_ends_the_run(tmp_path: Path, asked: str) -> None:
    with pytest.raises(ConfigError, match=r"^model=model_tuner needs the part 'agentscope': the plugin agentscope"):
        run(tmp_path, asked, without=["agentscope"])


def test_what_an_agent_sets_and_asks_reaches_the_model_of_the_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from astuner_agentscope.face import AgentScopeModels

    made: list[Any] = []

    class Model:
        formatter, context_size, stream = "formatter", 9, False

        async def __call__(self, said: str) -> str:
            return f"{said} {self.stream}"

        async def count_tokens(self, said: str) -> int:
            return len(said)

        async def generate_structured_output(self, said: str) -> str:
            return f"structured {said} {self.stream}"

    def make_model(self: Any, tuner: Any, agent_name: str, role: str | None) -> Any:
        made.append((agent_name, role))
        return Model()

    monkeypatch.setattr(AgentScopeModels, "make_model", make_model)
    body = (
        "model_tuner.stream = True\n"
        "        assert (model_tuner.model_name, model_tuner.model) == ('astuner', 'astuner')\n"
        "        assert await model_tuner('hi') == 'hi True'\n"
        "        assert await model_tuner.generate_structured_output('x') == 'structured x True'\n"
        "        assert (model_tuner.formatter, model_tuner.context_size) == ('formatter', 9)\n"
        "        assert await model_tuner.count_tokens('four') == 4\n"
        "        model_tuner.as_agentscope_model('solver', 'judge')"
    )
    episode = run(tmp_path, body)
    assert (episode.stop_reason, episode.error) == (StopReason.COMPLETED, "")
    assert made == [("default", None), ("solver", "judge")]  # one for itself, however often it is asked


@table(("is_answer", "reason"), [(True, StopReason.WORKFLOW_FAILED), (False, StopReason.COMPLETED)])
def test_an_agent_that_waits_to_the_end_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_answer: bool, reason: StopReason
) -> None:
    from astuner_agentscope.face import AgentScopeModels

    waiting = {"waits": Waiting("solver waits for a person", is_answer), "works": None}
    monkeypatch.setattr(AgentScopeModels, "make_model", lambda self, tuner, agent_name, role: agent_name)
    monkeypatch.setattr(AgentScopeModels, "find_waiting", lambda self, model, output: waiting[model])
    body = "[model_tuner.as_agentscope_model(name) for name in ('works', 'waits')]"
    episode = run(tmp_path, body)
    assert (episode.stop_reason, episode.error) == (reason, "solver waits for a person")
    assert run(tmp_path / "works", "model_tuner.as_agentscope_model('works')").error == ""


# ------------------------------------------------------------------------------------------------------- helper models


JUDGE = """
from astuner import Judge

class J(Judge):
    def __init__(self, helper_models):
        assert helper_models.names == ()

    def judge(self, workflow_task, output):
        raise AssertionError("not asked")
"""


def test_without_helper_models_who_takes_them_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(JUDGE)
    config = fake_config(tmp_path, "", ["astuner.task_judge.judge=judge.py->J"])
    assert build_judge(config) is not None
    with pytest.raises(MissingDependency, match=r"^the judge 'judge.py->J' uses helper_models and needs the part 'he"):
        build_judge(replace(config, plugins=load_plugins(["helpers"])))


@table(
    ("settings", "without", "says"),
    [
        (
            "  helper_models:\n    grader:\n      model: m\n      base_url: http://localhost:1\n",
            "helpers",
            r"experiment\d+.yaml:4:\d+: unknown key astuner.helper_models: the plugin helpers \(.*\) is disabled",
        ),
        (
            "  env_service:\n    url: http://localhost:1\n",
            "env",
            r"experiment\d+.yaml:5:\d+: astuner.env_service.url needs the part 'environments': the plugin env",
        ),
    ],
)
def test_a_key_that_only_a_part_reads_is_not_ignored(tmp_path: Path, settings: str, without: str, says: str) -> None:
    assert run(tmp_path, "pass", settings=settings).reward == 1.0
    with pytest.raises((ConfigError, MissingDependency), match=says):
        run(tmp_path, "pass", settings=settings, without=[without])


# -------------------------------------------------------------------------------------------------------- environments


class Lamp(Environment):
    """Can be interrupted while it waits."""

    def __init__(self, params: Any = None) -> None:
        super().__init__(params)
        self.over, self.told = threading.Event(), []

    @classmethod
    def tasks(cls, split: str, params: Any) -> Iterator[Task]:
        if split != "train":
            raise ValueError("there is train")
        yield Task(task_id="1")

    def reset(self, task: Task) -> StepResult:
        if task.task_id != "1":
            raise ValueError("there is 1")
        return StepResult(observation="dark")

    def step(self, action: Any) -> StepResult:
        if action["content"] == "wait":
            assert self.over.wait(20)
            raise RuntimeError("interrupted")
        return StepResult(observation="light")

    def evaluate(self) -> float:
        return 1.0

    def interrupt(self) -> None:
        self.told.append("interrupt")
        self.over.set()

    def close(self) -> None:
        self.told.append("close")


def test_an_environment_of_today_is_checked_by_the_core_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("astuner_testing.checks.load_plugins", lambda: pytest.fail("asked for plugins"))
    check_environment(Lamp)


def test_one_that_is_none_needs_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError, match=r"^dict is neither a subclass of astuner.Environment"):
        check_environment(dict)
    monkeypatch.setattr("astuner_testing.checks.load_plugins", PluginManager)
    with pytest.raises(MissingDependency, match=r"^dict, which is not a subclass of astuner.Environment, needs"):
        check_environment(dict)


@table("importing", ["from env_service.base import BaseEnv\n", ""])
def test_a_class_for_the_older_service_says_what_runs_it(tmp_path: Path, importing: str) -> None:
    names = ("get_init_state", "step", "evaluate", "get_query_list")
    methods = "".join(f"    def {name}(self): pass\n" for name in names)
    (tmp_path / "old.py").write_text(f"{importing}class Old:\n{methods}")
    with pytest.raises(PluginError, match="pip install astuner-env"):
        fake_config(tmp_path, disabled_plugins=["env"]).resolve("environment", "old.py->Old")
    assert issubclass(fake_config(tmp_path).resolve("environment", "old.py->Old"), Environment)


def test_without_the_part_an_environment_is_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTUNER_ENV_URL", "http://localhost:1")
    task = Task(task_id="1", env_type="lamp")
    assert World(fake_config(tmp_path), task).is_remote
    assert not World(fake_config(tmp_path, disabled_plugins=["env"]), task).is_remote


def test_without_the_part_nothing_is_served_beside_a_run() -> None:
    services.check(load_plugins(), ["lamp.py->Lamp"])
    with pytest.raises(MissingDependency, match=r"^--with lamp.py->Lamp needs the part 'environments': the plugin env"):
        services.check(load_plugins(["env"]), ["lamp.py->Lamp"])


def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Lamp]) -> tuple[World, Any]:
    config = fake_config(tmp_path, disabled_plugins=["env"])
    made = kind()
    monkeypatch.setattr(type(config), "resolve", lambda *asked: lambda params: made)
    world = World(config, Task(task_id="1", env_type="lamp"))
    world.open()
    return world, made


@table("ended_by", ["give_up", "close"])
def test_an_environment_of_this_process_may_be_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    world, made = opened(tmp_path, monkeypatch, Lamp)
    errors: list[BaseException] = []

    def step() -> None:
        try:
            world.step({"content": "wait"})
        except EnvironmentFailed as e:
            errors.append(e)

    thread = threading.Thread(target=step)
    thread.start()
    while not world._lock.locked():  # until the step is under way
        pass
    getattr(world, ended_by)()
    thread.join(20)
    assert "interrupted" in str(errors[0])
    world.close()
    assert made.told[0] == "interrupt"
    assert made.told.count("close") == 1


def test_one_that_fails_to_be_interrupted_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stuck(Lamp):
        def interrupt(self) -> None:
            raise OSError("stuck")

    world, made = opened(tmp_path, monkeypatch, Stuck)
    world.give_up()
    with pytest.raises(EnvironmentFailed, match="raised in interrupt: OSError: stuck"):
        world.close()
    assert made.told == ["close"]


# ----------------------------------------------------------------------------------------------------- episode context


class Around(EpisodeContextPart):
    """Notes what is entered and left."""

    made = 0
    seen: list[tuple[str, str]] = []  # noqa: RUF012  (of this class alone)

    def __init__(self) -> None:
        type(self).made += 1

    @contextlib.contextmanager
    def around(self, episode_id: str) -> Iterator[None]:
        self.seen.append(("enter", episode_id))
        yield
        self.seen.append(("leave", episode_id))


def test_what_is_around_an_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry.find_optional_part

    def find_optional_part(manager: PluginManager, name: str) -> Any:
        return Around if name == "episode_context" else found(manager, name)

    monkeypatch.setattr(registry, "find_optional_part", find_optional_part)
    episode = run(tmp_path, "pass")
    assert Around.made == 1
    assert Around.seen == [(what, episode.workflow_task.episode_id) for what in ("enter", "leave")]


def test_an_episode_needs_nothing_around_it(tmp_path: Path) -> None:
    assert run(tmp_path, "pass", without=["trackers"]).reward == 1.0


# ------------------------------------------------------------------------------------------------------ the core alone


ALONE = """
import asyncio, importlib.abc, sys
from pathlib import Path

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("astuner_") and not name.startswith("astuner_testing"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
from astuner.chat.codec import ChatCodec
from astuner.contracts.types import SamplingParams
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.runs import services
from astuner.testing import FakeEngine, check_environment, check_workflow, fake_config, make_tokenizer, workflow_task

config = fake_config(Path("."), "", ["astuner.rollout.workflow=flow.py->Flow"])
tokenizer = make_tokenizer()
models = one_model(FakeEngine(["fine"], tokenizer), ChatCodec(tokenizer))
print(asyncio.run(EpisodeRunner(config).run(workflow_task(), models, SamplingParams(max_tokens=100))).reward)
ours = {name.partition(".")[0] for name in sys.modules if name.startswith("astuner_") and "user" not in name}
print(ours - {"astuner_testing"})
"""


EVERYTHING = """
import importlib, importlib.abc, pkgutil, sys

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("astuner_"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Nothing())
import astuner

for module in pkgutil.walk_packages(astuner.__path__, "astuner."):
    if "__main__" not in module.name :
        importlib.import_module(module.name)
        print(module.name)
"""


def test_the_core_imports_no_package() -> None:
    done = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {"astuner.cli.run", "astuner.rollout.runner", "astuner.runs.launch"} <= set(done.stdout.split())


def test_an_episode_runs_where_no_package_but_the_core_can_be_imported(tmp_path: Path) -> None:
    body = "assert (await model_tuner.chat([{'role': 'user', 'content': 'hi'}])).text == 'fine'"
    (tmp_path / "flow.py").write_text(FLOW.format(body=body))
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split("\n") == ["1.0", "set()", ""], done.stdout + done.stderr
