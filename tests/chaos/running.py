"""One round: a run that is killed, stopped, and left without a disk, each time gone on with, until it is done."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

HERE = Path(__file__).parent
STEPS, TASKS, REPEAT, VALIDATED, EVERY = 11, 4, 4, 6, 4
"""200 episodes: 11 steps of 16, and 6 after steps 0, 4, 8 and 11."""
SECONDS = 5
"""In which a workflow, a judge and a world must have answered."""
PATIENCE = 150.0
"""Seconds in which something must have happened."""
MARK = "CHAOS_MARK"

EXPERIMENT = f"""
astuner:
  model: {{path: tiny-calculator}}
  task_reader:
    type: jsonl
    jsonl: {{training: {{file_path: train.jsonl}}, validation: {{file_path: dev.jsonl}}}}
  data: {{train_batch_size: {TASKS}, max_validation_tasks: {VALIDATED}}}
  rollout:
    workflow: agent.py->Flow
    num_repeat: {REPEAT}
    max_env_worker: 16
    max_response_length_in_one_turn: 40
    max_model_len: 256
    multi_turn: {{max_steps: 3}}
    episode_timeout: {SECONDS}
    max_retries: 1
    max_failed_share: 1.0
    compute_madness_checklist: []
  env_service: {{timeout: {SECONDS}}}
  task_judge: {{judge: agent.py->Mine, judge_timeout: {SECONDS}}}
  trainer_common: {{total_steps: {STEPS}, test_freq: {EVERY}, save_freq: 3, use_kl_loss: false}}
"""

PACKAGES = {
    "exits": ("raise SystemExit(0)", b""),
    "interrupts": ("raise KeyboardInterrupt", b""),
    "mute": ("class M(Exception):\n    def __str__(self): raise SystemExit\nraise M", b""),
    "syntax": ("def", b""),
    "listens": (
        "from astuner import Provider, hookimpl\nfrom astuner.contracts.events import Subscriber\n"
        "class S(Subscriber):\n    direct = True\n    def handle(self, event): raise SystemExit(0)\n"
        "@hookimpl\ndef register_subscribers(): return {'chaos': Provider(target='chaos_listens:S')}\n",
        b"",
    ),
    "metadata": ("raise ImportError", b"Summary: \xff\xfe\n"),
}
"""Name -> what its module does when it is imported, and what is wrong in its metadata."""


def write_packages(site: Path, left_out: tuple[str, ...]) -> None:
    """Packages as pip would have installed them, each broken in a way of its own."""
    for name, (code, metadata) in PACKAGES.items():
        if f"package_{name}" in left_out:
            continue
        info = site / f"chaos_{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"chaos_{name}.py").write_text(code)
        (info / "METADATA").write_bytes(
            f"Metadata-Version: 2.1\nName: chaos-{name}\nVersion: 1.0\n".encode() + metadata
        )
        (info / "entry_points.txt").write_text(f"[astuner]\nchaos_{name} = chaos_{name}\n")


@dataclass
class Leg:
    """A run from its start to its end."""

    ended_by: str
    code: int = 0
    out: str = ""
    err: str = ""
    left: list[str] = field(default_factory=list)
    """What of it still ran long after its end."""


@dataclass
class Round:
    seed: int
    folder: Path
    left_out: tuple[str, ...] = ()
    """What is not drawn: what ASTuner is known not to hold."""
    legs: list[Leg] = field(default_factory=list)

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    @property
    def temp(self) -> Path:
        return self.folder / "tmp"

    @cached_property
    def tasks(self) -> dict[str, dict[str, str]]:
        """Every task by its id."""
        lines = [line for name in ("train", "dev") for line in (self.folder / f"{name}.jsonl").read_text().splitlines()]
        return {row["task_id"]: row for row in map(json.loads, lines)}

    def play(self, say: Callable[[str], object] = lambda text: None, ends: Sequence[str] = ()) -> Round:
        """All of it; ``ends`` are those of its runs, drawn by default, before one that comes to its end."""
        self._write()
        draw = random.Random(self.seed)
        if not ends:
            ends = ["kill", "disk", *(draw.choice(["kill", "kill", "kill early", "stop", "disk"]) for _ in range(3))]
            draw.shuffle(ends)
        ends = list(ends)
        resume: tuple[str, ...] = ()
        while True:
            leg = self._leg(ends.pop() if ends else "", resume, draw)
            self.legs.append(leg)
            for name, text in (("out", leg.out), ("err", leg.err)):  # for whoever looks into the folder
                (self.folder / f"leg-{len(self.legs)}.{name}").write_text(text, errors="replace")
            say(f"  {leg.ended_by or 'to the end':<12} rc {leg.code:>4}  {self.count():>4} episodes in the log")
            nothing = "nothing was saved yet" in leg.err or "nothing to resume" in leg.err
            if nothing and leg.ended_by:
                ends.append(leg.ended_by.strip("()"))  # it did not come so far
            resume = ("--no-resume",) if nothing else ("--resume",)
            if (not leg.ended_by and not nothing) or leg.left or len(self.legs) > 40:
                return self

    def _write(self) -> None:
        draw = random.Random(f"tasks {self.seed}")
        self.temp.mkdir(parents=True)
        for name, many in (("train", 32), ("dev", VALIDATED)):
            with (self.folder / f"{name}.jsonl").open("w") as file:
                for n in range(many):
                    a, b = draw.randint(2, 9), draw.randint(2, 9)
                    row = {
                        "task_id": f"{name}-{n}",
                        "question": f"Tom has {a} boxes with {b} eggs in each. How many eggs?",
                    }
                    row |= {"answer": str(a * b), **({"env_type": "world"} if n % 4 == 3 else {})}
                    file.write(json.dumps(row) + "\n")
        (self.folder / "exp.yaml").write_text(EXPERIMENT)
        for name in ("agent.py", "world.py"):
            shutil.copy(HERE / name, self.folder)
        write_packages(self.folder / "site", self.left_out)

    def _leg(self, end: str, resume: tuple[str, ...], draw: random.Random) -> Leg:
        own = {"TMPDIR": self.temp, "ASTUNER_HOME": self.folder / "home", "PYTHONPATH": self.folder / "site"}
        own |= {"CHAOS_SEED": self.seed, "CHAOS_FOLDER": self.folder, "CHAOS_LEAVE_OUT": ",".join(self.left_out)}
        own |= {MARK: self.mark, "OMP_NUM_THREADS": 1}
        command = [
            sys.executable,
            "-m",
            "astuner",
            "run",
            "exp.yaml",
            "--backbone",
            "local",
            "--with",
            "world.py->World",
        ]
        command += [*resume, f"astuner.experiment_dir={self.folder / 'runs'}", "astuner.experiment_name=run"]
        leg, until, before = Leg(end), draw.randint(0, 55), self.count()
        pause, limit = draw.uniform(0, 0.5), draw.choice([0, 4096, 200_000])
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env={**os.environ, **{name: str(value) for name, value in own.items()}},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        said: list[list[str]] = [[], []]
        readers = [
            threading.Thread(target=lambda pipe=pipe, into=into: into.extend(pipe), daemon=True)  # type: ignore[misc]
            for pipe, into in zip((process.stdout, process.stderr), said, strict=True)
        ]
        for reader in readers:
            reader.start()
        try:
            if end == "kill early":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0, 8))
            elif end:
                self._wait(lambda: process.poll() is not None or self.count() >= before + until)
                time.sleep(pause)
            if process.poll() is None:
                if end.startswith("kill"):
                    process.kill()
                elif end == "stop":
                    process.send_signal(signal.SIGTERM)
                elif end == "disk":
                    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
                    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, hard))
            elif end:
                leg.ended_by = f"({end})"  # it was quicker
            try:
                leg.code = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGUSR1)  # says where it stands
                leg.ended_by = f"{end} hangs".strip()
                time.sleep(1)
        finally:
            process.kill()
            process.wait()
        with contextlib.suppress(TimeoutError):
            self._wait(lambda: not self.processes(), 30)
        leg.left = self.processes()
        for reader in readers:
            reader.join(10 if not leg.left else 0.1)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None and not leg.left:  # else somebody still reads
                pipe.close()
        leg.out, leg.err = ("".join(list(one)) for one in said)
        return leg

    @staticmethod
    def _wait(what: Callable[[], bool], seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing happened for {seconds:g} s")
            time.sleep(0.05)

    def count(self) -> int:
        """Rows in the log."""
        return len(list(read(self.run, "SELECT id FROM data")))

    @property
    def mark(self) -> str:
        return f"chaos-{self.seed}-{self.folder}"

    def processes(self) -> list[str]:
        """What still runs of it: what has its mark, or works in its folder."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
                if entry.name.isdigit() and b") Z " not in (entry / "stat").read_bytes():
                    of = f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes()
                    if of or Path(os.readlink(entry / "cwd")).is_relative_to(self.folder):
                        found.append(f"{entry.name} {(entry / 'cmdline').read_bytes()[:200]!r}")
        return found

    def end_what_is_left(self) -> None:
        for line in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)


def read(run: Path, sql: str) -> Iterator[tuple]:  # type: ignore[type-arg]
    """Rows of the log's database, read by SQLite alone; none while there is no such table."""
    path = run / "episodes" / "episodes.sqlite"
    if path.exists():
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as db:
            try:
                yield from db.execute(sql).fetchall()
            except sqlite3.OperationalError as e:
                if "no such table" not in str(e):
                    raise
