"""What the pages say is true: code runs, YAML loads, commands parse, links lead somewhere, generated parts are current.

A fenced block is marked by HTML comments in the lines before it: ``runnable`` (run, in the order of the page; a
``text`` block behind it is what it prints), ``file: PATH`` (part of the project that the page builds, which is run),
``wrong: FILE`` (a config that is refused with the ``text`` block behind it).
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.table import table

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / f"{name}.md" for name in ("CODE_OF_CONDUCT", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(p for p in (ROOT / "plugins").rglob("README.md") if "node_modules" not in p.parts),
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "examples" / "plugins").glob("*/README.md")),
]


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    marks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[Block]:
    marks: list[str] = []
    lines = iter(enumerate(page.read_text(encoding="utf-8").splitlines(), start=1))
    for number, line in lines:
        if mark := re.fullmatch(r"<!-- (.+) -->", line):
            marks.append(mark[1])
        elif line.startswith("```"):
            text = []
            for _, inner in lines:
                if inner == "```":
                    break
                text.append(inner + "\n")
            else:
                raise AssertionError(f"{name_of(page)}:{number}: this block has no end")
            yield Block(page, number, line[3:], "".join(text), tuple(marks))
            marks = []
        elif line:
            marks = []


BLOCKS = [block for page in PAGES for block in blocks(page)]
FIRST = ROOT / "docs" / "tutorials" / "math_agent.md"
BEHIND = dict(itertools.pairwise(BLOCKS))
RUNNABLE = sorted({b.page for b in BLOCKS if "runnable" in b.marks})


def of(language: str, *, wrong: bool = False) -> list[Any]:
    found = [b for b in BLOCKS if b.language == language and any(m.startswith("wrong: ") for m in b.marks) == wrong]
    return [pytest.param(b, id=str(b)) for b in found]


def files_of(page: Path, folder: Path) -> None:
    """Write the project that ``page`` builds."""
    for block in BLOCKS:
        for mark in block.marks:
            if block.page == page and mark.startswith("file: "):
                path = folder / mark.removeprefix("file: ")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(block.text, encoding="utf-8")


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The installed plugins, with that of docs/plugins.md and the third-party example as if they were installed."""
    from astuner.plugins.loader import PluginManager, _cached

    folder = tmp_path_factory.mktemp("installed")
    files_of(ROOT / "docs" / "plugins.md", folder)
    for name in ("tone", "acme"):
        info = folder / f"astuner_{name}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: astuner-{name}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[astuner]\n{name} = astuner_{name}.plugin\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "plugins" / "astuner-acme"))
        patch.syspath_prepend(str(folder))
        manager = PluginManager().load()
        assert {p.name: p.reason for p in manager.plugins if p.name in ("tone", "acme")} == {"tone": "", "acme": ""}
        yield manager
        for module in [m for m in sys.modules if m.startswith(("astuner_tone", "astuner_acme"))]:
            del sys.modules[module]
        _cached.cache_clear()  # what asked for plugins meanwhile found these two


# ---------------------------------------------------------------------------------------------------------------- code


@table("block", of("python"))
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@table("page", RUNNABLE, ids=name_of)
def test_runnable_blocks_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path))  # where helper models keep their answers
    names: dict[str, Any] = {"__name__": "page"}
    sys.modules["page"] = type(sys)("page")  # where pydantic looks for the names of annotations
    try:
        for block in BLOCKS:
            if block.page == page and "runnable" in block.marks:
                printed = io.StringIO()
                with redirect_stdout(printed):
                    exec(compile(block.text, str(block), "exec"), names)
                if printed.getvalue():
                    assert BEHIND[block].language == "text", f"{block} prints, and the page does not say what"
                    assert printed.getvalue() == BEHIND[block].text
    finally:
        del sys.modules["page"]


@table("block", of("json"))
def test_json_is_json(block: Block) -> None:
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())


# -------------------------------------------------------------------------------------------------------------- config


@table("block", [p for p in of("yaml") if "astuner:" in p.values[0].text])
def test_yaml_loads(block: Block, plugins: Any, tmp_path: Path) -> None:
    from astuner import load_config

    file = tmp_path / "experiment.yaml"
    file.write_text(block.text, encoding="utf-8")
    given = "path:" in block.text.partition("model:")[2].partition("\n\n")[0]
    load_config(file, [] if given else ["astuner.model.path=tiny-calculator"], backbone="local", plugins=plugins)


@table("block", of("yaml", wrong=True))
def test_a_wrong_config_is_refused_in_the_words_of_the_page(block: Block, tmp_path: Path, plugins: Any) -> None:
    from astuner import ConfigError, load_config
    from astuner.config.capabilities import check_capabilities

    name = next(mark.removeprefix("wrong: ") for mark in block.marks if mark.startswith("wrong: "))
    (tmp_path / name).write_text(block.text, encoding="utf-8")

    def check() -> None:
        config = load_config(tmp_path / name, backbone="local", plugins=plugins)
        check_capabilities(config, config.resolve("backbone", "local").capabilities)

    with pytest.raises(ConfigError) as refused:
        check()
    assert BEHIND[block].text.removeprefix("astuner: ").rstrip() == str(refused.value).replace(f"{tmp_path}/", "")


# ------------------------------------------------------------------------------------------------------------ commands


def commands() -> list[Any]:
    """Every `astuner …`, `make …` and `pip install …` of the pages: lines of blocks, and code in sentences."""
    found: dict[tuple[str, bool], str] = {}
    for page in PAGES:
        for block in BLOCKS:
            if block.page == page and block.language in ("bash", "text", ""):
                found.update({(line, True): str(block) for line in block.text.splitlines() if COMMAND.match(line)})
        for line in re.findall(r"`([^`]+)`", prose(page)):
            if COMMAND.match(line):
                found.setdefault((" ".join(line.split()), False), name_of(page))
    return [pytest.param(line, whole, id=f"{place}: {line}") for (line, whole), place in found.items()]


COMMAND = re.compile(r"(astuner|make|pip install) ")
SHELL = (">", "2>&1", "<", "|")
"""What ends a command's own arguments."""


@pytest.mark.slow
@pytest.mark.parametrize(("line", "whole"), commands())
def test_a_command_exists(line: str, whole: bool, plugins: Any) -> None:
    program, *arguments = shlex.split(line.rstrip("…"), comments=True)
    if program == "make":
        targets = {word for word in arguments if "=" not in word}
        assert targets <= set(read("Makefile").partition(".PHONY:")[2].partition("\n")[0].split())
        subprocess.run(["make", "-n", *arguments], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        _check_requirements(arguments[1:])
    else:
        try:
            _parse([*itertools.takewhile(lambda word: word not in SHELL, arguments)], plugins)
        except Exception as e:
            # A sentence may name a command without its arguments; the class is typer's own copy of click's.
            if whole or type(e).__name__ not in ("MissingParameter", "NoArgsIsHelpError"):
                raise


def _parse(arguments: list[str], plugins: Any) -> None:
    """What the program does with its command line, short of running the command; keys must exist."""
    import typer

    from astuner.cli import app, normalise
    from astuner.plugins.registry import known_plugins
    from astuner_debug.explain_command import find_key

    command: Any = typer.main.get_command(app)
    name, rest, context = "astuner", normalise(arguments), None
    try:
        while True:
            context = command.make_context(name, list(rest), parent=context)
            if not hasattr(command, "resolve_command"):
                break
            name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    except typer.Exit:  # --help, --version
        return
    parameters = context.params
    for override in parameters.get("overrides") or ():
        if override != "KEY=VALUE":
            find_key(override.partition("=")[0], plugins)
    if isinstance(key := parameters.get("key"), str) and key != "KEY":
        find_key(key, plugins)
    if isinstance(backbone := parameters.get("backbone"), str) and backbone != "NAME":
        known = {name for kind, name in known_plugins() if kind == "backbone"}  # verl has an environment of its own
        assert backbone in known | {offered for _, offered, _ in plugins.offers("backbone")}


def _check_requirements(arguments: list[str]) -> None:
    """Folders and packages of this repository have the extras that are asked for; files are there."""
    for flag, text in zip(["", *arguments], arguments, strict=False):
        folder, _, extras = text.partition("[")
        if flag == "-r":
            assert (ROOT / text).is_file(), text
        if re.fullmatch(r"astuner-[a-z-]+", folder) and folder != "astuner-core":
            folder = f"plugins/{folder.replace('-', '_')}"
            assert (ROOT / folder).is_dir() or folder.endswith(("_acme", "_tone", "_vault")), text  # third parties
        if text.startswith("-"):
            continue
        if (project := ROOT / folder.removeprefix("astuner-core") / "pyproject.toml").is_file():
            known = project.read_text(encoding="utf-8").partition("[project.optional-dependencies]")[2]
            for extra in filter(None, extras.rstrip("]").split(",")):
                assert re.search(rf"^{extra} = \[", known, re.MULTILINE), f"{folder} has no extra {extra}"


# ----------------------------------------------------------------------------------------------------- what one builds


@pytest.fixture
def agent_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the README tells to write, with the files as it prints them; the current folder."""
    from astuner.cli import main

    with pytest.raises(SystemExit) as made:
        main(["new", "experiment", "my_agent", "--into", str(tmp_path)])
    assert not made.value.code
    folder = tmp_path / "my_agent"
    written = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()}
    files_of(ROOT / "README.md", tmp_path)
    printed = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*") if path.is_file()}
    assert printed == written, "the README prints what `astuner new experiment my_agent` writes"
    monkeypatch.chdir(folder)
    return folder


def test_the_dozen_lines_of_the_readme_run(agent_of_the_readme: Path) -> None:
    from astuner import run

    code = (agent_of_the_readme / "workflow.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in code if line.strip() and not line.startswith("from ")]) == 12
    data = agent_of_the_readme / "data"
    trained, held_out = (len((data / f"{part}.jsonl").read_text().splitlines()) for part in ("train", "validation"))
    assert re.search(rf"\b{trained} tasks\b.*\b{held_out} held-out", read("README.md"), re.DOTALL)
    shown = next(b.text for b in BLOCKS if b.language == "json" and b.page == ROOT / "README.md")
    assert shown in (data / "validation.jsonl").read_text(encoding="utf-8")
    result = run("my_agent.yaml", backbone="debug")
    told = (result.run_dir / "run.log").read_text(encoding="utf-8")
    assert "(train.jsonl:1: completed, train.jsonl:2: completed)" in told


@pytest.mark.slow
def test_the_dozen_lines_of_the_readme_learn(agent_of_the_readme: Path) -> None:
    """Exactly as printed, with the default seed: far beyond chance on tasks that it never trained on."""
    from astuner import run

    result = run("my_agent.yaml", backbone="local")
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    before, *_, after = [row for row in rows if "val/success" in row]
    assert after["val/success_ci_low"] > before["val/success_ci_high"]
    assert after["val/success"] > 0.6


def test_the_program_of_the_endpoint_page_is_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner import run

    files_of(ROOT / "docs" / "endpoint.md", tmp_path)
    monkeypatch.chdir(tmp_path / "any_agent")
    result = run("any_agent.yaml", backbone="debug")
    told = (result.run_dir / "run.log").read_text(encoding="utf-8")
    assert "(tasks.jsonl:1: completed, tasks.jsonl:2: completed)" in told
    assert re.search(r"^ ▶ default +calculator\(", told, re.MULTILINE)
    assert re.search(r"^   tool +\d+$", told, re.MULTILINE)
    table = read("docs/endpoint.md").partition("| key of `astuner.rollout.program` |")[2].partition("\n\n")[0]
    from astuner_gateway.program import ProgramConfig

    described = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert described == set(ProgramConfig.model_fields)


@pytest.mark.slow
def test_the_haiku_of_the_judge_page_are_graded_and_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner import run
    from astuner.testing import ScriptedModel
    from astuner_rubrics.fence import fences_in

    def says(body: dict[str, Any]) -> dict[str, Any]:
        labels = [found.label for found in fences_in(body["messages"][1]["content"])]
        ranking = [[label.removeprefix("ATTEMPT ")] for label in labels if label.startswith("ATTEMPT ")]
        return {"reason": "so", "ranking": ranking} if ranking else {"reason": "so", "score": 4}

    files_of(ROOT / "docs" / "llm_as_judge.md", tmp_path)
    monkeypatch.chdir(tmp_path / "haiku")
    with ScriptedModel(says) as server:
        base = [f"astuner.helper_models.checker.{k}" for k in (f"base_url={server.base_url}", "cache=false")]
        result = run("haiku.yaml", base, backbone="debug")
        told = [json.loads(line) for line in (result.run_dir / "episodes" / "debug.jsonl").read_text().splitlines()]
        assert [row["reward"] for row in told if row["reward_source"] == "judge"]
        assert {row["reward"] for row in told if row["reward_source"] == "judge"} == {0.75}
        ranked = [
            "astuner.task_judge.judge=relative",
            "astuner.task_judge.relative.helper_model=checker",
            "astuner.trainer_common.total_steps=1",
            "astuner.data.train_batch_size=2",
            "astuner.rollout.compute_madness_checklist=[]",
        ]
        result = run("haiku.yaml", [*base, *ranked], backbone="local")
        (row,) = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert row["reward/mean"] == 0.5
        assert row["judge/asked"] >= 1


def test_the_tables_of_the_judge_page_name_every_key() -> None:
    from astuner_helpers.weighted import WeightedConfig
    from astuner_rubrics.llm_judge import LlmJudgeConfig
    from astuner_rubrics.relative import RelativeConfig

    page = read("docs/llm_as_judge.md")
    for name, model in (("llm_judge", LlmJudgeConfig), ("relative", RelativeConfig), ("weighted", WeightedConfig)):
        table = page.partition(f"| key of `astuner.task_judge.{name}` |")[2].partition("\n\n")[0]
        described = {key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}
        assert described == set(model.model_fields), name


def test_the_group_judge_of_the_judge_page_keeps_to_the_contract(tmp_path: Path) -> None:
    from astuner.contracts.types import JudgeOutput, WorkflowOutput
    from astuner.plugins.user_code import import_user_code
    from astuner.testing import check_judge, workflow_task

    files_of(ROOT / "docs" / "llm_as_judge.md", tmp_path)
    judge = import_user_code("shortest.py->Shortest", tmp_path)()
    found = check_judge(judge, workflow_task(), [WorkflowOutput(response=text) for text in ("four", "to")])
    assert [v.reward for v in found if isinstance(v, JudgeOutput)] == [0.5, 1.0]


@pytest.mark.slow
def test_the_application_of_the_serving_page_is_answered_and_heard(tmp_path: Path) -> None:
    from astuner.contracts.types import Split
    from astuner_flywheel.traces.settings import TracingConfig
    from astuner_flywheel.tracing_reader import TracingTaskReader

    files_of(ROOT / "docs" / "serving.md", tmp_path)
    example = str(ROOT / "examples" / "math_agent" / "math_agent.yaml")
    base = ["serve", example, "--backbone", "local", "--checkpoint", "base"]
    with (
        _running(tmp_path, "data", "collect", "traces.sqlite") as collector,
        _running(tmp_path, *base, "--max-tokens", "8", "--trace", collector["traces_url"]) as server,
    ):
        subprocess.run([sys.executable, "application.py", server["access_file"]], cwd=tmp_path, check=True, timeout=120)
    reader = TracingTaskReader(TracingConfig(sources=["traces.sqlite"], keep="corrected"), base_dir=tmp_path)
    (task,) = reader.read(Split.TRAIN)
    assert task.main_query == "Tom has 6 boxes with 4 eggs in each. How many eggs?"
    assert task.metadata["answer"] == "24"


@pytest.mark.slow
def test_the_commands_of_the_tracing_page_do_what_it_says(tmp_path: Path) -> None:
    page = ROOT / "docs" / "tracing_user_feedback.md"
    files_of(page, tmp_path)
    (block,) = [b for b in BLOCKS if b.page == page and "run" in b.marks]
    environment = {**os.environ, "ASTUNER_HOME": str(tmp_path / "home")}
    _, *arguments = shlex.split(block.text)
    done = subprocess.run(
        [sys.executable, "-m", "astuner", *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == BEHIND[block].text
    (task,) = [b for b in BLOCKS if b.page == page and "second task" in b.marks]
    assert json.loads((tmp_path / "tasks.jsonl").read_text().splitlines()[1]) == json.loads(task.text)
    with _running(tmp_path, "data", "collect", "traces.sqlite") as collector:
        told = [sys.executable, "feedback.py", collector["access"]]
        said = subprocess.run(told, cwd=tmp_path, check=True, timeout=120, capture_output=True, text=True)
        assert said.stdout == "{'stored': 1, 'seen': False}\n"


@pytest.mark.slow
def test_the_commands_of_the_data_page_say_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from datasets import disable_progress_bars

    from astuner.cli import main

    page = ROOT / "docs" / "data_pipeline.md"
    files_of(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "home")
    disable_progress_bars()
    for block in BLOCKS:
        if block.page == page and {"run", "run, which fails"} & {*block.marks}:
            program, *arguments = shlex.split(block.text)
            if program == "python":
                runpy.run_path(*arguments)
            else:
                with pytest.raises(SystemExit) as ended:
                    main(arguments)
                assert bool(ended.value.code) == ("run, which fails" in block.marks), block
            assert "".join(capsys.readouterr()) == BEHIND[block].text, block


def test_the_reader_of_the_data_page_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from astuner import load_config
    from astuner.rollout.parts import build_task_reader
    from astuner.testing import check_task_reader

    files_of(ROOT / "docs" / "data_pipeline.md", tmp_path)
    (first, second) = check_task_reader(build_task_reader(load_config(tmp_path / "quiz.yaml")))
    assert (first.main_query, second.metadata) == ("How much is 4 + 3?", {"answer": "4"})


@pytest.mark.slow
def test_the_command_of_the_page_on_several_agents_plays_games(tmp_path: Path) -> None:
    page = ROOT / "docs" / "multiagent_workflow.md"
    (block,) = [b for b in BLOCKS if b.page == page and b.language == "bash"]
    _, *arguments = shlex.split(block.text)
    arguments = [str(ROOT / a) if a.startswith("examples/") else a for a in arguments]
    subprocess.run([sys.executable, "-m", "astuner", *arguments], cwd=tmp_path, check=True, capture_output=True)
    (told,) = tmp_path.glob("**/episodes/debug.jsonl")
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert {turn["role"] for turn in row["turns"]} == {"werewolf", "villager", "seer"}


def test_the_tracing_page_names_every_key() -> None:
    from astuner_flywheel.traces.conversation import FIELDS
    from astuner_flywheel.traces.settings import Filters, TracingConfig

    page = read("docs/tracing_user_feedback.md")
    names = [*TracingConfig.model_fields, *Filters.model_fields, *FIELDS]
    assert [name for name in names if not re.search(rf"\b{name}\b", page)] == []


@contextmanager
def _running(folder: Path, *command: str) -> Iterator[dict[str, Any]]:
    """A server of ours, on a free port, until the block ends: what it says of itself."""
    line = [sys.executable, "-m", "astuner", *command, "--port", "0", "--json"]
    environment = {**os.environ, "ASTUNER_HOME": str(folder / "home")}
    process = subprocess.Popen(line, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=200)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_the_errors_and_variables_of_the_endpoint_page_are_those_there_are() -> None:
    from astuner_gateway.endpoint import Access

    page = read("docs/endpoint.md")
    errors = page.partition("| status | `code` |")[2].partition("\n\n")[0]
    described = {code for row in errors.splitlines()[2:] for code in re.findall(r"`(\w+)`", row.split("|")[2])}
    endpoint = ROOT / "plugins/astuner_gateway/astuner_gateway/endpoint"
    sources = "".join(file.read_text() for file in [*endpoint.glob("*.py"), endpoint.parent / "gate.py"])
    assert described == set(re.findall(r'(?:code: str = |code=|, \d{3}, )"(\w+)"', sources))
    variables = page.partition("| variable | for |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", variables)) == set(Access("http://127.0.0.1:1/v1", "k").environment())


@pytest.mark.slow
def test_the_first_tutorial_trains_and_every_metric_is_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from astuner import run
    from astuner.testing import check_metrics
    from astuner_local.tiny.make import main as make
    from astuner_testing.metrics import find, metrics

    files_of(FIRST, tmp_path)
    monkeypatch.chdir(tmp_path)
    make(["--tasks-out", "math_agent/data"])
    short = [
        "data.max_validation_tasks=8", "rollout.val_kwargs.num_repeat=2", "trainer_common.total_steps=2",
        "trainer_common.use_kl_loss=true", "trainer_common.algorithm.rollout_is=token-truncate",
    ]  # fmt: skip
    result = run("math_agent/math_agent.yaml", [f"astuner.{o}" for o in short], backbone="local")
    assert result.run_dir == (tmp_path / "launcher_record" / "math_agent").resolve()
    rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
    written = {name for row in rows for name in row} - {"step", "time"}
    check_metrics(rows, backbone="local")
    here = {metric.name for metric in metrics() if not metric.backbones or "local" in metric.backbones}
    found = {metric.name for name in written if (metric := find(name))}
    of_somebody = {name for name in here if "<" in name and "<k>" not in name}  # a role, a policy, a judge's metric
    of_machines = {name for name in here if name.startswith("energy/")}  # those with a meter
    of_warm_starts = {name for name in here if name.startswith("warm_start/")}
    of_forgers = {"rollout/control_texts"}  # nobody writes a control token's name here
    elsewhere = of_somebody | of_machines | of_warm_starts | of_forgers
    assert found - elsewhere == here - elsewhere, "what no run has is not in the tables"

    page = read("docs/report.md").partition("## The folder of a run")[2]
    for path in (*result.run_dir.iterdir(), *(result.run_dir / "checkpoints").iterdir()):
        assert path.name.partition("-0")[0] in page, f"the page does not say what {path.name} is"


@pytest.mark.slow
def test_the_first_tutorial_trains_from_python(tmp_path: Path) -> None:
    from astuner_local.tiny.make import main as make

    files_of(FIRST, tmp_path)
    files_of(ROOT / "docs" / "python.md", tmp_path)
    make(["--tasks-out", str(tmp_path / "math_agent" / "data")])
    command = [sys.executable, "math_agent/train.py"]
    ended = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    assert "Success after " in ended.stdout
    assert "cannot be imported" not in ended.stderr
    again = ["run", "launcher_record/from_python.experiment/from_python.yaml", "--resume"]
    ended = subprocess.run([sys.executable, "-m", "astuner", *again], cwd=tmp_path, capture_output=True, text=True)
    assert "continuing the run in" in ended.stderr


def test_the_first_tutorial_trains_what_the_demo_trains(tmp_path: Path) -> None:
    """Whose recipe is measured over many seeds, in benchmarks/learning.md."""
    from astuner import load_config

    files_of(FIRST, tmp_path)
    ours = load_config(tmp_path / "math_agent" / "math_agent.yaml", backbone="local").astuner
    demo = load_config(ROOT / "examples" / "math_agent" / "math_agent.yaml", backbone="local").astuner
    for section in ("model", "rollout", "data", "trainer_common"):
        assert getattr(ours, section) == getattr(demo, section), section


def test_the_launch_file_of_an_editor_is_the_command_above_it(plugins: Any) -> None:
    (block,) = [b for b in BLOCKS if b.language == "json" and "debugpy" in b.text and b.page.name == "debug.md"]
    (launch,) = json.loads(block.text)["configurations"]
    assert launch["module"] == "astuner"
    _parse(launch["args"], plugins)
    command = " ".join(["astuner", *launch["args"]]).replace("${workspaceFolder}/", "")
    assert f"`{command}`" in block.page.read_text(encoding="utf-8")


# --------------------------------------------------------------------------------------------------------------- pages


@table("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: {target} is not there"
        if anchor:
            assert anchor in anchors(file), f"{name_of(page)}: {name_of(file)} has no heading #{anchor}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))  # as when it is run
        spec.loader.exec_module(module)
    return module


def test_generated_parts_are_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    module = generator()
    assert module.main(["--check"]) == 0, capsys.readouterr().out
    opened = [name for page in module.pages() for name in re.findall(r"<!-- generated: (.+) -->", prose(page))]
    assert sorted(opened) == sorted(module.PARTS)
    page = read("docs/plugins.md")
    assert module.rewritten(page.replace("### `register_judges`", "")) == page


def test_every_public_name_is_on_a_page_of_the_python_api() -> None:
    """Once, `tune` first; the names come from the packages, not from the generator."""
    import astuner
    import astuner.testing

    pages = [page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")]
    listed = Counter(re.findall(r"^\| \[`([\w.]+)`\]", "\n".join(pages), re.MULTILINE))
    exported = {f"{package.__name__}.{name}" for package in (astuner, astuner.testing) for name in package.__all__}
    assert exported - listed.keys() == {"astuner.__version__"}
    assert [name for name, count in listed.items() if count > 1] == []
    contracts = {path.stem for path in (ROOT / "astuner_core/astuner/contracts").glob("*.py")} - {"__init__"}
    text = "\n".join(pages)
    assert [name for name in contracts if f"/contracts/{name}.py)" not in text] == []
    for page, first in (("train", "tune"), ("agents", "Workflow"), ("judges", "Judge"), ("tasks", "Task")):
        assert re.search(r"^\| \[`([\w.]+)`", read(f"docs/api/{page}.md"), re.MULTILINE)[1] == f"astuner.{first}"  # type: ignore[index]


def test_every_hook_is_described() -> None:
    from astuner.contracts import hookspecs

    page = read("docs/plugins.md")
    described = re.findall(r"^### `(\w+)`$", page, re.MULTILINE)
    assert sorted(described) == sorted({*hookspecs.KINDS.values(), "locate_model", "list_models", "register_aliases"})


def test_the_page_says_when_each_template_cannot_be_continued() -> None:
    page = read("docs/model_families.md")
    generated = page.partition("| chat template of |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in generated.splitlines()[2:]]
    explained = page.partition("| chat template | not continued |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| ([^|]+) \|", explained.split("\n", 2)[2], re.MULTILINE)
    assert {row[-1] for row in rows} == {"always", "not always"}
    assert sorted(named) == sorted(row[0] for row in rows if row[-1] == "not always")


def test_every_stop_reason_and_every_loss_is_described() -> None:
    from astuner.contracts.types import StopReason
    from astuner.plugins.loader import load_plugins

    table = read("docs/concepts.md").partition("| stop reason |")[2].partition("\n\n")[0]
    scored = {
        name: cells[1].strip() == "yes"
        for cells in (row.strip("|").split("|") for row in table.splitlines()[2:])
        for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert scored == {reason.value: reason.is_scored for reason in StopReason}
    losses = read("docs/backbones/local.md").partition("| `loss` |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| `(\w+)`", losses, re.MULTILINE)
    assert set(named) == {name for _, name, _ in load_plugins().offers("loss")}


def test_every_page_can_be_found_from_the_readme() -> None:
    index = ROOT / "docs" / "README.md"
    assert f"({name_of(index)})" in read("README.md")
    for page in index.parent.rglob("*.md"):
        if page != index:
            assert f"({page.relative_to(index.parent).as_posix()})" in read("docs/README.md"), (
                f"nothing leads to {page}"
            )


def test_the_readme_stays_short() -> None:
    assert len(read("README.md").splitlines()) <= 150
