"""The first documents, pasted: every block of the five and every command line between them runs, or is listed here.

`MENDED` has the documents' own mistakes, `INSTALLS` and `ELSEWHERE` what cannot be had where tests run, each with the
reason.  Model, data and world are tiny stand-ins: the words that are typed stay as they are.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from astuner import load_config

ROOT = Path(__file__).resolve().parents[2]
SEEDS = sorted((ROOT / "tests" / "data" / "seeds").glob("*.md"))
MODEL = ROOT / "plugins" / "astuner_local" / "astuner_local" / "tiny" / "model"
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```[ ]*$", re.MULTILINE | re.DOTALL)
MATH = "tutorial/example_math_agent/math_agent.yaml"

# ------------------------------------------------------------------------------------------- what is not run as it is

MENDED = {
    "0 json 1": [("        },\n    ]", "        }\n    ]", "VS Code allows a comma at the end, JSON does not")],
    "2 json 1": [("        },\n    ]", "        }\n    ]", "as above")],
    "3 json 1": [("        },\n    ]", "        }\n    ]", "as above")],
    "2 python 1": [("model= # leave empty for now,", "model=None,", "an argument needs a value")],
    "2 python 2": [
        (
            "tuner # use model_tuner as the model,",
            "tuner, # use model_tuner as the model",
            "the comma is in the comment",
        )
    ],
    "0 typed 1": [
        ("TAG1|TAG2|TAG3", "'TAG1|TAG2|TAG3'", "a shell pipes to a program TAG2"),
        ("...", MATH, "stands for a file"),
    ],
    "0 typed 2": [("TAG1|TAG2|TAG3", "'TAG1|TAG2|TAG3'", "as above"), ("...", MATH, "as above")],
    "4 bash 6": [
        ("PATH=...", "PATH=envservice", "stands for a folder"),
        ("ACTIVATION=...", "ACTIVATION=true", "stands for a command"),
    ],
    "3 bash 3": [("root@xxxx:/xxx/xxx/xxx# ", "", "the shell's prompt"), ("INFO: ", "# ", "what the program prints")],
}
"""Block -> what in it is a mistake, what was meant, why."""

INSTALLS = (
    "clones from hosts that are not ours, and installs CUDA wheels; git and uv are stand-ins that take every order"
)
ELSEWHERE = {
    "4 bash 4": ("--backbone verl", "docs/backbones/verl.md", "the script is a file of a fork of VERL"),
}
"""Block -> what does it today, the page that has it, why the block cannot run."""
NOT_FILES = {
    "default.yaml",
    "trinity_default.yaml",
    "config_auto_convertion_verl.json",
    "config_auto_convertion_trinity.json",
}
"""Of ``astune/default_config``: what a key is by default, and what becomes of it, is told by `astuner config show`."""
REFUSED = re.compile(r"--backbone='(trinity|verl)'")
"""Ray's backbones want an environment of their own, and say which; tests/trinity and tests/verl have whole runs."""


def _text(name: str) -> str:
    return next(path for path in SEEDS if path.name.startswith(name[0])).read_text(encoding="utf-8")


def _found() -> dict[str, str]:
    """All blocks as ``FILE LANGUAGE NUMBER``, and the command lines outside of them as ``FILE typed NUMBER``."""
    found: dict[str, str] = {}
    for path in SEEDS:
        text, counts = path.read_text(encoding="utf-8"), dict[str, int]()

        def keep(kind: str, block: str, path: Path = path, counts: dict[str, int] = counts) -> None:
            counts[kind] = counts.get(kind, 0) + 1
            found[f"{path.name[0]} {kind} {counts[kind]}"] = block

        for _, language, block in FENCE.findall(text):
            keep({"shell": "bash", "": "tree"}.get(language, language), textwrap.dedent(block))
        between = FENCE.sub("", text)
        for spans, lines in re.findall(r"`(python launcher\.py [^`]+|beast_logger_go)`|^(clear && .+)$", between, re.M):
            keep("typed", spans or lines)
    return found


FOUND = _found()


def mended(name: str) -> str:
    text = FOUND[name]
    for mistake, meant, _ in MENDED.get(name, ()):
        assert mistake in text, f"{name} has no {mistake!r} any more; take it out of MENDED"
        text = text.replace(mistake, meant)
    return text


def commands(name: str) -> list[str]:
    """One by one; those that a comment has in brackets too."""
    text = re.sub(r"\\\n\s*", "", mended(name))
    asides = re.findall(r"#.*\( (python launcher\.py .+?) \)", text)
    return [
        *asides,
        *(line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")),
    ]


# --------------------------------------------------------------------------------------------------------- stand-ins

WORLD = '''
from astuner import Environment, Evaluation, Task
from astuner.contracts.environment import StepResult

class World(Environment):
    """Stands in for AppWorld: two steps, and half of two tests."""

    @classmethod
    def tasks(cls, split, params):
        return [Task(task_id=f"{split}_{n}", main_query="Count my mails.", env_type="appworld") for n in range(3)]

    def reset(self, task):
        self.steps = 0
        said = [{"role": "system", "content": "You use apps."}, {"role": "user", "content": "Count my mails."}]
        return StepResult(observation="Count my mails.", messages=said)

    def step(self, action):
        self.steps += 1
        return StepResult(observation=f"step {self.steps}", terminated=self.steps == 2)

    def evaluate(self):
        one = {"requirement": "counted", "label": "no_op_fail"}
        return Evaluation(score=0.5, success=False, details={"passes": [one], "failures": [one], "num_tests": 2})
'''
PLUGIN = """
[environment.appworld]
target = "stand_in_world:World"
summary = "stands in for AppWorld"
lent = ["stand_in_world"]
splits = ["train", "dev"]
memory_mb = 40
"""
PROGRAM = """#!/bin/sh
echo "$(basename "$0") $*" >> "$ORDERS"
case "$(basename "$0") $*" in
  "git clone "*) for last; do :; done; mkdir -p "$(basename "$last" .git)" "$last" ;;
  "uv venv "*) mkdir -p .venv/bin; : > .venv/bin/activate ;;
esac
"""
LOOP = """\
from agentscope.agent import ReActAgent
from agentscope.formatter import DashScopeChatFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg
from astuner import Workflow, WorkflowOutput

class AppWorld(Workflow):
    async def execute(self, workflow_task, model_tuner):
        astune_proxy, config = model_tuner, model_tuner.config
        first_msg, second = workflow_task.task.init_messages
        interaction_message = Msg(name="env", content=second["content"], role="user")
"""


class Place:
    """A folder as a checkout's root is, with stand-ins; what is typed in it is typed once, however often it stands."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.python, self.typed = folder, python, dict[str, subprocess.CompletedProcess[str]]()
        for name in ("launcher.py", "examples"):
            (folder / name).symlink_to(ROOT / name)
        programs, site = folder / "programs", folder / "site"
        programs.mkdir()
        for name in ("git", "uv"):
            (programs / name).write_text(PROGRAM)
            (programs / name).chmod(0o755)
        (package := site / "stand_in_world").mkdir(parents=True)
        (package / "__init__.py").write_text(WORLD)
        real = (ROOT / "plugins/astuner_appworld/astuner_appworld/plugin.toml").read_text(encoding="utf-8")
        (package / "plugin.toml").write_text(real.partition("[environment.appworld]")[0] + PLUGIN)
        (info := site / "stand_in_world-1.dist-info").mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in-world\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[astuner]\nstand_in = stand_in_world\n")
        self.environ = {
            "PATH": f"{programs}:{python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(site),
            "ASTUNER_DISABLE_PLUGINS": "appworld",
            "ASTUNER_HOME": str(folder / "home"),
            "HF_HOME": str(folder / "hf"),
            "HOME": str(folder),
            "ORDERS": str(folder / "orders"),
            "TERM": "xterm",
            "LANG": "C.UTF-8",
        }

    def type(self, command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        key = f"{command} {environ}"
        if key not in self.typed:
            self.typed[key] = done = subprocess.run(
                ["bash", "-c", command], cwd=self.folder, env=self.environ | environ, capture_output=True, text=True,
                timeout=240,
            )  # fmt: skip
            assert "Traceback" not in done.stderr, done.stderr
            notes = [line for line in done.stderr.splitlines() if re.search("note:|Warning:| now$", line)]
            assert len(notes) == len(set(notes)), done.stderr
        return self.typed[key]

    def works(self, command: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """What a document says: it does what it says, or is refused with what to install (`REFUSED`)."""
        done = self.type(command, **environ)
        if refused := REFUSED.search(command):
            assert done.returncode == 2, done.stderr
            assert re.search(rf"pip install \"?astuner-{refused[1]}", done.stderr), done.stderr
        else:
            assert done.returncode == 0, done.stdout + done.stderr
        return done


AGENTSCOPE_1 = {"2 bash 3", "2 bash 4", "2 python 1", "2 python 2", "3 python 1"}
"""Blocks that have or run an agent of AgentScope 1.x."""
IN_AGENTSCOPE_1 = {
    **dict.fromkeys(("2 bash 3", "2 bash 4", "2 python 2"), ("torch", "astuner_math")),
    "3 python 1": ("torch", "astuner_appworld"),
}
"""What such a block needs in its environment besides AgentScope."""


def python_of(environment: str, name: str) -> Path:
    """Return the Python that runs a block; skips the test if the environment lacks a package that the block needs."""
    python = Path(sys.executable) if environment == "here" else ROOT / f".venv-{environment}" / "bin" / "python"
    if environment != "here":
        for package in IN_AGENTSCOPE_1.get(name, ()):
            if subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode:
                pytest.skip(
                    f".venv-{environment} does not contain {package}; to remake it: make .venv-{environment}/.done"
                )
    return python


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Place]:
    """Return the folder in which one Python runs all its blocks."""
    return functools.cache(lambda python: Place(tmp_path_factory.mktemp("checkout"), python))


@pytest.fixture(scope="module")
def service(places: Callable[[Path], Place]) -> Iterator[str]:
    """The environment service, started by hand, as ``4 bash 7`` does: ``python launcher.py --with-appworld``."""
    (command,) = commands("4 bash 7")
    place = places(Path(sys.executable))
    deadline = time.monotonic() + 60
    while _taken(8080) and time.monotonic() < deadline:  # it is where that program listens, whoever else is here
        time.sleep(1)
    with subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=place.folder, env=place.environ, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert any("Starting server on 127.0.0.1:8080" in line for line in process.stdout)
            yield "http://127.0.0.1:8080"
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


def _taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


# ------------------------------------------------------------------------------------------------------- ways to paste


def type_all(place: Place, name: str) -> None:
    for command in commands(name):
        place.works(command)


def with_service(place: Place, name: str, request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("service")
    for command in commands(name):
        place.works(command, ASTUNER_ENV_URL=url)


def serve(place: Place, name: str, request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue("service")


def install(place: Place, name: str) -> None:
    """`INSTALLS`."""
    (folder := place.folder / name.replace(" ", "_")).mkdir()
    (folder / "external" / "verl").mkdir(parents=True)
    done = place.type(f"cd {folder.name} && set -e\n{mended(name)}")
    assert done.returncode == 0, done.stderr
    typed = [line.partition("#")[0].split() for line in commands(name)]
    assert {words[0] for words in typed} <= {"git", "uv", "source", "cd"}
    taken = (place.folder / "orders").read_text().splitlines()
    assert [words for words in typed if words[0] in ("git", "uv") and " ".join(words) not in taken] == []


def elsewhere(place: Place, name: str) -> None:
    """`ELSEWHERE`."""
    today, page, _ = ELSEWHERE[name]
    subprocess.run(["bash", "-n", "-c", mended(name)], check=True)
    assert today in (ROOT / page).read_text(encoding="utf-8")


def own_service(place: Place, name: str) -> None:
    """The private repository's service, of which there is a stand-in; also as the variables name it."""
    (program := place.folder / "envservice" / "env" / "env_service.py").parent.mkdir(parents=True, exist_ok=True)
    program.write_text("print('own service')")
    if name == "4 bash 3":
        done = place.works(mended(name))
    else:
        environ = {variable: value for variable, _, value in (word.partition("=") for word in commands(name))}
        done = place.works(*commands("4 bash 7"), **environ)
    assert "own service" in done.stdout


def settings(place: Place, name: str) -> None:
    """They load as they are, but for a model where the block has none."""
    path = place.folder / f"{name.replace(' ', '_')}.yaml"
    path.write_text(mended(name))
    config = load_config(path, [] if "model:" in mended(name) else ["astuner.model.path=tiny-calculator"])
    assert config.written
    assert len(config.notes) == len(set(config.notes))


def read_appworld(place: Place, name: str) -> None:
    """The block's keys in the example's file, and AppWorld's workflow by its first name."""
    settings(place, name)
    example = yaml.safe_load((ROOT / "examples/appworld/appworld.yaml").read_text())["astuner"]
    del example["rollout"]["workflow"], example["task_judge"]
    merged = OmegaConf.merge({"astune": example}, yaml.safe_load(mended(name)))
    OmegaConf.save(merged, place.folder / "appworld_astune.yaml")
    done = place.works(
        "astuner --with-appworld --conf appworld_astune.yaml --backbone=debug astuner.model.path=tiny-calculator"
    )
    assert "astune: is now astuner:" in done.stderr
    assert "reward 0.5 (judge)" in done.stdout + done.stderr


def launch(place: Place, name: str) -> None:
    """As VS Code starts it."""
    (told,) = json.loads(mended(name))["configurations"]
    experiment = place.folder / "xxxx" / "xxxx"
    if not experiment.exists():
        shutil.copytree(ROOT / "examples" / "math_agent", experiment)
        (experiment / "math_agent.yaml").rename(experiment / "xxxx.yaml")
    assert (told["type"], told["env"]) == ("debugpy", {})
    python = "python -Xfrozen_modules=off -m debugpy --listen 127.0.0.1:0"
    assert (
        "no training in the debug backbone"
        in place.works(f"{python} {told['program']} {' '.join(told['args'])}").stderr
    )


def make_folder(place: Place, name: str) -> None:
    assert place.type(mended(name)).returncode == 0


def is_there(place: Place, name: str) -> None:
    make_folder(place, "2 bash 2")
    folder, *files = [line.split()[0].lstrip("/") for line in mended(name).splitlines()]
    assert sorted(path.name for path in place.folder.joinpath(folder).iterdir() if path.is_file()) == sorted(files)


def make_agent(place: Place, name: str) -> None:
    made = subprocess.run([place.python, "-c", mended(name)], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr


def write_quick_start(place: Place, name: str) -> None:
    """All of its blocks in the files that it names, and in the folder what the hub would have."""
    make_folder(place, "2 bash 2")
    folder = place.folder / "math_agent"
    if (folder / "gsm8k").exists():
        return
    (folder / "workflow.py").write_text(mended("2 python 2"))
    merged = OmegaConf.merge(*(yaml.safe_load(FOUND[f"2 yaml {n}"]) for n in range(1, 7)))
    OmegaConf.save(merged, folder / "math_agent.yaml")
    shutil.copytree(MODEL, model := folder / merged.astuner.model.path)
    shape = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 13000}))
    (data := folder / merged.astuner.task_reader.huggingface_dat_repo.dataset_path).mkdir(parents=True)
    for split, file in (("train", "train"), ("test", "heldout")):
        shutil.copy(ROOT / f"examples/math_agent/data/{file}.jsonl", data / f"{split}.jsonl")


def import_quick_start(place: Place, name: str) -> None:
    """By the name in its YAML, with all that it imports."""
    write_quick_start(place, name)
    code = (
        "from astuner import load_config\n"
        "config = load_config('math_agent/math_agent.yaml')\n"
        "print(config.resolve('workflow', config.astuner.rollout.workflow).name)\n"
    )
    done = subprocess.run([place.python, "-c", code], cwd=place.folder, capture_output=True, text=True)
    assert done.stdout.strip() == "math_agent_workflow", done.stderr


def quick_start(place: Place, name: str) -> None:
    write_quick_start(place, name)
    type_all(place, name)
    if "debug" in FOUND[name]:
        run = place.folder / "launcher_record" / "math_agent.debug"
        episodes = [json.loads(line) for line in (run / "episodes" / "debug.jsonl").read_text().splitlines()]
        assert [bool(episode["turns"]) and episode["reward"] is not None for episode in episodes] == [True, True]
        (dated,) = run.glob("20[0-9][0-9]_[01][0-9]_[0-3][0-9]_[0-2][0-9]_[0-5][0-9]/rollout")
        assert (dated / "debug.jsonl").exists()


def appworlds_loop(place: Place, name: str) -> None:
    """In a workflow, since it begins with ``await``; what it takes for granted is named before it."""
    (folder := place.folder / "loop").mkdir()
    (folder / "loop.py").write_text(
        LOOP
        + textwrap.indent(mended(name), " " * 8)
        + "        return WorkflowOutput(metadata={'terminated': terminate})\n"
    )
    file = (ROOT / "examples/appworld/appworld.yaml").read_text()
    (folder / "loop.yaml").write_text(re.sub("workflow: appworld .*", "workflow: loop.py->AppWorld", file))
    done = place.works("astuner --conf loop/loop.yaml --with-appworld --backbone='debug'")
    assert done.stderr.count("config.astune was renamed to config.astuner") == 1
    assert "step 1" in done.stdout + done.stderr


def view(place: Place, name: str) -> None:
    """It goes on until Ctrl-C, and takes the folders that the document lists."""
    (command,) = commands(name)
    place.works(f"python launcher.py --conf {MATH} --backbone=debug")
    run = place.folder / "launcher_record" / "math_agent.debug"
    rollout = next(run.glob("*/rollout"))
    for argument, shown in [("", "/"), (run, "#/run/math_agent.debug"), (rollout, "#/run/math_agent.debug")]:
        words = ["bash", "-c", f"exec {command} {argument}"]
        with subprocess.Popen(words, cwd=place.folder, env=place.environ, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = process.stdout.readline()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert re.fullmatch(rf"http://127\.0\.0\.1:\d+/({shown}|{shown[1:]})\n", address), address


HOW: dict[str, Callable[..., None]] = {
    **dict.fromkeys(["0 bash 1", "0 bash 2", "0 bash 3", "1 bash 1", "1 bash 2", "4 bash 1", "4 bash 2"], install),
    "0 bash 4": type_all,
    "0 bash 5": type_all,
    "0 bash 6": type_all,
    "0 json 1": launch,
    "0 typed 1": type_all,
    "0 typed 2": type_all,
    "0 typed 3": type_all,
    "0 typed 4": type_all,
    "2 bash 1": type_all,
    "2 bash 2": make_folder,
    "2 bash 3": quick_start,
    "2 bash 4": quick_start,
    "2 json 1": launch,
    "2 python 1": make_agent,
    "2 python 2": import_quick_start,
    "2 tree 1": is_there,
    **{f"2 yaml {n}": settings for n in range(1, 7)},
    "3 bash 1": with_service,
    "3 bash 2": type_all,
    "3 bash 3": view,
    "3 json 1": launch,
    "3 python 1": appworlds_loop,
    "3 typed 1": view,
    "3 yaml 1": read_appworld,
    **dict.fromkeys(ELSEWHERE, elsewhere),
    "4 bash 5": with_service,
    "4 bash 3": own_service,
    "4 bash 6": own_service,
    "4 bash 7": serve,
    "4 bash 8": type_all,
}
SLOW = {
    "3 bash 3",
    "3 typed 1",
    *(name for name, how in HOW.items() if how not in (install, elsewhere, settings, is_there)),
}
"""Those that start programs of ours."""


def test_no_block_is_left_out() -> None:
    fences = sum(line.lstrip().startswith("```") for path in SEEDS for line in path.read_text().splitlines())
    assert fences == 2 * sum(" typed " not in name for name in FOUND)
    assert HOW.keys() == FOUND.keys()
    assert len(FOUND) == 42
    assert len(SEEDS) == 5


def _blocks() -> Iterator[Any]:
    """Yield each block and its environment; one with an agent of 1.x runs in both environments of 1.x."""
    for name in sorted(HOW):
        marks = [pytest.mark.slow] if name in SLOW else []
        if name not in AGENTSCOPE_1:
            yield pytest.param(name, "here", marks=marks, id=name)
        else:
            for environment in ("agentscope-1.0.7", "agentscope-1.0.21"):
                needs = pytest.mark.needs(environment)
                yield pytest.param(name, environment, marks=[*marks, needs], id=f"{name}, {environment}")


@pytest.mark.parametrize(("name", "environment"), list(_blocks()))
def test_a_block_runs(
    name: str,
    environment: str,
    places: Callable[[Path], Place],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = places(python_of(environment, name))
    monkeypatch.chdir(place.folder)
    how = HOW[name]
    how(place, name, request) if how in (with_service, serve) else how(place, name)


# ------------------------------------------------------------------------------------------ names between the blocks


def test_every_class_is_where_the_documents_say() -> None:
    """In the module, which is imported by that name, and below either name of the package."""
    listed = []
    for path in SEEDS:
        module = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if found := re.search(r"astune/([\w/]+)\.py", line):
                module = found[1].replace("/", ".")
                listed.append((module, ""))
            elif found := re.search(r"class::(\w+)|- `(\w+)`$", line):
                listed.append((module, found[1] or found[2]))
    assert len(set(listed)) == 6 + 6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for module, name in listed:
            ours, first = (importlib.import_module(f"{package}.{module}") for package in ("astuner", "astune"))
            assert ours is first
            assert not name or getattr(ours, name).__module__.startswith("astuner")


def test_files_that_are_listed_and_not_there_are_known() -> None:
    named = {name for path in SEEDS for name in re.findall(r"default_config/([\w.]+\.\w+)", path.read_text())}
    assert named == NOT_FILES


def test_every_page_that_the_documents_link_has_a_place() -> None:
    older = yaml.safe_load((ROOT / "docs" / "older_pages.yaml").read_text(encoding="utf-8"))
    files = yaml.safe_load((ROOT / "plugins/astuner_compat/astuner_compat/spellings.yaml").read_text())["files"]
    links = {
        link.removeprefix("../").removeprefix("./")
        for path in SEEDS
        for link in re.findall(r"\]\((?!http)([^)]+)\)", path.read_text(encoding="utf-8"))
    }
    assert len(links) == 16
    assert {link for link in links if link.endswith(".md")} <= older.keys()
    assert {link for link in links if not link.endswith(".md")} <= files.keys()
    assert [page for page in older.values() if not (ROOT / page).is_file()] == []
    assert [file for file in files.values() if not (ROOT / file).is_file()] == []


def test_what_other_tests_have_of_the_documents_is_what_they_say() -> None:
    core, frameworks = ROOT / "astuner_core/tests/data/seeds", ROOT / "tests/frameworks/seeds"
    copies = {core / f"quick_start_{n}.yaml": f"2 yaml {n}" for n in range(1, 7)} | {
        core / "appworld_1.yaml": "3 yaml 1",
        frameworks / "quick_start.py.txt": "2 python 2",
        frameworks / "appworld_loop.py.txt": "3 python 1",
    }
    for path, name in copies.items():
        assert path.read_text(encoding="utf-8").strip() == mended(name).strip(), path
