"""The loader: every plugin is listed with its fate, and none touches another."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from astuner import Provider, hookimpl
from astuner.contracts import hookspecs
from astuner.contracts.errors import UnknownName
from astuner.plugins.loader import PluginManager, PluginStatus, load_plugins
from tests.table import table

HEAVY = ("torch", "transformers", "ray", "vllm", "verl", "trinity", "agentscope", "datasets", "openai", "rich")


class EntryPoint(SimpleNamespace):
    def load(self) -> Any:
        if isinstance(self.module, BaseException):
            raise self.module
        return self.module


def entry_point(name: str, dist: str, module: Any, requires: tuple[str, ...] = (), version: str = "1.0") -> EntryPoint:
    distribution = SimpleNamespace(name=dist, version=version, requires=list(requires))
    return EntryPoint(name=name, value=f"{name}.plugin", module=module, dist=distribution)


def module(**hooks: Any) -> ModuleType:
    made = ModuleType("plugin")
    for name, function in hooks.items():
        setattr(made, name, hookimpl(function))
    return made


def judges(**offered: Any) -> ModuleType:
    return module(register_judges=lambda: offered)


def provider(**options: Any) -> Provider:
    return Provider(target="json:loads", **options)


def boom() -> dict[str, Provider]:
    raise RuntimeError("boom")


def test_one_broken_plugin_never_stops_the_others():
    manager = PluginManager().load(
        [
            entry_point("a", "acme-a", ImportError("no acme")),
            entry_point("b", "acme-b", SystemExit(3)),
            entry_point("c", "acme-c", judges(c=provider())),
            entry_point("d", "acme-d", module(register_judges=lambda nope: {})),
            entry_point("e", "acme-e", module(register_judgez=lambda: {})),
            entry_point("f", "acme-f", module(register_workflows=boom)),
            entry_point("g", "acme-g", judges(g="x")),
            entry_point("h", "acme-h", judges(h=provider()), ("astuner-core<0.1", "torch>=2")),
            entry_point("i", "acme-i", judges(i=Provider(target="no attribute"))),
            entry_point("j", "acme-j", judges(**{"a/b": provider()})),
            entry_point("k", "acme-k", judges(k=provider()), ("not a requirement!",)),
            entry_point("l", "acme-l", module(register_parts=lambda: {"endpont": provider()})),
        ]
    )
    found = {p.name: (p.status.value, p.reason) for p in manager.plugins}
    assert found["a"] == ("broken", "ImportError: no acme")
    assert found["b"] == ("broken", "SystemExit: 3")
    assert found["c"] == ("loaded", "")
    assert "can not be found in the hookspec" in found["d"][1]
    assert "'register_judgez', which is not a hook of astuner-core" in found["e"][1]
    assert found["f"] == ("broken", "RuntimeError: boom")
    assert "must return a dict of name -> Provider" in found["g"][1]
    assert found["h"] == ("incompatible", "needs astuner-core<0.1, but 0.1.0 is installed")
    assert "write 'package.module:attribute'" in found["i"][1]
    assert "'a/b'" in found["j"][1]
    assert found["k"][0] == "incompatible"
    assert "unknown part 'endpont'; did you mean endpoint?" in found["l"][1]
    assert [name for _, name, _ in manager.offers("judge")] == ["c"]


@table(("kind", "hook"), hookspecs.KINDS.items())
def test_every_kind_is_collected(kind: str, hook: str):
    thing = "endpoint" if kind == "part" else "thing"  # the core fixes the names of parts
    manager = PluginManager().load([entry_point("p", "acme", module(**{hook: lambda: {thing: provider()}}))])
    assert [(plugin.dist, name) for plugin, name, _ in manager.offers(kind)] == [("acme", thing)]


def test_what_a_plugin_offers_may_stand_in_a_file(tmp_path: Path):
    text = """
        [judge.polite]
        target = "acme.judges:Polite"
        requires = ["acme"]
        [task_reader."a b"]
        target = "acme.readers:Reader"
        [environment.lake]
        target = "acme.worlds:Lake"
        memory_mb = 40
        [loss.mine]
        target = "acme.losses:mine"
        implies = {clip_ratio_low = 0.1}
        [aliases.task_reader]
        "a b" = ["ab", "a_b"]
    """
    (tmp_path / "plugin.toml").write_text(text)
    made = ModuleType("plugin")
    made.__file__ = str(tmp_path / "__init__.py")
    (found,) = PluginManager().load([entry_point("acme", "acme", made)]).plugins
    assert found.provides == {
        "judge": {"polite": Provider(target="acme.judges:Polite", requires=("acme",))},
        "task reader": {"a b": Provider(target="acme.readers:Reader", aliases=("ab", "a_b"))},
        "environment": {"lake": hookspecs.EnvironmentProvider(target="acme.worlds:Lake", memory_mb=40)},
        "loss": {"mine": hookspecs.LossProvider(target="acme.losses:mine", implies={"clip_ratio_low": 0.1})},
    }


@table(
    ("text", "reason"),
    [
        ("[juge.polite]\ntarget = 'a:b'\n", "unknown kind juge; use one of task_reader, workflow, judge"),
        ("[judge.polite]\ntarget = 'a:b'\nsumary = ''\n", "[judge.polite]: unknown key 'sumary'; did you mean summary"),
        ("[judge.polite]\nsummary = ''\n", "[judge.polite]: target is missing"),
        ("[judge]\npolite = 'a:b'\n", "[judge.polite]: target is missing"),
        ("[judge.polite\n", "plugin.toml: Expected"),
    ],
)
def test_a_file_that_cannot_be_read_says_where(text: str, reason: str, tmp_path: Path):
    (tmp_path / "plugin.toml").write_text(text)
    made = ModuleType("plugin")
    made.__file__ = str(tmp_path / "__init__.py")
    (found,) = PluginManager().load([entry_point("acme", "acme", made)]).plugins
    assert found.status is PluginStatus.BROKEN
    assert reason in found.reason


def test_two_distributions_with_one_plugin_name_are_both_refused():
    both = [
        entry_point("math", "astuner-math", judges(a=provider())),
        entry_point("math", "acme-math", judges(b=provider())),
    ]
    manager = PluginManager().load(both)
    assert {p.status for p in manager.plugins} == {PluginStatus.DUPLICATE}
    assert manager.plugins[0].reason.startswith("astuner-math uses the same plugin name 'math'")
    assert manager.plugins[0].reason.endswith("-p no:acme-math")

    manager = PluginManager(["acme-math"]).load(both)
    assert {p.dist: p.status for p in manager.plugins} == {
        "acme-math": PluginStatus.DISABLED,
        "astuner-math": PluginStatus.LOADED,
    }


def test_a_plugin_is_disabled_by_plugin_or_distribution_name_and_misspelt_names_are_told():
    eps = [entry_point("math", "astuner-math", judges(a=provider())), entry_point("b", "acme", judges(b=provider()))]
    manager = PluginManager(["math", "acme", "mth"]).load(eps)
    assert {p.status for p in manager.plugins} == {PluginStatus.DISABLED}
    manager.check_disabled(["math", "acme"])
    with pytest.raises(UnknownName, match=r"-p no:mth: unknown plugin .* 'mth'; did you mean math\?"):
        manager.check_disabled(["math", "mth"])


def test_nobody_takes_the_place_of_the_core(monkeypatch: pytest.MonkeyPatch):
    eps = [entry_point("core", "acme", judges(mine=provider()))]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: eps)
    manager = PluginManager().load()
    assert {p.dist: p.status for p in manager.plugins} == {
        "astuner-core": PluginStatus.LOADED,
        "acme": PluginStatus.DUPLICATE,
    }


def test_load_plugins_is_cached_per_disabled_set(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ASTUNER_DISABLE_PLUGINS", raising=False)
    everything = load_plugins()
    assert everything is load_plugins(())
    monkeypatch.setenv("ASTUNER_DISABLE_PLUGINS", "math, local")
    without = load_plugins()
    assert without is load_plugins(["math"])
    assert without is not everything
    assert {p.name for p in without.plugins if p.status is PluginStatus.DISABLED} == {"math", "local"}


def test_the_core_is_a_plugin_like_any():
    names = {(kind, name) for kind in hookspecs.KINDS for _, name, _ in load_plugins().offers(kind)}
    assert {("task reader", "jsonl"), ("task reader", "huggingface"), ("backbone", "debug")} <= names
    assert load_plugins().plugins[0].name == "core"
    assert "jsonl" not in [name for _, name, _ in PluginManager(["core"]).load().offers("log sink")]


def test_hook_calls_can_be_traced(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("ASTUNER_TRACE_PLUGINS", "1")
    PluginManager().load([entry_point("c", "acme", judges(exact=provider()))])
    err = capsys.readouterr().err
    assert "register_judges [hook]" in err
    assert "'exact'" in err


def test_a_question_with_one_answer():
    first = module(locate_model=lambda path: None)
    second = module(locate_model=lambda path: f"/models/{path}")
    manager = PluginManager().load([entry_point("a", "a", first), entry_point("b", "b", second)])
    assert manager.hook.locate_model(path="x") == "/models/x"


def test_every_hook_is_documented_and_every_kind_has_one():
    specs = {name: f for name, f in vars(hookspecs).items() if hasattr(f, "astuner_spec")}
    kinds = {name for name in specs if name.startswith("register_")} - {"register_aliases"}
    assert set(hookspecs.KINDS.values()) == kinds
    listed = yaml.safe_load(Path(hookspecs.__file__).with_name("hooks.yaml").read_text())
    assert set(listed) == kinds
    for name, function in specs.items():
        assert listed.get(name, inspect.getdoc(function) or "").splitlines()[0].endswith("."), name


def test_loading_all_installed_plugins_imports_nothing_heavy():
    code = f"""
import sys
from astuner.plugins.loader import load_plugins
bad = [(p.name, p.status.value, p.reason) for p in load_plugins().plugins if p.status.value != "loaded"]
heavy = [name for name in {HEAVY!r} if name in sys.modules]
print(bad, heavy)
sys.exit(bool(bad or heavy))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
