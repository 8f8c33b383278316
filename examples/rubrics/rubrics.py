"""No reward function: learn rubrics from people's comparisons, check them, train on them, and ask what people say now.

    python examples/rubrics/rubrics.py --seeds 0 1 2 3 4

Everything is a command that a person would type: ``astuner serve``, ``astuner judge learn``, ``astuner judge check``,
``astuner run``.  Each stage keeps its result in ``rubrics_runs/``, so a second start goes on where the first ended.
What people want (`people.py`) is known to the people, who give the labels and say in the end how good replies to
held-out questions are, and to the stand-in for a language model, by design: it stands for one that understands people.
What is tested is the way, and not a model's insight.  The control arm is trained in the same way, on rubrics that
somebody made up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import httpx
import stand_in
import yaml
from desk import SYSTEM_PROMPT, Question, questions
from people import WANTED, compared, does, worth

from astuner.testing import ScriptedModel
from astuner_record.statistics import Interval, bootstrap_interval, crossed_bootstrap_interval

HERE = Path(__file__).parent
ARMS = {"before": "untrained", "polite": "trained on rubrics made up", "learned": "trained on learned rubrics"}
"""What is compared, in the order of the table."""
PATIENCE = 600.0
"""Seconds in which a server must answer."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of everything."""

    warm_up: int
    """Steps in which the model learns to write replies at all."""
    asked: int
    """Questions to which people compare two replies: half are learned from, and half check what was learned."""
    steps: int
    held_out: int
    settings: tuple[str, ...] = ()
    learning: tuple[str, ...] = ("--votes", "3")
    checking: tuple[str, ...] = ()


FULL = Size(warm_up=300, asked=280, steps=120, held_out=90)
QUICK = Size(
    warm_up=60,
    asked=64,
    steps=2,
    held_out=4,
    settings=("astuner.data.train_batch_size=2", "astuner.rollout.num_repeat=4"),
    learning=("--force",),
    checking=("--attacks", "0", "--repeats", "1"),
)
"""So small that nothing is learned: shows that everything runs."""

Reply = tuple[str, str]
"""A question and a reply to it."""


class Stages:
    """A folder in which each stage keeps its result."""

    def __init__(self, folder: Path, name: str, size: Size) -> None:
        self.folder, self.name, self.size = folder, name, size
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "log.txt"
        kept = folder / "size.txt"
        if kept.is_file() and kept.read_text(encoding="utf-8") != str(size):
            raise SystemExit(f"{folder} was begun with another size; give --folder another one")
        kept.write_text(str(size), encoding="utf-8")

    def stage(self, name: str, what: str, make: Callable[[], Any]) -> Any:
        """Run a stage and keep its result, or return the result that is already kept."""
        kept = self.folder / f"{name}.json"
        if kept.is_file():
            return json.loads(kept.read_text(encoding="utf-8"))
        print(f"[{time.strftime('%H:%M:%S')}] {self.name}: {what}", flush=True)
        found = make()
        temporary = kept.with_suffix(".part")
        temporary.write_text(json.dumps(found, indent=1), encoding="utf-8")
        temporary.replace(kept)
        return found

    def command(self, *arguments: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
        """``astuner …``, with what it says of its progress in the log."""
        with self.log.open("a", encoding="utf-8") as log:
            done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
            log.write(done.stderr)
        if done.returncode and not may_fail:
            raise SystemExit(f"{done.stderr[-2000:]}\n{' '.join(arguments)} ended with {done.returncode}")
        return done

    @contextmanager
    def serving(self, model: Path) -> Iterator[dict[str, Any]]:
        """``astuner serve`` with the untrained model; where it is and its key."""
        command = [sys.executable, "-m", "astuner", "serve", str(HERE / "rubrics.yaml"), "--backbone", "local"]
        command += ["--checkpoint", str(model), "--port", "0", "--json"]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        try:
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
            line = process.stdout.readline() if ready else b""
            if not line:
                raise SystemExit(f"{' '.join(command)} did not begin; see {self.log}")
            yield json.loads(Path(json.loads(line)["access_file"]).read_text(encoding="utf-8"))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


class Shared(Stages):
    """What all seeds begin with: the model, and the questions."""

    @property
    def model(self) -> Path:
        return self.folder / "tiny_clerk"

    def prepare(self) -> None:
        def make() -> None:
            shutil.rmtree(self.model, ignore_errors=True)
            self.command(str(HERE / "make_model.py"), "--out", str(self.model), "--steps", str(self.size.warm_up))

        self.stage("model", "make the model that writes replies and does not think", make)
        held_out = random.Random(0).sample(questions(held_out=True), self.size.held_out)
        for name, asked in (("tasks", questions(held_out=False)), ("held_out", held_out)):
            lines = [json.dumps({"question": question.text}) + "\n" for question in asked]
            (self.folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")

    def replies(self, seed: int, asked: Sequence[Question]) -> list[tuple[Question, str, str]]:
        """Two replies of the untrained model to each question."""

        def make() -> list[list[str]]:
            with self.serving(self.model) as access, ThreadPoolExecutor(16) as pool, httpx.Client(
                trust_env=False, timeout=PATIENCE, headers={"Authorization": f"Bearer {access['api_key']}"}
            ) as client:  # fmt: skip

                def ask(number: int, question: Question) -> list[str]:
                    said = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
                    drawn = seed * 1000 + number  # one seed for all would draw the same sentences for all
                    body = {"model": "any", "messages": said, "n": 2, "seed": drawn, "temperature": 1.0}
                    found = client.post(f"{access['base_url']}/chat/completions", json=body).raise_for_status().json()
                    return [choice["message"]["content"] for choice in found["choices"]]

                return list(pool.map(ask, range(len(asked)), asked))

        found = self.stage(f"replies-{seed}", f"customers ask {len(asked)} questions and get two replies to each", make)
        return [(question, *two) for question, two in zip(asked, found, strict=True)]


class Seed(Stages):
    """From people's comparisons to a trained model, in a folder of its own."""

    def __init__(self, shared: Shared, seed: int) -> None:
        super().__init__(shared.folder / f"seed-{seed}", f"seed {seed}", shared.size)
        self.shared, self.seed = shared, seed

    def go(self) -> dict[str, list[Reply]]:
        """Every arm's replies to the held-out questions."""
        rng = random.Random(self.seed)
        asked = rng.sample(questions(held_out=False), self.size.asked)
        half = len(asked) // 2
        replies = self.shared.replies(self.seed, asked)
        labels, others = compared(replies[:half], rng), compared(replies[half:], rng)
        for name, rows in (("samples", labels), ("labels", others), ("coin", at_random(labels, rng))):
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (self.folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")

        with ScriptedModel(stand_in.reply) as helper:
            at = ("--base-url", helper.base_url, "--model", "stand-in")
            self.stage("learn", f"learn rubrics from {len(labels)} comparisons", lambda: self.learn("samples", at))
            self.stage("refused", "the same, when a coin compared", lambda: self.learn("coin", at, may_fail=True))
            self.stage("card", f"check them with {len(others)} other comparisons", lambda: self.check(at))

            def trained(arm: str) -> dict[str, list[Reply]]:
                found: dict[str, list[Reply]] = self.stage(
                    f"train-{arm}", f"train for {self.size.steps} steps, {ARMS[arm]}", lambda: self.train(arm, helper)
                )
                return found

            with ThreadPoolExecutor(2) as both:
                polite, learned = both.map(trained, ("polite", "learned"))
        return {"before": learned["before"], "polite": polite["after"], "learned": learned["after"]}

    def rubrics(self, arm: str) -> Path:
        return HERE / "polite.yaml" if arm == "polite" else self.folder / f"rubrics-{arm}.yaml"

    def learn(self, samples: str, helper: Sequence[str], *, may_fail: bool = False) -> dict[str, Any]:
        """``astuner judge learn``."""
        out = self.rubrics("learned" if samples == "samples" else samples)
        options = () if may_fail else self.size.learning
        command = ["-m", "astuner", "judge", "learn", str(self.folder / f"{samples}.jsonl"), "--out", str(out)]
        done = self.command(*command, *helper, *options, "--json", may_fail=may_fail)
        if done.returncode:
            return {"refused": done.stderr.partition("astuner: ")[2]}
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def check(self, helper: Sequence[str]) -> dict[str, Any]:
        """``astuner judge check``."""
        labels = self.folder / "labels.jsonl"
        command = ["-m", "astuner", "judge", "check", str(self.rubrics("learned")), "--labels", str(labels)]
        found: dict[str, Any] = json.loads(self.command(*command, *helper, *self.size.checking, "--json").stdout)
        return found

    def train(self, arm: str, helper: ScriptedModel) -> dict[str, list[Reply]]:
        """``astuner run``, and what the model replies to held-out questions before and after."""
        run = self.folder / arm
        steps = self.size.steps
        self.command(
            *("-m", "astuner", "run", str(HERE / "rubrics.yaml"), "--backbone", "local", "--json"),
            *("--run-dir", str(run), "--steps", str(steps), "--seed", str(self.seed)),
            f"astuner.model.path={self.shared.model}",
            f"astuner.task_reader.jsonl.training.file_path={self.shared.folder / 'tasks.jsonl'}",
            f"astuner.task_reader.jsonl.validation.file_path={self.shared.folder / 'held_out.jsonl'}",
            f"astuner.task_judge.rubrics.file={self.rubrics(arm)}",
            f"astuner.helper_models.checker.base_url={helper.base_url}",
            f"astuner.trainer_common.test_freq={steps}",
            *self.size.settings,
        )
        return {"before": validated(run, 0), "after": validated(run, steps)}


def at_random(labels: Sequence[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the same comparisons with random preferences."""
    return [{**row, "preferred": rng.randrange(2)} for row in labels]


def validated(run: Path, step: int) -> list[Reply]:
    """Return the replies to the held-out questions in a run's episode log, sorted by question."""
    found = []
    for line in (run / "episodes" / f"validation_{step:06d}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        found.append((row["query"], row["turns"][0]["reply"]["content"]))
    return sorted(found)


# -------------------------------------------------------------------------------------------------------------- results


def table(results: dict[int, dict[str, list[Reply]]]) -> str:
    """How much people like the replies, and what the replies do."""
    lines = [
        f"| seed | model | people's liking, 0 to 1 | {' | '.join(WANTED)} | greets | thanks |",
        "|---|---|---|" + "---|" * (len(WANTED) + 2),
    ]
    for seed, arms in results.items():
        for arm, name in ARMS.items():
            liking = [worth(*reply) for reply in arms[arm]]
            interval = bootstrap_interval(liking)
            done = [does(*reply) for reply in arms[arm]]
            shares = " | ".join(f"{mean(each[key] for each in done):.0%}".replace("%", " %") for key in done[0])
            lines.append(
                f"| {seed} | {name} | {mean(liking):.2f} [{interval.low:.2f}, {interval.high:.2f}] | {shares} |"
            )
    lines.append("")
    for one, other in (("learned", "before"), ("learned", "polite"), ("polite", "before")):
        difference, interval = gain(results, one, other)
        lines.append(
            f"- '{ARMS[one]}' minus '{ARMS[other]}': {difference:+.2f}, 95 % interval {interval.low:+.2f} to "
            f"{interval.high:+.2f} (bootstrap over seeds and questions)"
        )
    return "\n".join(lines) + "\n"


def gain(results: dict[int, dict[str, list[Reply]]], one: str, other: str) -> tuple[float, Interval]:
    """Return the mean difference in liking of two arms over all seeds, with its interval."""
    of_one, of_other = ([[worth(*reply) for reply in arms[arm]] for arms in results.values()] for arm in (one, other))
    return mean(map(mean, of_one)) - mean(map(mean, of_other)), crossed_bootstrap_interval(of_one, of_other)


def learned(folder: Path, seeds: Sequence[int]) -> str:
    """Return a table of the learned rubrics and their measurements for each seed."""
    lines = [
        "| seed | comparisons | rubrics learned | held-out agreement | the card says | agreement if nobody erred | "
        "when a coin compared |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for seed in seeds:
        at = folder / f"seed-{seed}"
        card, refused = (json.loads((at / f"{name}.json").read_text(encoding="utf-8")) for name in ("card", "refused"))
        rubrics = yaml.safe_load((at / "rubrics-learned.yaml").read_text(encoding="utf-8"))
        said = "; ".join(f"{r['weight']:g} x {r['criterion']}" for r in rubrics["rubrics"])
        known, agreed = rubrics["learned"], card["measures"]["concordance"]
        lines.append(
            f"| {seed} | {known['train'] + len(known['held_out'])} | {said} | {known['agreement']['share']:.0%} of "
            f"{known['agreement']['n']} | {card['verdict']}: agreement {agreed['value']:.2f} of {agreed['n']} | "
            f"{if_nobody_erred(at / 'labels.jsonl', rubrics['rubrics']):.2f} | "
            f"{'no file' if 'refused' in refused else 'a file'} |".replace("%", " %")
        )
    return "\n".join(lines) + "\n"


def if_nobody_erred(labels: Path, rubrics: Sequence[dict[str, Any]]) -> float:
    """How the rubrics agree with people on these pairs, with no wrong click and no wrong grade; ties count half."""
    agreed: list[float] = []
    for line in labels.read_text(encoding="utf-8").splitlines():
        question, answers = (json.loads(line)[key] for key in ("question", "answers"))
        liked, other_liked = (worth(question, answer) for answer in answers)
        graded, other_graded = (
            sum(r["weight"] * stand_in.grade(r["criterion"], question, answer, 0, 1) for r in rubrics)
            for answer in answers
        )
        agreed.append(0.5 if graded == other_graded else float((graded > other_graded) == (liked > other_liked)))
    return mean(agreed)


NOTHING_LEARNED = "With --quick nothing can be learned: two steps, a few questions. Differences above are chance."


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="people, learning and training for each")
    parser.add_argument("--folder", type=Path, help="where everything is kept (rubrics_runs; rubrics_runs/quick)")
    parser.add_argument("--quick", action="store_true", help="two steps of training: shows that it runs")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are ended, too
    folder = (options.folder or Path("rubrics_runs") / ("quick" if options.quick else "")).absolute()
    os.environ.setdefault("ASTUNER_HOME", str(folder / "home"))  # access files and caches; nobody else's
    began = time.monotonic()
    shared = Shared(folder, "all seeds", QUICK if options.quick else FULL)
    shared.prepare()
    results = {seed: Seed(shared, seed).go() for seed in options.seeds}
    report = f"{learned(folder, options.seeds)}\n{table(results)}"
    if options.quick:
        report += f"\n{NOTHING_LEARNED}\n"
    (folder / "results.md").write_text(report, encoding="utf-8")
    print(f"\n{report}\nalso in {folder / 'results.md'}; {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
