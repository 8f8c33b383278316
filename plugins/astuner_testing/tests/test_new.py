"""`astuner new` writes what runs, and never over anything.

What it writes is installed, and its own tests are run, in tests/packaging.
"""

import ast
import collections
import json
import operator
import re
import subprocess
import sys
from importlib import metadata
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from astuner import load_config
from astuner.cli import main
from astuner.contracts import hookspecs
from astuner.contracts.errors import ConfigError, PluginError
from astuner.contracts.hookspecs import KINDS
from astuner.contracts.types import Split, WorkflowOutput
from astuner.testing import (
    check_advantages,
    check_environment,
    check_judge,
    check_loss,
    check_task_reader,
    check_workflow,
    workflow_task,
)
from astuner_testing import new
from astuner_testing.plugins import OF_NO_KIND
from tests.table import table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

PARAMETERS = get_command(new.app).commands["plugin"].params
ALL = tuple(option for p in PARAMETERS if getattr(p, "is_flag", False) for option in p.opts)
"""As typed, in the order of `new.MADE`."""


def run(*arguments):
    with pytest.raises(SystemExit) as e:
        main(["new", *arguments])
    return e.value.code or 0


@table("flags", [*((flag,) for flag in ALL), ALL], ids=lambda f: " ".join(f))
def test_a_plugin_is_well_formed(flags, tmp_path):
    assert run("plugin", "Fine_Shop", *flags, "--into", str(tmp_path)) == 0
    folder = tmp_path / "astuner-fine-shop"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "astuner-fine-shop"
    assert project["project"]["entry-points"]["astuner"] == {"fine-shop": "astuner_fine_shop.plugin"}
    for path in folder.rglob("*"):
        if path.is_file():
            assert "$" not in path.read_text().replace("${{", "")
    modules = [p for p in folder.rglob("*.py")]
    for path in modules:
        ast.parse(path.read_text())
        assert max(map(len, path.read_text().splitlines()), default=0) <= 120
    assert len([p for p in modules if p.parent.name == "tests"]) == 1 + len(flags)


def import_from(folder, name, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    for module in [m for m in sys.modules if m.partition(".")[0] == name.partition(".")[0]]:
        monkeypatch.delitem(sys.modules, module)
    return __import__(name, fromlist=["x"])


def test_every_hook_has_one():
    hooks = {name for name, of in vars(hookspecs).items() if hasattr(of, "astuner_spec")}
    assert hooks == {*KINDS.values(), *OF_NO_KIND, "list_models"}
    assert set(new.MADE) == {*KINDS, *new.OF_NO_KIND}
    assert len(ALL) == len(new.MADE)


@pytest.mark.slow
def test_its_parts_keep_to_the_contracts(tmp_path, monkeypatch):
    run("plugin", "shop", *ALL, "--into", str(tmp_path))
    folder = tmp_path / "astuner-shop"
    plugin = import_from(folder, "astuner_shop.plugin", monkeypatch)
    assert plugin.register_judges()["shop"].target == "astuner_shop.judge:ShopJudge"
    judge = import_from(folder, "astuner_shop.judge", monkeypatch).ShopJudge()
    output = WorkflowOutput(metadata={"final_answer": "yes"})
    assert check_judge(judge, workflow_task(answer="Yes"), output).reward == 1.0
    reader = import_from(folder, "astuner_shop.task_reader", monkeypatch).ShopTaskReader()
    assert check_task_reader(reader)[0].metadata["answer"]
    check_environment(import_from(folder, "astuner_shop.environment", monkeypatch).ShopEnvironment)
    assert plugin.register_losses()["shop"].target == "astuner_shop.loss:shop_loss"
    check_loss(import_from(folder, "astuner_shop.loss", monkeypatch).shop_loss)
    check_advantages(import_from(folder, "astuner_shop.advantages", monkeypatch).shop_advantages)
    workflow = import_from(folder, "astuner_shop.workflow", monkeypatch).ShopWorkflow
    assert check_workflow(workflow, workflow_task(), replies=["4"]).metadata == {"final_answer": "4"}


@pytest.fixture
def experiment(tmp_path, capsys):
    assert run("experiment", "My-Math", "--into", str(tmp_path)) == 0
    assert "astuner run" in capsys.readouterr().out
    return tmp_path / "my_math"


def test_an_experiment_is_complete(experiment):
    config = load_config(experiment / "my_math.yaml", backbone="local")
    assert config.astuner.rollout.workflow == "workflow.py->MyMathAgent"
    launch = json.loads((experiment / ".vscode" / "launch.json").read_text())["configurations"][0]
    assert launch["module"] == "astuner"
    assert launch["args"] == ["run", "${workspaceFolder}/my_math.yaml", "--backbone", "debug"]


def test_an_experiments_tasks_are_read_and_its_answers_are_right(experiment):
    from astuner.rollout.parts import build_task_reader

    reader = build_task_reader(load_config(experiment / "my_math.yaml"))
    tasks, held_out = check_task_reader(reader), list(reader.read(Split.VALIDATION))
    assert len(held_out) >= 64, "fewer cannot tell learning from chance"
    operators = {"now": operator.add, "total": operator.add, "coins each": operator.mul, "for each": operator.floordiv}
    for words, compute in operators.items():
        of_it = [[t for t in part if words in t.main_query] for part in (tasks, held_out)]
        trained, kept = ({tuple(sorted(numbers(t))) for t in part} for part in of_it)
        assert kept
        assert trained.isdisjoint(kept), "the numbers of a held-out task are in a training task with its sentence"
        for task in (*of_it[0], *of_it[1]):
            assert task.metadata["answer"] == f"\\boxed{{{compute(*numbers(task))}}}"


def numbers(task):
    return [int(digits) for digits in re.findall(r"\d+", task.main_query)]


def test_an_experiments_tasks_are_written_again_by_its_own_script(experiment):
    train = experiment / "data" / "train.jsonl"
    before = train.read_text()
    train.unlink()
    subprocess.run([sys.executable, "make_tasks.py"], cwd=experiment, check=True, capture_output=True)
    assert train.read_text() == before


@pytest.fixture
def sorting(tmp_path, capsys):
    assert run("experiment", "My-Mail", "--model", "some: model", "--into", str(tmp_path)) == 0
    return tmp_path / "my_mail"


def test_an_experiment_for_a_real_model_has_a_judge_of_its_own(sorting):
    config = load_config(sorting / "my_mail.yaml")
    assert config.astuner.model.path == "some: model"
    judge = config.resolve("judge", config.astuner.task_judge.judge)()
    task = workflow_task("My lamp leaks.", answer="defect")
    for answer, reward in (("Defect.", 1.0), ("payment", 0.0), ("a defect", 0.0)):
        assert check_judge(judge, task, WorkflowOutput(metadata={"final_answer": answer})).reward == reward
    workflow = config.resolve("workflow", config.astuner.rollout.workflow)
    assert check_workflow(workflow, task, replies=["defect"]).metadata == {"final_answer": "defect"}


def test_its_held_out_messages_are_of_every_kind_and_worded_otherwise(sorting):
    from astuner.rollout.parts import build_task_reader

    reader = build_task_reader(load_config(sorting / "my_mail.yaml"))
    tasks, held_out = check_task_reader(reader), list(reader.read(Split.VALIDATION))
    kinds = collections.Counter(task.metadata["answer"] for task in held_out)
    assert kinds == {"delivery": 27, "payment": 27, "defect": 27}
    things = "lamp|kettle|radio|drill|clock|fan|mixer|toaster|heater"
    frames, kept = ({re.sub(things, "", task.main_query) for task in part} for part in (tasks, held_out))
    assert frames.isdisjoint(kept)


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6 * 7"}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.parametrize(("replies", "reward"), [([CALL, "\\boxed{42}"], 1.0), (["\\boxed{13}"], 0.0), (["42"], 0.0)])
def test_an_experiments_workflow_calls_its_tool_and_rewards_right_answers(experiment, replies, reward):
    config = load_config(experiment / "my_math.yaml")
    workflow = config.resolve("workflow", config.astuner.rollout.workflow)
    task = workflow_task("Mia sells 6 books for 7 coins each. How many coins?", answer="\\boxed{42}")
    assert check_workflow(workflow, task, replies=replies).reward == reward


@pytest.fixture
def pretend(monkeypatch):
    """Let metadata report another AgentScope, or none."""

    def report(version):
        installed = metadata.version

        def other(name):
            if name == "agentscope" and version is None:
                raise metadata.PackageNotFoundError(name)
            return version if name == "agentscope" else installed(name)

        monkeypatch.setattr(metadata, "version", other)

    return report


NOTES = {
    "1.0.7": "workflow.py uses AgentScope 1.x (1.0.7 is installed)",
    "1.0.21": "workflow.py uses AgentScope 1.x (1.0.21 is installed)",
    "2.0.10": "workflow.py uses AgentScope 2.x (2.0.10 is installed)",
    None: "workflow.py uses AgentScope 2.x (install it: pip install astuner-agentscope)",
}


@pytest.mark.parametrize("version", NOTES)
def test_an_experiment_is_written_for_the_installed_agentscope(version, pretend, tmp_path, capsys):
    pretend(version)
    assert run("experiment", "sums", "--into", str(tmp_path)) == 0
    assert NOTES[version] in capsys.readouterr().out
    code = (tmp_path / "sums" / "workflow.py").read_text()
    agent = re.search("from agentscope.agent import (\\w+)", code)[1]
    assert agent == ("ReActAgent" if str(version).startswith("1.") else "Agent")
    major, other = ("1", "2") if agent == "ReActAgent" else ("2", "1")
    readme = (tmp_path / "sums" / "README.md").read_text()
    assert f"for AgentScope {major}.x" in readme
    assert f'"astuner-agentscope[agentscope{other}]"' in readme


@pytest.mark.parametrize("version", NOTES)
def test_an_experiment_for_a_real_model_needs_no_agentscope(version, pretend, tmp_path, capsys):
    pretend(version)
    assert run("experiment", "mail", "--model", "some-model", "--into", str(tmp_path)) == 0
    assert "AgentScope" not in capsys.readouterr().out
    assert "agentscope" not in (tmp_path / "mail" / "workflow.py").read_text()


@pytest.mark.slow
def test_an_experiment_for_the_other_agentscope_names_the_installed_version(pretend, tmp_path):
    installed = metadata.version("agentscope")
    pretend("2.0.10" if installed.startswith("1.") else "1.0.21")
    run("experiment", "sums", "--into", str(tmp_path))
    config = load_config(tmp_path / "sums" / "sums.yaml")
    with pytest.raises(PluginError) as raised:
        config.resolve("workflow", config.astuner.rollout.workflow)
    assert str(raised.value).startswith(f"{tmp_path / 'sums' / 'workflow.py'}:1: ")
    assert str(raised.value).endswith(
        f"(agentscope {installed} is installed; the file may be written for another version)"
    )


def test_the_help_states_for_which_agentscope_it_writes(capsys):
    run("experiment", "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "the installed AgentScope version, 2.x or 1.x" in text


@table("name", ["../up", "a/b", "/abs", "", ".hidden", "-x-", "1st", "a b", "ü", "a\n", "x" * 60, "a;b", "C:\\x"])
def test_what_is_no_name_is_refused(name, tmp_path, capsys):
    assert run("plugin", "--judge", "--into", str(tmp_path), "--", name) == 2
    assert run("experiment", "--into", str(tmp_path), "--", name) == 2
    assert "is not a valid name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=60))
def test_a_name_is_refused_or_one_safe_word(text):
    try:
        name = new.normal_name(text)
    except ConfigError:
        return
    assert name.replace("-", "").isalnum()
    assert name.isascii()
    assert name == name.lower()
    assert new.normal_name(name) == name


@table("name", ["core", "astuner", "astuner-core"])
def test_the_cores_name_is_taken(name, tmp_path, capsys):
    assert run("plugin", name, "--judge", "--into", str(tmp_path)) == 2
    assert "Choose another name" in capsys.readouterr().err


def test_a_plugin_holds_something(tmp_path, capsys):
    assert run("plugin", "shop", "--into", str(tmp_path)) == 2
    assert "--judge" in capsys.readouterr().err


def test_nothing_is_overwritten(tmp_path, capsys):
    mine = tmp_path / "astuner-shop" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert run("plugin", "shop", "--judge", "--into", str(tmp_path)) == 2
    assert "already exists" in capsys.readouterr().err
    assert [p.name for p in mine.parent.iterdir()] == ["mine.txt"]


def test_a_prefix_is_not_doubled(tmp_path):
    assert run("plugin", "astuner-shop", "--judge", "--into", str(tmp_path)) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["astuner-shop"]


def test_every_template_is_used(tmp_path):
    texts = {**new.plugin_files("shop", list(new.MADE)), **new.experiment_files("shop")}
    templates = files("astuner_testing") / "templates"
    there = [p for p in templates.rglob("*.template")]  # a real folder, in an editable install
    of_a_model = set(new.experiment_files("shop", "m")) - {".vscode/launch.json"}  # which both have
    hooks, plugins_have_a_readme_too, for_the_other_agentscope = 4, 1, 1
    assert len(there) == len(texts) + len(of_a_model) + hooks + plugins_have_a_readme_too + for_the_other_agentscope
