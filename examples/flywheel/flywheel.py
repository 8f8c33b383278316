"""The complete flywheel: train, deploy, collect feedback, filter and augment it, train on it, and measure the gain.

    python examples/flywheel/flywheel.py --seeds 0 1 2 3 4

All stages are ordinary commands on loopback: ``astuner run``, ``astuner serve``, ``astuner data collect``, ``import``
and ``generate``.  Each stage keeps its result in ``flywheel_runs/seed-N/``, so a second start resumes after the last
finished stage.  The three arms after the first model train for the same number of additional steps: on the makers' old
tasks (the control), on the users' tasks, and on the users' tasks with generated similar ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from results import ARMS, of_augmenting, table
from users import EVERYBODY, KNOWN, MAKERS, OTHERS, Asked, ask_all, draw, without_near
from writer import Writer, understand

from astuner.testing import ScriptedModel
from astuner_local.tiny.problems import Problem, is_held_out

HERE = Path(__file__).parent
HELD_OUT_SEED = 0
"""The same people ask every model of every seed in the end, so that models are compared on the same questions."""
PATIENCE = 300.0
"""Seconds in which a server must answer."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of everything."""

    first_tasks: int
    first_steps: int
    asked: int
    """Questions of the first model's users."""
    generated: int
    """Tasks that are made of those of the users, before the check against the held-out questions."""
    further_steps: int
    held_out: int
    settings: tuple[str, ...] = ()


FULL = Size(first_tasks=1000, first_steps=60, asked=160, generated=500, further_steps=80, held_out=400)
QUICK = Size(
    first_tasks=16,
    first_steps=2,
    asked=16,
    generated=12,
    further_steps=2,
    held_out=8,
    settings=("astuner.data.train_batch_size=2", "astuner.rollout.num_repeat=4"),
)
"""So small that nothing is learned: shows that everything runs."""


class Seed:
    """One way around, in a folder of its own.

    :param real_writer: ask the helper model that augment.yaml names, and not the scripted one.
    """

    def __init__(self, folder: Path, seed: int, size: Size, *, real_writer: bool = False) -> None:
        self.folder, self.seed, self.size, self.real_writer = folder / f"seed-{seed}", seed, size, real_writer
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "log.txt"
        kept, mine = self.folder / "size.txt", f"{size}, {'real' if real_writer else 'scripted'} writer"
        if kept.is_file() and kept.read_text(encoding="utf-8") != mine:
            raise SystemExit(f"{self.folder} was begun with another size or writer; give --folder another one")
        kept.write_text(mine, encoding="utf-8")

    def go_round(self) -> dict[str, list[Asked]]:
        """Every arm's answers to the held-out people."""
        size = self.size
        rng = random.Random(self.seed)
        makers = draw(rng, size.first_tasks, MAKERS, KNOWN, held_out=False)
        users = draw(rng, size.asked, EVERYBODY, KNOWN, held_out=False)
        held_out = draw(random.Random(HELD_OUT_SEED), size.held_out, EVERYBODY, OTHERS, held_out=True)
        questions = [problem.question for problem in held_out]
        if near := len(questions) - len(without_near(questions, [p.question for p in [*makers, *users]])):
            raise SystemExit(f"{near} held-out questions nearly repeat others; that must not be")
        tasks = self.folder / "first.jsonl"
        tasks.write_text("".join(json.dumps(problem.as_gsm8k()) + "\n" for problem in makers), encoding="utf-8")
        file = "astuner.task_reader.jsonl.training.file_path"

        self.train("first", "first.yaml", size.first_steps, f"{file}={tasks}")
        traces = self.deploy(users)
        more = self.augment(traces, questions)
        first = f"astuner.model.path={self.checkpoint('first')}"
        self.train("control", "first.yaml", size.further_steps, f"{file}={tasks}", first)
        self.train("again", "again.yaml", size.further_steps, f"astuner.task_reader.tracing.sources=[{traces}]", first)
        self.train("augmented", "first.yaml", size.further_steps, f"{file}={more}", first)
        return {arm: self.ask(arm, held_out) for arm in ARMS}

    # ---------------------------------------------------------------- stages

    def train(self, name: str, experiment: str, steps: int, *settings: str) -> None:
        """``astuner run``, unless that is done."""

        def make() -> dict[str, Any]:
            command = ["run", str(HERE / experiment), *settings, *self.size.settings, "--backbone", "local", "--json"]
            command += ["--run-dir", str(self.folder / name), "--steps", str(steps), "--seed", str(self.seed)]
            return self.command(*command)

        self.stage(f"train-{name}", f"train {name}, {steps} steps", make)

    def deploy(self, users: Sequence[Problem]) -> Path:
        """People use the first model, and say what they think; the database that holds it."""
        traces = self.folder / "traces.sqlite"

        def make() -> dict[str, Any]:
            traces.unlink(missing_ok=True)  # of an attempt that did not get to its end
            with (
                self.running("data", "collect", str(traces), "--port", "0") as collector,
                self.serving("first", "--trace", collector["traces_url"]) as access,
            ):
                asked = asyncio.run(ask_all(access, users, feedback_seed=self.seed))
            return {"asked": len(asked), "right": sum(each.right for each in asked)}

        found = self.stage("deploy", f"{len(users)} people ask the first model", make)
        self.say(f"  {found['right']} of {found['asked']} answers were right")
        return traces

    def augment(self, traces: Path, held_out: Sequence[str]) -> Path:
        """Return the file with the users' tasks and generated ones, without tasks too close to the held-out questions.

        Runs ``astuner data import`` and ``generate``.
        """
        users, folder, kept = self.folder / "users.jsonl", self.folder / "generated", self.folder / "augmented.jsonl"

        def make() -> dict[str, Any]:
            imported = self.command(
                "data", "import", str(traces), "--config", str(HERE / "again.yaml"), "--to", str(users), "--json"
            )
            with ExitStack() as stack:
                command = ["data", "generate", str(HERE / "augment.yaml")]
                command.append(f"astuner.task_reader.data_generation.seeds={users}")
                if not self.real_writer:
                    model = stack.enter_context(ScriptedModel(Writer(self.seed)))
                    command.append(f"astuner.helper_models.writer.base_url={model.base_url}")
                    command.append("astuner.helper_models.writer.model=scripted")
                made = self.command(*command, "--tasks", str(self.size.generated), "--folder", str(folder), "--json")
            rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
            return write_apart(rows, held_out, kept) | {
                "asked": self.size.asked,
                "users": imported["split"]["train"],
                "written": made["made"] + sum(made["rejected"].values()) + made["spare"],
                "unused": made["spare"],
                "rejected": made["rejected"],
                "requests": made["usage"]["writer"]["calls"],
            }

        self.stage("augment", "a writer makes more tasks like those of the users", make)
        self.say(f"  {of_augmenting(self.augmented())}")
        return kept

    def augmented(self) -> dict[str, Any]:
        """Return the counts of `augment`."""
        found: dict[str, Any] = json.loads((self.folder / "augment.json").read_text(encoding="utf-8"))
        return found

    def ask(self, arm: str, held_out: Sequence[Problem]) -> list[Asked]:
        """Let the held-out people ask a model, and return their questions and answers."""

        def make() -> dict[str, Any]:
            with self.serving(arm) as access:
                return {"asked": [asdict(each) for each in asyncio.run(ask_all(access, held_out))]}

        found = self.stage(f"ask-{arm}", f"{len(held_out)} other people ask {arm}", make)
        return [Asked(**each) for each in found["asked"]]

    # --------------------------------------------------------------- helpers

    def stage(self, name: str, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Run a stage and keep its result, or return the result that is already kept."""
        kept = self.folder / f"{name}.json"
        if kept.is_file():
            found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
            return found
        self.say(what)
        began = time.monotonic()
        found = make()
        temporary = kept.with_suffix(".part")
        temporary.write_text(json.dumps(found), encoding="utf-8")
        temporary.replace(kept)
        self.say(f"  done in {time.monotonic() - began:.0f} s")
        return found

    def command(self, *command: str) -> dict[str, Any]:
        """Run a command until it ends and return the JSON that it prints."""
        with self.log.open("ab") as log:
            done = subprocess.run(astuner(command), stdout=subprocess.PIPE, stderr=log, check=False)
        if done.returncode:
            self.fail(f"astuner {' '.join(command)} ended with {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def checkpoint(self, name: str) -> Path:
        return max((self.folder / name / "checkpoints").glob("step-*"))

    @contextmanager
    def serving(self, name: str, *options: str) -> Iterator[dict[str, Any]]:
        """``astuner serve`` with one of the models; where it is and its key."""
        command = ["serve", str(HERE / "first.yaml"), "--backbone", "local", "--port", "0"]
        with self.running(*command, "--checkpoint", str(self.checkpoint(name)), *options) as server:
            yield json.loads(Path(server["access_file"]).read_text(encoding="utf-8"))

    @contextmanager
    def running(self, *command: str) -> Iterator[dict[str, Any]]:
        """Start a server, yield its first line of JSON, and stop it with Ctrl-C."""
        with self.log.open("ab") as log:
            process = subprocess.Popen(astuner([*command, "--json"]), stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
            line = process.stdout.readline() if ready else b""
            if not line:
                self.fail(f"astuner {' '.join(command)} did not begin")
            yield json.loads(line)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def say(self, text: str) -> None:
        print(f"[{time.strftime('%H:%M:%S')}] seed {self.seed}: {text}", flush=True)

    def fail(self, why: str) -> None:
        tail = self.log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise SystemExit(f"{tail}\n{why}; the end of {self.log} is above")


def astuner(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "astuner", *arguments]


def write_apart(rows: Sequence[dict[str, Any]], held_out: Sequence[str], to: Path) -> dict[str, int]:
    """Write the tasks that have nothing to do with the held-out questions; how many new ones there were of which kind.

    A generated task goes when it nearly repeats a held-out question, or has numbers that are reserved for the end in
    its wording: whoever wrote it could know neither.
    """
    new = {row["main_query"]: row for row in rows if row["metadata"]["provenance"]["source"] == "seed"}
    near = new.keys() - set(without_near(list(new), held_out))
    problems = {question: problem for question in new if (problem := understand(question)) is not None}
    reserved = {question for question, p in problems.items() if is_held_out(p.wording, p.a, p.b)} - near
    kept = new.keys() - near - reserved
    wrong = [q for q in kept if q in problems and problems[q].answer != new[q]["metadata"]["answer"]]
    left = [row for row in rows if row["main_query"] not in near | reserved]
    to.write_text("".join(json.dumps(row) + "\n" for row in left), encoding="utf-8")
    return {"made": len(new), "near": len(near), "reserved": len(reserved), "kept": len(kept), "wrong": len(wrong)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one way around for each")
    parser.add_argument("--folder", type=Path, help="where everything is kept (flywheel_runs; flywheel_runs/quick)")
    parser.add_argument("--quick", action="store_true", help="two steps of everything: shows that it runs")
    parser.add_argument("--asked", type=int, metavar="N", help=f"questions of the users ({FULL.asked})")
    parser.add_argument("--real-writer", action="store_true", help="ask the helper model that augment.yaml names")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    folder = (options.folder or Path("flywheel_runs") / ("quick" if options.quick else "")).absolute()
    os.environ.setdefault("ASTUNER_HOME", str(folder / "home"))  # access files; nobody else's
    size = QUICK if options.quick else FULL
    size = replace(size, asked=options.asked or size.asked)
    began = time.monotonic()
    seeds = [Seed(folder, seed, size, real_writer=options.real_writer) for seed in options.seeds]
    results = {each.seed: each.go_round() for each in seeds}
    report = table(results) + "".join(f"- Seed {each.seed}: {of_augmenting(each.augmented())}.\n" for each in seeds)
    if options.quick:
        report += "\nWith --quick nothing can be learned: two steps, a few questions. Differences above are chance.\n"
    (folder / "results.md").write_text(report, encoding="utf-8")
    print(f"\n{report}\nalso in {folder / 'results.md'}; {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
