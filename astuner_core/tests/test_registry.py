"""From a name to an object: registered names, and code of the user's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from astuner import Provider, hookimpl
from astuner.contracts import errors
from astuner.contracts.task_reader import TaskReader
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager, load_plugins
from tests.table import table

WORKFLOW = "class Flow:\n    where = {!r}\n"


@pytest.fixture(autouse=True)
def _own_modules() -> Iterator[None]:
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        del sys.modules[name]
    sys.path[:] = path


def plugin(name: str, dist: str, **hooks: dict[str, Provider]) -> Any:
    made = ModuleType(name)
    for hook, offered in hooks.items():
        setattr(made, hook, hookimpl(lambda offered=offered: offered))
    distribution = SimpleNamespace(name=dist, version="1.0", requires=[])
    return SimpleNamespace(name=name, value=name, dist=distribution, load=lambda: made)


def judges(*names: str, **options: Any) -> dict[str, dict[str, Provider]]:
    return {"register_judges": {name: Provider(target=f"json:{name}", **options) for name in names}}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def manager() -> PluginManager:
    alias = "astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge"
    return PluginManager().load(
        [
            plugin("math", "astuner-math", **judges("loads", aliases=(alias, "older"))),
            plugin("acme", "astuner-acme", **judges("loads", "exact")),
        ]
    )


# ------------------------------------------------------------------ registered names


def test_a_name_that_two_plugins_register_is_refused_and_qualified_it_works(manager: PluginManager):
    with pytest.raises(errors.AmbiguousName) as e:
        registry.find_provider(manager, "judge", "loads")
    assert str(e.value) == "2 plugins register the judge 'loads'; write acme/loads or math/loads"
    offer = registry.find_offer(manager, "judge", "math/loads")
    assert (offer.plugin.dist, offer.full_name) == ("astuner-math", "math/loads")
    assert registry.find_offer(manager, "judge", "exact").full_name == "exact"


@table(
    "spelling",
    [
        "astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge",
        "astuner.task_judge.math_answer_as_judge:MathAnswerAsJudge",
        "astune.task_judge.math_answer_as_judge->MathAnswerAsJudge",
        "older",
    ],
)
def test_older_spellings_find_their_provider(manager: PluginManager, spelling: str):
    assert registry.find_offer(manager, "judge", spelling).plugin.name == "math"


def test_a_real_name_wins_over_an_older_spelling_of_another():
    manager = PluginManager().load(
        [plugin("a", "a", **judges("new", aliases=("old",))), plugin("b", "b", **judges("old"))]
    )
    assert registry.find_offer(manager, "judge", "old").plugin.name == "b"


@table(
    ("kind", "name", "message"),
    [
        ("judge", "exct", "unknown judge 'exct'; did you mean exact?"),
        (
            "backbone",
            "trinity",
            "unknown backbone 'trinity'; install it: pip install astuner-trinity",
        ),
        ("backbone", "verl", "unknown backbone 'verl'; install it: pip install astuner-verl"),
        ("backbone", "nope", "unknown backbone 'nope'; installed: none"),
        ("workflow", "exact", "unknown workflow 'exact'; this is the name of a judge"),
        ("judge", "acme/nope", "unknown judge 'acme/nope'; installed: exact, loads"),
    ],
)
def test_an_unknown_name_says_what_to_type(manager: PluginManager, kind: str, name: str, message: str):
    with pytest.raises(errors.UnknownName) as e:
        registry.find_provider(manager, kind, name)
    assert str(e.value) == message


def test_a_name_of_ours_whose_plugin_is_missing_or_broken_says_so():
    reference = "astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge"
    with pytest.raises(errors.UnknownName, match="pip install astuner-math"):
        registry.resolve(PluginManager(), "judge", reference)
    broken = plugin("math", "astuner-math")
    broken.load = lambda: (_ for _ in ()).throw(ImportError("no acme_lib"))
    with pytest.raises(errors.UnknownName, match=r"math \(astuner-math 1.0\) is broken: ImportError: no acme_lib"):
        registry.resolve(PluginManager().load([broken]), "judge", "math_answer")


def test_what_is_missing_of_a_package_that_is_there_or_not():
    needs = Provider(target="a:b", requires=("json.decoder", "json.no_such", "no_such.module.here"))
    assert registry.missing_modules(needs) == ["json.no_such", "no_such.module.here"]


def test_what_a_provider_needs_and_cannot_live_with():
    needs = Provider(target="a:b", requires=("no_such_module_here",), install="pip install acme")
    with pytest.raises(errors.MissingDependency) as e:
        registry.check_installed("judge", "x", needs)
    assert str(e.value).endswith("needs no_such_module_here, which is not installed; install it: pip install acme")
    alone = Provider(target="a:b", conflicts=("pluggy",), requires=("no_such_module_here",), install="pip install acme")
    with pytest.raises(errors.PluginError, match="cannot share an environment with pluggy") as e:
        registry.check_installed("judge", "x", alone)  # said first: what is missing belongs into another environment
    assert "python3 -m venv .venv-x && . .venv-x/bin/activate, then in it: pip install acme" in str(e.value)
    assert str(e.value).endswith("pip uninstall pluggy")
    registry.check_installed("judge", "x", Provider(target="a:b", requires=("json.decoder",)))


def test_a_target_is_imported_and_is_of_its_kind(manager: PluginManager):
    import json

    assert registry.resolve(manager, "judge", "acme/loads") is json.loads
    with pytest.raises(errors.UnknownName, match="json has no 'exact'"):
        registry.resolve(manager, "judge", "exact")
    with pytest.raises(errors.PluginError, match="must be a subclass of TaskReader"):
        registry.resolve(manager, "task reader", "json->loads")
    reader = registry.resolve(load_plugins(), "task reader", "jsonl")
    assert issubclass(reader, TaskReader)


def test_a_target_that_cannot_be_imported_is_a_plugin_error():
    with pytest.raises(errors.PluginError, match="no_such_package:X cannot be imported: ModuleNotFoundError"):
        registry.import_target("no_such_package:X")


# ------------------------------------------------------------------ the user's own code


@table("separator", ["->", ":"])
def test_a_file_is_found_beside_the_experiment_before_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, separator: str
):
    write(tmp_path / "exp" / "flow.py", WORKFLOW.format("experiment"))
    write(tmp_path / "cwd" / "flow.py", WORKFLOW.format("cwd"))
    write(tmp_path / "cwd" / "sub" / "only.py", WORKFLOW.format("only cwd"))
    monkeypatch.chdir(tmp_path / "cwd")

    def get(reference: str, base_dir: Path | None) -> str:
        return registry.resolve(PluginManager(), "workflow", reference, base_dir=base_dir).where

    assert get(f"flow.py{separator}Flow", tmp_path / "exp") == "experiment"
    assert get(f"flow.py{separator}Flow", None) == "cwd"
    assert get(f"sub/only.py{separator}Flow", tmp_path / "exp") == "only cwd"
    assert get(f"{tmp_path / 'exp' / 'flow.py'}{separator}Flow", None) == "experiment"


def test_a_file_is_loaded_once_and_another_of_its_name_is_not_mistaken_for_it(tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / name / "flow.py", WORKFLOW.format(name))
    first = registry.resolve(PluginManager(), "workflow", "flow.py->Flow", base_dir=tmp_path / "a")
    second = registry.resolve(PluginManager(), "workflow", "flow.py->Flow", base_dir=tmp_path / "b")
    assert (first.where, second.where) == ("a", "b")
    assert registry.resolve(PluginManager(), "workflow", "flow.py->Flow", base_dir=tmp_path / "a") is first


@pytest.mark.parametrize("cwd", ["project", "elsewhere"])
def test_the_quick_starts_reference_works_with_the_yaml_inside_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cwd: str
):
    here = tmp_path / "project" / "my_math_agent"
    write(here / "my_math_agent.py", "from my_math_agent.tools import where\nclass Flow:\n    where = where\n")
    write(here / "tools.py", "where = 'tools'\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / cwd)
    flow = registry.resolve(PluginManager(), "workflow", "my_math_agent.my_math_agent->Flow", base_dir=here)
    assert flow.where == "tools"
    assert flow.__module__ == "my_math_agent.my_math_agent"
    with pytest.raises(errors.UnknownName, match="did you mean Flow"):
        registry.resolve(PluginManager(), "workflow", "my_math_agent.my_math_agent->Flw", base_dir=here)


def test_the_users_folder_is_importable_but_behind_everything_installed(tmp_path: Path):
    write(tmp_path / "flow.py", "import json, beside\nclass Flow:\n    where = (json.__file__, beside.x)\n")
    write(tmp_path / "beside.py", "x = 1\n")
    write(tmp_path / "json.py", "raise RuntimeError('shadowed')\n")
    before = list(sys.path)
    where = registry.resolve(PluginManager(), "workflow", "flow.py->Flow", base_dir=tmp_path).where
    assert str(tmp_path) not in where[0]
    assert where[1] == 1
    added = [folder for folder in sys.path if folder not in before and "astuner-user-code-" not in folder]
    assert added == [str(tmp_path)]
    assert sys.path[: len(before)] == before


def test_a_module_of_another_experiment_is_never_reused(tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / name / "exp" / "flow_of_mine.py", WORKFLOW.format(name))

    def get(reference: str, name: str) -> str:
        return registry.resolve(PluginManager(), "workflow", reference, base_dir=tmp_path / name / "exp").where

    assert get("flow_of_mine->Flow", "a") == "a"
    with pytest.raises(errors.PluginError) as e:
        get("flow_of_mine->Flow", "b")
    file = tmp_path / "b" / "exp" / "flow_of_mine.py"
    assert f"means {file}, but" in str(e.value)
    assert str(e.value).endswith(f"write {file}->Flow")
    assert get(f"{file}->Flow", "b") == "b"


def test_a_module_that_shares_its_name_with_the_standard_library_is_told(tmp_path: Path):
    write(tmp_path / "math" / "agent.py", WORKFLOW.format("mine"))
    with pytest.raises(errors.PluginError, match=r"already .*math.*; write .*agent.py->Flow"):
        registry.resolve(PluginManager(), "workflow", "math.agent->Flow", base_dir=tmp_path)


def test_the_users_own_file_wins_over_a_plugins_older_spelling(tmp_path: Path):
    write(tmp_path / "tutorial" / "math_agent.py", WORKFLOW.format("mine"))
    flows = {"register_workflows": {"x": Provider(target="json:loads", aliases=("tutorial.math_agent->Flow",))}}
    manager = PluginManager().load([plugin("p", "p", **flows)])
    assert registry.resolve(manager, "workflow", "tutorial.math_agent->Flow", base_dir=tmp_path).where == "mine"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("x = 1\nimport no_such_thing_here\n", 2, "is no_such_thing_here installed in this environment?"),
        ("def f():\n    raise ValueError('bad luck')\n\nf()\n", 2, "ValueError: bad luck"),
        ("x = 1\n\nclass Flow(:\n", 3, "SyntaxError"),
        ("raise SystemExit(3)\n", 1, "SystemExit: 3"),
    ],
)
@pytest.mark.parametrize("reference", ["broken_flow.py->Flow", "broken_flow->Flow"])
def test_code_that_raises_names_its_line_and_can_be_tried_again(
    tmp_path: Path, text: str, line: int, message: str, reference: str
):
    file = write(tmp_path / "broken_flow.py", text)
    with pytest.raises(errors.PluginError) as e:
        registry.resolve(PluginManager(), "workflow", reference, base_dir=tmp_path)
    assert str(e.value).startswith(f"{file}:{line}: importing '{reference}' failed: ")
    assert message in str(e.value)
    write(file, WORKFLOW.format("mended") + f"# {'longer than before ' * 20}")
    assert registry.resolve(PluginManager(), "workflow", reference, base_dir=tmp_path).where == "mended"


def test_a_missing_file_or_module_says_where_was_looked(tmp_path: Path):
    write(tmp_path / "workflow.py", "class MathAgentWorkflow:\n    pass\n")
    with pytest.raises(errors.UnknownName, match=r"no such file: .*nope\.py"):
        registry.resolve(PluginManager(), "workflow", "nope.py->X", base_dir=tmp_path)
    with pytest.raises(errors.UnknownName) as e:
        registry.resolve(PluginManager(), "workflow", "math_agent.math_agent->MathAgentWorkflow", base_dir=tmp_path)
    assert str(tmp_path) in str(e.value)
    assert str(e.value).endswith("did you mean workflow.py->MathAgentWorkflow?")


def test_the_quick_starts_own_spelling_finds_the_one_file_of_its_folder_that_defines_the_class(tmp_path: Path):
    folder = tmp_path / "math_agent"
    folder.mkdir()
    file = write(
        folder / "workflow.py", WORKFLOW.format("quick start").replace("class Flow", "class MathAgentWorkflow")
    )
    found = registry.resolve(PluginManager(), "workflow", "math_agent.math_agent->MathAgentWorkflow", base_dir=folder)
    assert found.where == "quick start"
    write(folder / "other.py", file.read_text())
    with pytest.raises(errors.UnknownName, match=r"did you mean other\.py"):  # two of them: no guess
        registry.resolve(PluginManager(), "workflow", "math_agent.math_agent->MathAgentWorkflow", base_dir=folder)
