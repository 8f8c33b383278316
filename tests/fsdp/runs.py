"""`astuner` as a person runs it, in processes of its own: started, watched, interrupted, killed."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
MATH_AGENT = ROOT / "examples" / "math_agent" / "math_agent.yaml"
PLAIN = (
    "astuner.data.train_batch_size=8",
    "astuner.rollout.num_repeat=8",
    "astuner.trainer_common.ppo_epochs=1",
    "astuner.trainer_common.use_kl_loss=false",
    "astuner.trainer_common.optim.lr_warmup_steps=5",
)
"""The example with one update a step and no reference model, for what is not about learning."""
PATIENCE = 560.0
"""Seconds after which what should happen is not waited for any more; less than pytest's own limit."""


def astuner(backbone: str, command: str, file: Path, folder: Path, *more: str) -> str:
    """``astuner COMMAND FILE --backbone BACKBONE --run-dir FOLDER …``; what it printed on its standard output."""
    done = subprocess.run(
        _command(backbone, command, file, folder, *more), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Run:
    """``astuner run`` with a run folder; everything that it starts is ended with it."""

    def __init__(
        self, backbone: str, file: Path, folder: Path, *more: str, on: Callable[[Sequence[str]], Sequence[str]] = list
    ) -> None:
        """:param on: what to type here for a command to run on some machine."""
        self.folder = folder
        self.printed = folder.with_suffix(".txt")
        self._agents: list[psutil.Process] = []
        with self.printed.open("ab") as file_:
            self.process = subprocess.Popen(
                on(_command(backbone, "run", file, folder, *more)),
                stdout=file_,
                stderr=subprocess.STDOUT,
                # what a shell starts in its background is deaf to Ctrl-C
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def ends(self) -> int:
        """Its exit status."""
        return self.process.wait(PATIENCE)

    def until(self, happened: Callable[[], Any]) -> Any:
        """Wait until ``happened`` says something true, and return it."""
        end = time.monotonic() + PATIENCE
        while not (found := happened()):
            assert self.process.poll() is None, f"it has ended: {self.said()}"
            assert time.monotonic() < end, f"in vain: {self.said()}"
            time.sleep(0.1)
        return found

    def processes(self) -> list[psutil.Process]:
        """The run's own process, and all below it."""
        run = psutil.Process(self.process.pid)
        return [run, *run.children(recursive=True)]

    def planned(self) -> str:
        """See that the plan's processes and host memory are within a fifth of what the run takes now; the figures.

        A page that neighbours have mapped as well, such as torch's code, counts less: beside other tests less is taken.
        """
        for_them = re.search(r"Processes +(\d+): (?s:.*?)Host memory +about ([\d.]+) GiB", self.said())
        assert for_them, self.said()
        shares = []
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # one of a moment
                shares.append(process.memory_full_info().pss)
        plan, took = (int(for_them[1]), float(for_them[2])), (len(shares), sum(shares) / 2**30)
        figures = f"processes {plan[0]} planned, {took[0]} there; {plan[1]:.1f} GiB planned, {took[1]:.2f} taken"
        assert 0.8 <= took[0] / plan[0] <= 1.2, figures
        assert 0.65 <= took[1] / plan[1] <= 1.2, figures
        return figures

    def planned_disk(self) -> str:
        """See that the plan's sizes of a checkpoint and a state are within a fifth of what is there; the figures."""
        found = re.search(r"Disk +([\d.]+) MiB per checkpoint.*? and ([\d.]+) MiB to resume", self.said())
        assert found, self.said()
        (state,) = (self.folder / "resume").glob(f"**/global_step_{self.resumable_at()}")
        newest = max((self.folder / "checkpoints").glob("step-*"))
        took = [
            _size(p for p in folder.rglob("*") if folder == newest or p.stat().st_nlink == 1)
            for folder in (newest, state)
        ]
        figures = f"MiB: {found[1]} and {found[2]} planned, {took[0]:.3f} and {took[1]:.3f} there"
        for plan, there in zip(found.groups(), took, strict=True):
            assert 0.8 <= float(plan) / there <= 1.2, figures
        return figures

    def killed(self) -> None:
        """Kill it as nothing can be prepared for, and see that no more of it goes on than Ray's two agents."""
        everything = self.processes()
        agents = [p for p in everything if p.name().startswith(("ray::Dashboard", "ray::RuntimeEnv"))]
        self.process.kill()
        self.process.wait(PATIENCE)
        _gone([p for p in everything if p not in agents], 60)
        self._agents = agents

    def is_gone(self) -> None:
        """See that after `killed` the agents have ended too: they try for a minute or two to report the end."""
        _gone(self._agents, 180)

    def interrupted(self) -> int:
        """Ctrl-C, once; the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.ends()

    def said(self) -> str:
        """What it has printed so far."""
        return self.printed.read_text(errors="replace")

    def metrics(self) -> list[dict[str, Any]]:
        """All rows of ``metrics.jsonl``."""
        return self._rows("metrics.jsonl")

    def steps(self) -> dict[int, dict[str, float]]:
        """Step -> its numbers, as ``metrics.jsonl`` has them; every step once."""
        rows = [row for row in self._rows("metrics.jsonl") if "reward/mean" in row]
        steps = {int(row["step"]): row for row in rows}
        assert len(steps) == len(rows), "a step is in the metrics twice"
        return steps

    def validations(self) -> dict[int, dict[str, float]]:
        """Step -> what its validation said."""
        return {int(row["step"]): row for row in self._rows("metrics.jsonl") if "val/success" in row}

    def failures(self) -> list[dict[str, Any]]:
        """The episodes that were not scored, and the groups that were dropped."""
        return self._rows("failures.jsonl")

    def groups(self) -> dict[int, set[str]]:
        """Step -> the groups whose conversations it wrote (with ``save_episodes=-1``: all)."""
        files = sorted((self.folder / "episodes").glob("step_*.jsonl"))
        return {int(f.stem[5:]): {row["group_id"] for row in _read(f)} for f in files}

    def versions(self) -> dict[int, set[int]]:
        """Step -> the versions of the weights that its conversations were generated with (``save_episodes=-1``)."""
        files = sorted((self.folder / "episodes").glob("step_*.jsonl"))
        return {int(f.stem[5:]): {turn["policy_version"] for row in _read(f) for turn in row["turns"]} for f in files}

    def returned(self, step: int) -> tuple[int, list[int]]:
        """As saved after ``step``: how many groups had been drawn, and which of them are to be drawn again."""
        (file,) = (self.folder / "resume").glob(f"**/global_step_{step}/astuner.json")
        books = json.loads(file.read_text())
        draws = books["state"]["draws"]
        return draws["position"], [at for at, _ in draws["returned"]]

    def certificate(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "certificate.json").read_text())
        return found

    def saved(self) -> list[str]:
        """The checkpoints, the oldest first."""
        return sorted(p.name for p in (self.folder / "checkpoints").iterdir())

    def resumable_at(self) -> int:
        """The step from which ``--resume`` would go on; 0: none."""
        complete = [p.parent.name for p in (self.folder / "resume").glob("**/global_step_*/astuner.json")]
        return max((int(name.rpartition("_")[2]) for name in complete), default=0)

    def _rows(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        return _read(file) if file.exists() else []


@contextlib.contextmanager
def running(
    backbone: str, file: Path, folder: Path, *more: str, on: Callable[[Sequence[str]], Sequence[str]] = list
) -> Iterator[Run]:
    """A `Run`; however the test ends, nothing of it stays."""
    run = Run(backbone, file, folder, *more, on=on)
    everything: list[psutil.Process] = []
    try:
        yield run
    finally:
        if run.process.poll() is None:
            everything = run.processes()
        for process in everything:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        run.process.wait(PATIENCE)


def _command(backbone: str, command: str, file: Path, folder: Path, *more: str) -> Sequence[str]:
    options = [m for m in more if m.startswith("-")]
    return [
        *(sys.executable, "-m", "astuner", command, str(file), "--backbone", backbone, "--run-dir", str(folder)),
        *options,
        *(m for m in more if not m.startswith("-")),
    ]


def _size(files: Iterable[Path]) -> float:
    """MiB; a file that shares its blocks with others counts here."""
    return sum(f.stat().st_size for f in files if f.is_file()) / 2**20


def _gone(processes: Sequence[psutil.Process], within: float) -> None:
    left = psutil.wait_procs(processes, within)[1]
    assert not left, [(p.pid, p.name()) for p in left]


def position(group_id: str) -> int:
    """Which draw a group is, however often it was drawn."""
    return int(group_id.lstrip("g").partition(".")[0])


def _read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_bytes().split(b"\n")[:-1]  # the last one is empty, or being written
    return [json.loads(line) for line in lines]
