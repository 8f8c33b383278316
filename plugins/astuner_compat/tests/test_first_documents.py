"""What the first documents import and type: the same things as today's, each told of once."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from astuner import ConfigError, load_config, recorded_process
from astuner.cli import main, normalise
from astuner_compat.moved import ATTRIBUTES, SCATTERED
from tests.table import table

NAMES = [(module, name) for module, names in SCATTERED.items() for name in names]


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A process of its own, in which nothing is imported or told yet."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_a_name_of_a_module_that_is_gone_is_what_has_the_new_one():
    code = "from importlib import import_module as module\n" + "\n".join(
        f"assert module({at!r}).{name} is module({now.partition(':')[0]!r}).{now.partition(':')[2]}"
        for at, names in SCATTERED.items()
        for name, now in names.items()
        if not now.startswith(
            ("astuner_math", "astuner_datasets")
        )  # which are not all here, where this package is alone
    )
    said = python(code).stderr
    assert said.count("astuner.task_judge.judge_base.JudgeBase was renamed to astuner.Judge;") == 1
    with pytest.raises(AttributeError, match=r"'astuner\.task_judge\.judge_base' has no attribute 'Jury'"):
        __import__("astuner.task_judge.judge_base", fromlist=["Jury"]).Jury  # noqa: B018


def test_the_first_name_of_the_package_is_the_package_and_told_once():
    said = python(
        "import astune, astuner, astune.contracts.types, astuner.contracts.types\n"
        "from astune import Workflow\n"
        "assert Workflow is astuner.Workflow\n"
        "assert astune.contracts.types is astuner.contracts.types\n"
        "import astune.context_manager.cmt_agentscope, astune.context_tracker.agentscope"
    ).stderr
    assert said.count("the package astune was renamed to astuner") == 1
    assert said.count("astune.") == said.count("Warning: astune.") == 0


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    (tmp_path / "mine.yaml").write_text("astuner: {model: {path: m}}\n")
    return tmp_path / "mine.yaml"


def test_a_config_has_its_first_name_also_where_it_was_sent(experiment: Path):
    """A worker of Ray unpickles it, and has read no file."""
    (experiment.parent / "config").write_bytes(pickle.dumps(load_config(experiment)))
    said = python(
        "import pickle\nconfig = pickle.load(open('config', 'rb'))\n"
        "for _ in range(2):\n    assert config.astune is config.ajet is config.astuner"
    ).stderr
    assert said.count("<string>:4: FutureWarning: config.astune was renamed to config.astuner;") == 1
    with pytest.raises(AttributeError, match="'astuen'"):
        load_config(experiment).astuen  # noqa: B018
    assert list(ATTRIBUTES) == ["astuner.config.loaded.Config"]


@table(
    ("typed", "meant"),
    [
        ("--conf x.yaml --with-ray", "run x.yaml --with ray"),
        ("serve x.yaml --with-logview", "serve x.yaml --with logview"),
        ("--with-appworld", "env serve appworld"),
    ],
)
def test_what_is_typed_is_told_in_todays_words_once(typed: str, meant: str, capsys: pytest.CaptureFixture[str]):
    assert normalise(typed.split()) == meant.split()
    assert capsys.readouterr().err == f"note: the current command is: astuner {meant}\n"
    normalise(meant.split())
    assert capsys.readouterr().err == ""


def test_a_key_is_not_told(capsys: pytest.CaptureFixture[str]):
    words = ["astuner.helper_models.judge.api_key=sk-1", "a=1"]
    assert normalise(["--conf", "x.yaml", *words]) == ["run", "x.yaml", *words]
    said = "note: the current command is: astuner run x.yaml 'astuner.helper_models.judge.api_key=…' a=1\n"
    assert capsys.readouterr().err == said


def test_a_file_of_the_first_documents_is_found_in_a_checkout(experiment: Path):
    with pytest.raises(ConfigError, match=r"git-math-agentscope\.yaml .* examples/math_agent/math_agent\.yaml"):
        normalise(["--conf", "launcher/math_agent/git-math-agentscope.yaml"])
    (experiment.parent / "examples" / "math_agent").mkdir(parents=True)
    (experiment.parent / "examples" / "math_agent" / "math_agent.yaml").touch()
    words = normalise(["--conf", "launcher/math_agent/git-math-agentscope.yaml"])
    assert words == ["run", "examples/math_agent/math_agent.yaml"]


@pytest.fixture
def others(experiment: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Processes that are called python: of a run of this experiment, of another's, and of nobody that we know."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = {name: subprocess.Popen(sleep) for name in ("mine", "theirs", "nobody's")}
    record = experiment.parent / "launcher_record"
    (record / "theirs").mkdir(parents=True)
    with (
        recorded_process(started["mine"].pid, "a service", record / "mine"),
        recorded_process(started["theirs"].pid, "a service", record / "theirs"),
    ):
        yield started
    for process in started.values():
        process.kill()
        process.wait()


def left(others: dict[str, subprocess.Popen[bytes]]) -> list[str]:
    return [name for name, process in others.items() if process.poll() is None]


def test_kill_ends_what_runs_of_the_experiment_started_and_nothing_else(others, capsys: pytest.CaptureFixture[str]):
    words = ["--kill=python|ray|cron", "--conf", "mine.yaml", "--backbone", "nothing"]
    with pytest.raises(SystemExit):  # there is no such backbone; what it was asked for before has been done
        main(words)
    assert left(others) == ["theirs", "nobody's"]
    said = capsys.readouterr().err
    assert said.count("note: 'cron' is ignored: ") == 1
    assert said.count("astuner kill --run-dir DIR") == 1
    assert "astuner run mine.yaml --backbone nothing" in said


def test_a_killer_without_an_experiment_is_of_the_runs_in_this_folder(others, tmp_path: Path):
    killer = [os.path.join(os.path.dirname(sys.executable), "killer")]
    assert {"killer", "beast_logger_go"} <= {script.name for script in entry_points(group="console_scripts")}
    for name, after in (("cron", ["mine", "theirs", "nobody's"]), ("VLLM", ["mine", "nobody's"])):
        done = subprocess.run([*killer, name], capture_output=True, text=True, check=True)
        assert left(others) == after, done.stderr  # no folder of mine.yaml is there yet
