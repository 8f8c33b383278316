"""Runs a client's program as the agent of a real run of three steps, and says what became of its turns and tokens."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from tests.frameworks.harness import ROOT

HERE = Path(__file__).parent
CACHE = ROOT / ".venv-clients"
FOUND = HERE / "found.json"
"""What the runs found, by client; the table in `docs/frameworks.md` is made of it."""
SCRIPTS: dict[str, Any] = yaml.safe_load((HERE / "script.yaml").read_text(encoding="utf-8"))
SCENES = tuple(SCRIPTS["questions"])
REPEAT = 2
IN_CI = ("litellm", "openai", "curl")
"""Those that a test runs: they take the least time to install and to start."""


class Client(BaseModel):
    """A client's manifest; README.md says what is in it."""

    model_config = ConfigDict(extra="forbid")
    title: str
    language: str
    version: str
    argv: list[str]
    turns: list[int]
    install: list[str] = []
    needs: list[str] = []
    build: list[list[str]] = []
    env: dict[str, str] = {}
    branches: dict[str, str] = {}
    cure: str = ""
    notes: str = ""
    style: str = "calls"
    replies: dict[str, list[str]] = {}
    settings: dict[str, Any] = {}
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def script(self) -> dict[str, list[str]]:
        """Question -> what the model says in such an episode."""
        said = {**SCRIPTS[self.style], **self.replies}
        return {question: said[scene] for scene, question in SCRIPTS["questions"].items()}


def clients() -> dict[str, Client]:
    """Every client, by name."""
    files = sorted(HERE.glob("*/*/client.yaml"))
    found = [Client(**yaml.safe_load(f.read_text(encoding="utf-8")), folder=f.parent) for f in files]
    assert len({client.name for client in found}) == len(found), "two clients of one name"
    return {client.name: client for client in found}


def missing(client: Client) -> str:
    """Why a client cannot run on this machine; empty when it can."""
    absent = [name for name in client.needs if shutil.which(name) is None]
    return f"needs {', '.join(absent)}, which is not on this machine" if absent else ""


def environment(client: Client) -> Path:
    """The client's folder with its program and packages, made unless it is there.

    :raises subprocess.CalledProcessError: something cannot be installed or built.
    """
    folder = CACHE / client.name
    shared = [path for path in client.folder.parent.iterdir() if path.is_file()]
    files = sorted([*shared, *(path for path in client.folder.rglob("*") if path.is_file())])
    made_of = hashlib.sha256(
        b"".join(f.name.encode() + f.read_bytes() for f in files) + sys.version.encode()
    ).hexdigest()
    done = folder / ".done"
    if done.exists() and done.read_text() == made_of:
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(client.folder, folder)
    for path in shared:
        shutil.copy(path, folder)

    def start(*command: str) -> None:
        subprocess.run(command, check=True, cwd=folder, env=_variables(folder), stdout=sys.stderr)

    if (folder / "package.json").exists():
        start("npm", "ci", "--no-audit", "--no-fund")
    if client.install:
        uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") or "uv"
        start(uv, "venv", "--quiet", "--python", sys.executable, "venv")
        start(uv, "pip", "install", "--quiet", "--python", "venv/bin/python", *client.install)
    for command in client.build:
        start(*command)
    done.write_text(made_of)
    return folder


def _variables(folder: Path) -> dict[str, str]:
    path = [folder / "venv" / "bin", folder / "bin", folder / "node_modules" / ".bin", os.environ["PATH"]]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}  # compile once
    return {**inherited, "PATH": os.pathsep.join(map(str, path))}


def model() -> Path:
    """The folder of the model, made unless it is there."""
    folder = CACHE / "model"
    if not folder.exists():
        from tests.clients.model import make

        make(CACHE / "model.new")
        (CACHE / "model.new").rename(folder)
    return folder


def run(client: Client, out: Path, timeout: float = 900) -> dict[str, Any]:
    """Train with the client as agent; what was found.

    :param out: a folder for the run, which is made anew.
    :raises AssertionError: the run failed; with the end of what it wrote.
    """
    folder = environment(client)
    shutil.rmtree(out, ignore_errors=True)
    home = out / "home"
    home.mkdir(parents=True)
    tasks = [{"question": question, "answer": "42"} for question in client.script()]
    (out / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), encoding="utf-8")
    (out / "script.json").write_text(json.dumps(client.script()), encoding="utf-8")
    path = _variables(folder)["PATH"]
    experiment = {
        "model": {"path": str(model())},
        "task_reader": {"type": "jsonl", "jsonl": {"training": {"file_path": "tasks.jsonl"}}},
        "task_judge": {"judge": "math_answer"},
        "data": {"train_batch_size": 1},  # a step for each scene
        "rollout": {
            "workflow": "program",
            "program": {
                "argv": client.argv,
                "cwd": str(folder),
                "env": {"PATH": path, "HOME": str(home), **client.env},
            },
            "num_repeat": REPEAT,
            "max_env_worker": 2,
            "max_retries": 0,
            "max_response_length_in_one_turn": 1000,
            "multi_turn": {"max_steps": 20},
        },
        "trainer_common": {"total_steps": len(SCENES), "save_freq": 100},
        **client.settings,
    }
    (out / "client.yaml").write_text(yaml.safe_dump({"astuner": experiment}), encoding="utf-8")
    command = [sys.executable, "-m", "tests.clients.scripted", "run", str(out / "client.yaml"), "--backbone", "local"]
    with (out / "log").open("wb") as log:
        done = subprocess.run(
            [*command, "--run-dir", str(out / "run")],
            cwd=ROOT,
            env={
                **_variables(folder),
                "PATH": os.environ["PATH"],
                "CLIENT_SCRIPT": str(out / "script.json"),
                "OMP_NUM_THREADS": "1",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )
    end = (out / "log").read_text(encoding="utf-8", errors="replace")[-6000:]
    assert done.returncode == 0, f"{client.name}: exit status {done.returncode}\n{end}"
    return found(client, out / "run")


def found(client: Client, run_dir: Path) -> dict[str, Any]:
    """Turns, branches and tokens of a run, counted from its episode log; `tests.checker` has looked at all of them.

    :raises AssertionError: an episode failed, a token was not trained exactly once, the certificate says otherwise, or
        the independent checker found something else.
    """
    from astuner_record.episode_log import EpisodeLog
    from tests.checker.rules import check

    certificate = json.loads((run_dir / "certificate.json").read_text(encoding="utf-8"))
    branches: Counter[str] = Counter()
    turns: dict[str, set[int]] = {scene: set() for scene in SCENES}
    rewards: Counter[float | None] = Counter()
    continued = generated = trained = 0
    scenes = {question: scene for scene, question in SCRIPTS["questions"].items()}
    with EpisodeLog(run_dir) as log:
        listed = list(log.list([]))
        for row in listed:
            logged = log.read(row)
            episode = logged.episode
            assert episode.stop_reason.value == "completed", (
                f"{client.name}: {episode.stop_reason.value}: {episode.error}"
            )
            turns[scenes[episode.workflow_task.task.main_query]].add(len(episode.turns))
            rewards[episode.reward] += 1
            branches.update(turn.branch_reason for turn in episode.turns[1:] if turn.branch_reason)
            continued += sum(turn.continues is not None for turn in episode.turns)
            generated += sum(len(turn.generation.response_ids) for turn in episode.turns)
            trained += sum(sum(sample.loss_mask) for sample in logged.samples())
    assert len(listed) == REPEAT * len(SCENES), f"{client.name}: {len(listed)} episodes"
    assert set(rewards) == {0.0, 1.0}, f"{client.name}: rewards {dict(rewards)}: nothing could be learned"
    tokens = certificate["tokens"]
    assert generated == trained == tokens["generated"] == tokens["trained"] > 0, (
        f"{client.name}: {generated} tokens in the log, {trained} in its samples; the certificate says {tokens}"
    )
    problems = check(run_dir, model()).problems
    assert not problems, f"{client.name}: tests.checker says: {'; '.join(map(str, problems[:3]))}"
    return {
        "turns": [sorted(turns[scene]) for scene in SCENES],
        "later": continued + sum(branches.values()),
        "exact": continued,
        "branches": dict(sorted(branches.items())),
        "tokens": generated,
    }


def differs(client: Client, result: dict[str, Any]) -> str:
    """What of a result is not as the manifest says; empty when all is."""
    wrong = []
    if result["turns"] != [[n] for n in client.turns]:
        wrong.append(f"turns {result['turns']}, and client.yaml says {client.turns}")
    if set(result["branches"]) != set(client.branches):
        wrong.append(f"branches {result['branches']}, and client.yaml explains {sorted(client.branches)}")
    return "; ".join(wrong)
