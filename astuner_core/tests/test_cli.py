"""The command line: spelling, exit codes, what goes where. What the commands do is tested where it is done."""

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

import astuner.runs
from astuner import Provider
from astuner.cli import COMMANDS, main, normalise
from astuner.contracts.commands import only_data_on_stdout
from astuner.contracts.errors import CheckpointError, ConfigError, Interrupted, RunError
from astuner.contracts.hookspecs import CommandProvider
from astuner.plugins.loader import Plugin, PluginStatus
from astuner.runs.launch import RunResult
from tests.table import table


@pytest.fixture
def astuner_command(capsys):
    """Run a command line; gives its exit code, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as e:
            main(list(arguments))
        shown = capsys.readouterr()
        return SimpleNamespace(code=e.value.code or 0, out=shown.out, err=shown.err)

    return run


@pytest.fixture
def fake_launch(monkeypatch):
    """Stands in for `astuner.runs.launch`: records what it is asked, prints a little, and returns something."""
    calls = []

    def run(path, overrides, **options):
        calls.append(("run", path, list(overrides), options))
        print("progress")
        metrics = {"reward": 0.5}
        return RunResult(run_dir=Path("runs/x"), metrics=metrics, text="the summary")

    module = SimpleNamespace(run=run, calls=calls)
    monkeypatch.setitem(sys.modules, "astuner.runs.launch", module)
    monkeypatch.setattr(astuner.runs, "launch", module, raising=False)
    return module


class FakeManager:
    """What `load_plugins` gives, with these plugins."""

    def __init__(self, *plugins):
        self.plugins = list(plugins)

    def check_disabled(self, names):
        pass

    def offers(self, kind):
        older = Provider(target="astuner_compat.spellings:Spellings")
        for one in (*self.plugins, plugin("compat", part={"older_spellings": older})):
            for name, provider in one.provides.get(kind, {}).items():
                yield one, name, provider


@pytest.fixture
def plugins_are(monkeypatch):
    def install(*plugins):
        monkeypatch.setattr("astuner.plugins.loader.load_plugins", lambda disabled: FakeManager(*plugins))

    return install


def plugin(name, status=PluginStatus.LOADED, reason="", **provides):
    kinds = {kind.replace("_", " "): offered for kind, offered in provides.items()}
    return Plugin(name, f"astuner-{name}", "1.0", f"astuner_{name}.plugin", status, reason, None, kinds)


# --------------------------------------------------------------------------------------------- spelling


@table(
    ("typed", "meant"),
    [
        (
            "--conf x.yaml --backbone trinity --with-ray --with-logview --with-appworld",
            "run x.yaml --backbone trinity --with ray --with logview --with appworld",
        ),
        ("--with-appworld --conf=x.yaml --backbone=debug", "run x.yaml --with appworld --backbone=debug"),
        ("--backbone debug --conf x.yaml", "run x.yaml --backbone debug"),
        ("run x.yaml --with-appworld a.b=1", "run x.yaml --with appworld a.b=1"),
        ("eval x.yaml --with-appworld", "eval x.yaml --with appworld"),
        ("chat x.yaml --with-appworld", "chat x.yaml --with appworld"),
        ("-p no:math --conf x.yaml", "-p no:math run x.yaml"),
        ("serve x.yaml --with-logview", "serve x.yaml --with logview"),
        ("--with-appworld", "env serve appworld"),
        ("--kill=python|ray", "killer python|ray"),
        ("--with-ray --kill python --conf x.yaml", "killer python --conf x.yaml --with-ray"),
        ("run x.yaml -p no:math", "-p no:math run x.yaml"),
        ("config check --with-x", "config check --with-x"),
        ("--help", "--help"),
        ("--version", "--version"),
        ("", ""),
    ],
)
def test_older_spellings_mean_the_same(typed, meant):
    assert normalise(typed.split()) == meant.split()


WORDS = [["run"], ["x.yaml"], ["a=1"], ["--with", "ray"], ["--with-ray"], ["-p", "no:math"], ["--json"], ["-v"]]


@given(st.lists(st.sampled_from(WORDS)))
def test_todays_spelling_is_left_as_it_is(given_words):
    rest = [word for words in given_words for word in words]
    once = normalise(["run", "x.yaml", *rest])
    assert normalise(once) == once
    words = [w for text in rest for w in (("--with", "ray") if text == "--with-ray" else (text,))]
    assert sorted(once) == sorted(["run", "x.yaml", *words])


@table(
    ("typed", "says"),
    [
        ("--backbone debug", "astuner run FILE --backbone debug"),
        ("--with-appworld --backbone debug", "astuner run FILE --with-appworld --backbone debug"),
        ("--kill", "astuner run FILE"),
    ],
)
def test_what_is_gone_says_what_to_type(astuner_command, typed, says):
    result = astuner_command(*typed.split())
    assert result.code == 2
    assert says in result.err
    assert result.out == ""


# ------------------------------------------------------------------------------------------------- run


def test_run_passes_on_what_was_asked(astuner_command, fake_launch, plugins_are):
    plugins_are(plugin("env", service={"appworld": Provider(target="json:loads")}))
    result = astuner_command(
        "-p", "no:math", "run", "x.yaml", "astuner.data.shuffle=false", "--backbone", "local", "--resume",
        "--with", "appworld", "--seed", "7", "--steps", "3", "--run-dir", "/tmp/007", "--dry-run",
        "--db=A|B", "--db-listen",
    )  # fmt: skip
    assert result.code == 0
    assert result.out == "progress\nthe summary\n"
    assert fake_launch.calls == [
        (
            "run",
            Path("x.yaml"),
            [
                "astuner.data.shuffle=false",
                "astuner.seed=7",
                "astuner.trainer_common.total_steps=3",
                'astuner.experiment_dir="/tmp"',
                'astuner.experiment_name="007"',
            ],
            {
                "backbone": "local",
                "resume": "must",
                "dry_run": True,
                "services": ("appworld",),
                "disabled_plugins": ("math",),
                "debug_tags": ("A|B",),
                "debug_listen": True,
            },
        )
    ]


@pytest.mark.parametrize(("flag", "meaning"), [((), "auto"), (("--resume",), "must"), (("--no-resume",), "never")])
def test_resume(astuner_command, fake_launch, flag, meaning):
    assert astuner_command("run", "x.yaml", *flag).code == 0
    assert fake_launch.calls[0][3]["resume"] == meaning


def test_the_seeds_spelling_is_the_same_run(astuner_command, fake_launch, plugins_are):
    plugins_are(plugin("env", service={"ray": Provider(target="json:loads")}))
    assert astuner_command("--conf", "x.yaml", "--backbone=trinity", "--with-ray").code == 0
    assert astuner_command("run", "x.yaml", "--backbone", "trinity", "--with", "ray").code == 0
    assert fake_launch.calls[0] == fake_launch.calls[1]


def test_with_json_stdout_is_one_document(astuner_command, fake_launch):
    result = astuner_command("run", "x.yaml", "--json")
    assert json.loads(result.out) == {"run_dir": "runs/x", "metrics": {"reward": 0.5}}
    assert "progress" in result.err


@table(
    ("service", "says"),
    [
        ("logview", "astuner-view"),
        ("appworld", "pip install astuner-appworld"),
    ],
)
def test_an_unknown_service_says_what_brings_it(astuner_command, fake_launch, plugins_are, service, says):
    plugins_are()
    result = astuner_command("run", "x.yaml", f"--with-{service}")
    assert result.code == 2
    assert re.search(rf"(service|environment).* {service!r}", result.err)
    assert says in result.err
    assert fake_launch.calls == []


def test_a_service_that_nobody_knows(astuner_command, fake_launch, plugins_are):
    plugins_are(plugin("env", service={"appworld": Provider(target="json:loads")}))
    result = astuner_command("run", "x.yaml", "--with", "apworld")
    assert "did you mean appworld" in result.err


def test_an_override_without_a_value(astuner_command, fake_launch):
    result = astuner_command("run", "x.yaml", "astuner.seed")
    assert result.code == 2
    assert "'astuner.seed' is not KEY=VALUE" in result.err


@table(
    ("error", "code"),
    [
        (ConfigError(["x.yaml:1:1: wrong", "x.yaml:2:1: wrong too"]), 2),
        (RunError("the disk is full"), 1),
        (CheckpointError("half a checkpoint"), 1),
        (Interrupted("stopped on request"), 130),
    ],
)
def test_an_error_is_one_paragraph_and_an_exit_code(astuner_command, fake_launch, error, code):
    def run(*_, **__):
        raise error

    fake_launch.run = run
    result = astuner_command("run", "x.yaml")
    assert result.code == code
    assert result.err == f"astuner: {error}\n"
    assert result.out == ""


def test_ctrl_c(astuner_command, fake_launch):
    def run(*_, **__):
        raise KeyboardInterrupt

    fake_launch.run = run
    assert astuner_command("run", "x.yaml").code == 130


def test_a_defect_keeps_its_traceback(fake_launch):
    def run(*_, **__):
        raise ZeroDivisionError

    fake_launch.run = run
    with pytest.raises(ZeroDivisionError):
        main(["run", "x.yaml"])


# -------------------------------------------------------------------------------------- help and plugins


def test_help_lists_every_command(astuner_command):
    shown = astuner_command("--help").out
    for name, summary in COMMANDS.items():
        assert f"{name} " in shown
        assert summary in shown


@table("name", COMMANDS)
def test_every_command_has_help(astuner_command, name):
    result = astuner_command(name, "--help")
    assert result.code == 0
    assert COMMANDS[name].split()[0] in result.out


def test_an_unknown_command_is_guessed(astuner_command):
    result = astuner_command("rum")
    assert result.code == 2
    assert "did you mean run?" in result.err


def test_version(astuner_command):
    assert astuner_command("--version").out == f"astuner {astuner.__version__}\n"


def test_p_only_turns_off(astuner_command):
    result = astuner_command("-p", "math", "plugins")
    assert result.code == 2
    assert "-p no:NAME" in result.err


@table(
    "command",
    [
        ("plugins",),
        ("config", "check", "x.yaml"),
        ("config", "explain", "seed"),
        ("run", "x.yaml"),
        ("eval", "x.yaml"),
        ("doctor",),
        ("a-plugins-own",),
    ],
)
def test_p_with_a_name_that_nothing_has(astuner_command, command):
    result = astuner_command("-p", "no:astuner-maht", *command)
    assert result.code == 2
    assert "unknown plugin or distribution 'astuner-maht'; did you mean astuner-math?" in result.err
    assert result.out == ""


greet = typer.Typer(add_completion=False, rich_markup_mode=None)


@greet.command()
def say(name: str):
    print(f"hello {name}")


sys.modules.setdefault("greeting_for_tests", SimpleNamespace(app=greet))


def test_a_plugins_command_is_listed_without_import_and_runs(astuner_command, plugins_are):
    there = Provider(target="greeting_for_tests:app", summary="say hello")
    plugins_are(plugin("x", command={"greet": there, "lost": Provider(target="no.such.module:app", summary="never")}))
    shown = astuner_command("--help").out
    assert "Commands from plugins" in shown
    assert "say hello" in shown
    assert astuner_command("greet", "Ada").out == "hello Ada\n"
    legacy = CommandProvider(target="greeting_for_tests:app", summary="say hello", hidden=True)
    plugins_are(plugin("x", command={"hail": legacy}))
    assert "hail" not in astuner_command("--help").out
    assert astuner_command("hail", "Ada").out == "hello Ada\n"


BROKEN = plugin("bad", PluginStatus.BROKEN, "ImportError: no acme")
FINE = plugin(
    "good",
    judge={
        "exact": Provider(target="json:loads", summary="equal", requires=("no_such_module",), install="pip install x")
    },
    workflow={"agent": Provider(target="json:loads")},
)


def test_plugins_as_a_table(astuner_command, plugins_are):
    models = replace(plugin("ship"), module=SimpleNamespace(list_models=lambda: ["small", "large"]))
    plugins_are(FINE, models, BROKEN)
    lines = astuner_command("plugins").out.splitlines()
    assert lines == [
        "good  astuner-good 1.0  workflow: agent · judge: exact",
        "ship  astuner-ship 1.0  model: small, large",
        "bad   astuner-bad 1.0   BROKEN  ImportError: no acme",
    ]
    assert json.loads(astuner_command("plugins", "--json").out)[1]["models"] == ["small", "large"]
    verbose = astuner_command("plugins", "-v").out
    assert "needs no_such_module: pip install x" in verbose
    assert "judge exact: equal  [json:loads]" in verbose


def test_plugins_as_json(astuner_command, plugins_are):
    plugins_are(FINE, BROKEN)
    good, bad = json.loads(astuner_command("plugins", "--json", "--hook", "judges").out)
    assert list(good["provides"]) == ["judge"]
    assert good["provides"]["judge"]["exact"]["missing"] == ["no_such_module"]
    assert (bad["status"], bad["reason"]) == ("broken", "ImportError: no acme")


def test_plugins_of_one_kind_and_strictly(astuner_command, plugins_are):
    plugins_are(FINE)
    assert astuner_command("plugins", "--strict").code == 0
    assert astuner_command("plugins", "--hook", "backbone").out == "No enabled plugin provides this kind.\n"
    assert "task reader" in astuner_command("plugins", "--hook", "nonsense").err
    plugins_are(FINE, BROKEN)
    assert astuner_command("plugins").code == 0
    assert astuner_command("plugins", "--strict").code == 1


# -------------------------------------------------------------------------------------------------- eval


def test_eval_passes_on_what_was_asked_and_shows_the_uncertainty(astuner_command, monkeypatch, plugins_are):
    from astuner.rollout.metrics import Evaluation

    part = {"environments": Provider(target="astuner_env.part:Environments")}
    measure = {"eval": Provider(target="astuner_debug.eval_command:measure")}
    plugins_are(
        plugin("env", environment={"lake": Provider(target="json:loads")}, part=part), plugin("debug", command=measure)
    )
    calls = []

    def evaluate(path, overrides, **options):
        calls.append((path, overrides, options))
        return Evaluation(
            tasks=10, repeat=2, success=0.5, ci_low=0.24, ci_high=0.76, pass_at_k=0.7, reward=0.45,
            unscored_tasks=2, failed_episodes=5,
        )  # fmt: skip

    monkeypatch.setattr("astuner_models.serving.evaluate", evaluate)
    result = astuner_command(
        "eval", "x.yaml", "astuner.seed=1", "--checkpoint", "base", "--tasks", "10", "--repeat", "2", "--with-lake"
    )
    assert calls == [
        (
            Path("x.yaml"),
            ["astuner.seed=1"],
            {
                "backbone": None,
                "checkpoint": "base",
                "tasks": 10,
                "repeat": 2,
                "services": ("lake",),
                "disabled_plugins": (),
            },
        )
    ]
    for part in ("base", "50.0 %", "24.0 %", "76.0 %", "10 of 12 tasks", "5 episodes failed", "0.450"):
        assert part in result.out
    shown = json.loads(astuner_command("eval", "x.yaml", "--json").out)
    assert (shown["checkpoint"], shown["success"], shown["ci_low"]) == ("best", 0.5, 0.24)


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_what_user_code_closes_is_open_again(monkeypatch, name):
    monkeypatch.setattr(sys, name, io.StringIO())
    with only_data_on_stdout(False):
        getattr(sys, name).close()
    assert getattr(sys, name).writable()
    assert getattr(sys, name).fileno() == {"stdout": 1, "stderr": 2}[name]
