"""The flywheel, once around: train, deploy, collect what users say, train on that, and see whether it helped.

    python examples/flywheel/flywheel.py --seeds 1 2 3

Everything is a process that a person would start, on loopback: ``astuner run``, ``astuner serve``, ``astuner data
collect``.  Each stage keeps its result in ``flywheel_runs/seed-N/``, so a second start goes on where the first ended.
The control arm trains as many further steps as the flywheel, but on the makers' old tasks: what the users' data brought
is the difference between the two.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from users import EVERYBODY, KNOWN, MAKERS, OTHERS, Asked, ask_all, draw, without_near

from astuner.compare.statistics import Interval, PairedTable, crossed_bootstrap_interval, mcnemar_exact
from astuner.rollout.metrics import wilson_interval
from astuner_local.tiny.problems import Problem

HERE = Path(__file__).parent
ARMS = {
    "first": "first model",
    "control": "+ more of the old tasks",
    "again": "+ users' feedback",
}
"""What is compared, in the order of the table."""
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
    further_steps: int
    held_out: int
    settings: tuple[str, ...] = ()


FULL = Size(first_tasks=1000, first_steps=60, asked=800, further_steps=80, held_out=400)
QUICK = Size(
    first_tasks=16,
    first_steps=2,
    asked=16,
    further_steps=2,
    held_out=8,
    settings=("astuner.data.train_batch_size=2", "astuner.rollout.num_repeat=4"),
)
"""So small that nothing is learned: shows that everything runs."""


class Seed:
    """One way around, in a folder of its own."""

    def __init__(self, folder: Path, seed: int, size: Size) -> None:
        self.folder, self.seed, self.size = folder / f"seed-{seed}", seed, size
        self.folder.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "log.txt"
        kept, mine = self.folder / "size.txt", str(size)
        if kept.is_file() and kept.read_text(encoding="utf-8") != mine:
            raise SystemExit(f"{self.folder} was begun with another size; give --folder another one")
        kept.write_text(mine, encoding="utf-8")

    def go_round(self) -> dict[str, list[Asked]]:
        """Every arm's answers to the held-out people."""
        size = self.size
        rng = random.Random(self.seed)
        makers = draw(rng, size.first_tasks, MAKERS, KNOWN, held_out=False)
        users = draw(rng, size.asked, EVERYBODY, KNOWN, held_out=False)
        held_out = draw(random.Random(HELD_OUT_SEED), size.held_out, EVERYBODY, OTHERS, held_out=True)
        if near := len(held_out) - len(without_near(held_out, [*makers, *users])):
            raise SystemExit(f"{near} held-out questions nearly repeat others; that must not be")
        tasks = self.folder / "first.jsonl"
        tasks.write_text("".join(json.dumps(problem.as_gsm8k()) + "\n" for problem in makers), encoding="utf-8")
        old = f"astuner.task_reader.jsonl.training.file_path={tasks}"

        self.train("first", "first.yaml", size.first_steps, old)
        traces = self.deploy(users)
        first = f"astuner.model.path={self.checkpoint('first')}"
        self.train("control", "first.yaml", size.further_steps, old, first)
        self.train("again", "again.yaml", size.further_steps, f"astuner.task_reader.tracing.sources=[{traces}]", first)
        return {arm: self.ask(arm, held_out) for arm in ARMS}

    # ---------------------------------------------------------------- stages

    def train(self, name: str, experiment: str, steps: int, *settings: str) -> None:
        """``astuner run``, unless that is done."""

        def make() -> dict[str, Any]:
            command = ["run", str(HERE / experiment), *settings, *self.size.settings, "--backbone", "local", "--json"]
            command += ["--run-dir", str(self.folder / name), "--steps", str(steps), "--seed", str(self.seed)]
            with self.log.open("ab") as log:
                done = subprocess.run(astuner(command), stdout=subprocess.PIPE, stderr=log, check=False)
            if done.returncode:
                self.fail(f"astuner {' '.join(command)} ended with {done.returncode}")
            found: dict[str, Any] = json.loads(done.stdout)
            return found

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

    def ask(self, arm: str, held_out: Sequence[Problem]) -> list[Asked]:
        """The held-out people ask a model."""

        def make() -> dict[str, Any]:
            with self.serving(arm) as access:
                return {"asked": [asdict(each) for each in asyncio.run(ask_all(access, held_out))]}

        found = self.stage(f"ask-{arm}", f"{len(held_out)} other people ask {arm}", make)
        return [Asked(**each) for each in found["asked"]]

    # --------------------------------------------------------------- helpers

    def stage(self, name: str, what: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of a stage, made now or kept from before."""
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
        """A server, from its first line of JSON to Ctrl-C."""
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


# -------------------------------------------------------------------------------------------------------------- results


def share(asked: Sequence[Asked]) -> str:
    """Right answers in per cent, with Wilson's 95 % interval."""
    right = sum(each.right for each in asked)
    low, high = wilson_interval(right, len(asked))
    return f"{right / max(len(asked), 1):.1%} [{low:.0%}, {high:.0%}]".replace("%", " %")


def table(results: dict[int, dict[str, list[Asked]]]) -> str:
    """Markdown: one line for each model of each seed, and what the differences come to."""
    lines = [
        "| seed | model | makers' wordings | other wordings | all | McNemar's p against the control |",
        "|---|---|---|---|---|---|",
    ]
    for seed, arms in results.items():
        for arm, title in ARMS.items():
            asked = arms[arm]
            makers = [each for each in asked if each.wording in MAKERS]
            others = [each for each in asked if each.wording not in MAKERS]
            pairs = PairedTable.of(
                [(c.right, each.right) for c, each in zip(arms["control"], asked, strict=True)]
            )
            p = "" if arm == "control" else f"{mcnemar_exact(pairs):.1g}"
            lines.append(f"| {seed} | {title} | {share(makers)} | {share(others)} | {share(asked)} | {p} |")
    lines.append("")
    for one, other in (("again", "first"), ("again", "control"), ("control", "first")):
        difference, interval = gain(results, one, other)
        lines.append(
            f"- {ARMS[one]!r} minus {ARMS[other]!r}: {difference * 100:+.1f} points, 95 % interval "
            f"{interval.low * 100:+.1f} to {interval.high * 100:+.1f} (bootstrap over seeds and questions)"
        )
    return "\n".join(lines) + "\n"


def gain(results: dict[int, dict[str, list[Asked]]], one: str, other: str) -> tuple[float, Interval]:
    """The mean difference of two arms over all seeds."""
    of_one, of_other = (
        [[float(each.right) for each in arms[arm]] for arms in results.values()] for arm in (one, other)
    )
    means = [sum(map(sum, side)) / sum(map(len, side)) for side in (of_one, of_other)]
    return means[0] - means[1], crossed_bootstrap_interval(of_one, of_other)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="one way around for each")
    parser.add_argument("--folder", type=Path, help="where everything is kept (flywheel_runs; flywheel_runs/quick)")
    parser.add_argument("--quick", action="store_true", help="two steps of everything: shows that it runs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    folder = (options.folder or Path("flywheel_runs") / ("quick" if options.quick else "")).absolute()
    os.environ.setdefault("ASTUNER_HOME", str(folder / "home"))  # access files; nobody else's
    size = QUICK if options.quick else FULL
    began = time.monotonic()
    results = {seed: Seed(folder, seed, size).go_round() for seed in options.seeds}
    report = table(results)
    (folder / "results.md").write_text(report, encoding="utf-8")
    print(f"\n{report}\nalso in {folder / 'results.md'}; {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
