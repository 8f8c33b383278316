"""The card: everything that was measured of a judge, and whether it is fit to give rewards; and how a command makes it.

The judge is found, configured and made as a run would.  Without an experiment file there is one of the least that a run
needs, so that a judge's section is checked by the same code, with the same messages.  The card is read as text (which
is Markdown), as one HTML page without scripts, or as JSON, all made of the same rows; what others wrote (a failure's
message) is shown as text only.  Invariant: the verdict is decided by the lines of the card and their limits alone, and
names those that decided it.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import html
import itertools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from astuner import Config, load_config
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, DataError, JudgeFailed
from astuner_helpers.members import Member
from astuner_helpers.settings import HelperModelKeys
from astuner_rubrics.agreement import wilson
from astuner_rubrics.attacks import ATTACKS
from astuner_rubrics.card.measures import (
    ABSTENTIONS,
    CONSISTENCY,
    FEWEST,
    MOST_PROBED,
    SUCCESSES,
    Judged,
    JudgeUnderTest,
    Limits,
    Measure,
    Probe,
    WatchedHelpers,
    agreement,
    attack_measures,
    length_bias,
    quantile,
    weaknesses,
)
from astuner_rubrics.labels import Labels, Mode, Overlap, Sample, digest, places_of_same, without_known
from astuner_rubrics.models import ONE, WHICH_MODEL, section_of
from astuner_rubrics.rubric_file import load_rubrics
from astuner_rubrics.rubrics_judge import RubricsConfig

Fitness = Literal["fit", "use with care", "do not use"]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What is asked of the judge besides the labels."""

    limit: int = 200
    """Labelled examples at most."""
    repeats: int = 3
    """Times that the judge is asked the same; 1 leaves self-consistency out."""
    attacks: int = 1
    """Wrong answers for each attack, behind each and in its place; 0 leaves attacks out."""
    seed: int = 0


@dataclass(frozen=True)
class Card:
    """How good a judge is."""

    judge: str
    labels: str
    labels_sha256: str
    mode: Mode
    examples: int
    date: str
    seed: int
    measures: tuple[Measure, ...]
    weaknesses: Mapping[str, float]
    """Attack -> how often it succeeded, of those that did."""
    failures: Mapping[str, int]
    """Why there was no verdict -> how often."""
    fitness: Fitness
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    overlap: Overlap | None = None
    """Labels that are not among the examples, since the rubrics were learned from them; None where nobody knows."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "judge": self.judge,
            "verdict": self.fitness,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
            "labels": {
                "file": self.labels,
                "sha256": self.labels_sha256,
                "mode": self.mode.value,
                "n": self.examples,
                "left_out_learned_from": self.overlap.same if self.overlap else None,
                "left_out_near": self.overlap.near if self.overlap else None,
            },
            "date": self.date,
            "seed": self.seed,
            "measures": {
                m.key: {
                    "value": m.value,
                    "low": m.interval[0] if m.interval else None,
                    "high": m.interval[1] if m.interval else None,
                    "n": m.n,
                    "grade": m.grade,
                    **({"note": m.note} if m.note else {}),
                    **({"care": m.limits.care, "bad": m.limits.bad} if m.limits else {}),
                }
                for m in self.measures
            },
            "attacks_that_succeeded": dict(self.weaknesses),
            "failures": dict(self.failures),
        }


async def check(
    judge: JudgeUnderTest, labels: Labels, plan: Plan, *, name: str, notes: Sequence[str], say: Say
) -> Card:
    """Ask the judge, and measure.

    :raises DataError: the labels are of a kind that the judge cannot be compared with, or lack the right answer that
        it wants.
    :raises JudgeFailed: it gave no verdict at all.
    :raises BudgetSpent: a helper's budget is spent; what was answered is in the helper's cache.
    """
    if judge.by_group and labels.mode is Mode.POINTWISE:
        raise DataError(
            f"{labels.name}: {name} compares answers to one question, and these labels are scores of single answers; "
            'label pairs {"question", "answers", "preferred"} or lists {"question", "answers", "ranks"}'
        )
    samples = sorted(labels.samples, key=lambda s: digest([plan.seed, s.place]))[: plan.limit]
    try:
        say(f"asking {name} about {len(samples)} labelled examples")
        verdicts = await asyncio.gather(*(judge.verdict(s, s.answers) for s in samples))
        judged = [Judged(s, v) for s, v in zip(samples, verdicts, strict=True) if v is not None]
        asked, failed = judge.asked, len(judge.failures)
        if not judged:
            _check_references(name, labels.name, samples, judge.failures)
            raise JudgeFailed(f"{name} gave no verdict on any of {len(samples)} examples: {judge.failures[-1]}")
        measures = [*agreement(labels.mode, judged, plan.seed), length_bias(labels.mode, judged, plan.seed)]
        probe = Probe(judge, judged, plan.seed)
        if judge.by_group:
            say("turning answers round")
            measures.append(await probe.order())
        say("padding answers")
        measures.append(await probe.padding())
        if plan.repeats > 1:
            say("asking again")
            measures.append(await probe.consistency(plan.repeats))
        else:
            measures.append(_left_out("self-consistency", "self_consistency", CONSISTENCY, "--repeats 3"))
        if plan.attacks:
            say("attacking")
        results = await probe.attacks(plan.attacks)
        if plan.attacks:
            measures += attack_measures(results)
        else:
            measures.append(_left_out("attacks", "attack_success", SUCCESSES, "--attacks 1"))
    finally:
        await judge.close()
    abstained = failed / asked
    measures.append(
        Measure("no verdict", "abstentions", abstained, wilson(abstained, asked), asked, ABSTENTIONS)
    )
    measures += _costs(judge)
    fitness, reasons = decide(measures)
    left = len(labels.samples) - len(samples)
    more = [f"{left} of {len(labels.samples)} examples were left out (--limit takes more)"] if left else []
    return Card(
        judge=name, labels=labels.name, labels_sha256=labels.sha256, mode=labels.mode, examples=len(samples),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(), seed=plan.seed,
        measures=tuple(measures), weaknesses=weaknesses(results),
        failures=dict(Counter(f.splitlines()[0][:200] if f else "" for f in judge.failures).most_common(5)),
        fitness=fitness, reasons=reasons, notes=(*notes, *more),
    )  # fmt: skip


def _check_references(name: str, labels: str, samples: Sequence[Sample], failures: Sequence[str]) -> None:
    """Say it in the words of the labels' file where a judge misses what none of its lines has."""
    if "reference" in failures[-1] and all(sample.reference is None for sample in samples):
        raise DataError(
            f'{labels}: the lines lack "reference", the right answer, which {name} compares with: add '
            f'"reference": "…" to each line ({failures[-1]})'
        )


def decide(measures: Sequence[Measure]) -> tuple[Fitness, tuple[str, ...]]:
    """The worst grade of any line, and the lines that have it; agreement that may be chance is bad,
    and a line that too few answers stand behind, or that was not measured, asks for care and no more."""
    bad, care = [], []
    for m in measures:
        if m.grade == "unknown":
            few = f"{m.n} are too few to say ({FEWEST})" if m.n < FEWEST else "it cannot be computed"
            care.append(f"{m.name}: {m.note or few}")
        elif m.key == "concordance" and m.interval is not None and m.interval[0] <= 0.5 and m.value is not None:
            bad.append(f"{m.name}: {m.value:.2f} of {m.n} cannot be told from chance (0.50)")
        elif m.grade in ("bad", "care") and m.limits is not None:
            which, limit = (bad, m.limits.bad) if m.grade == "bad" else (care, m.limits.care)
            side = "below" if m.limits.more_is_better else "above"
            which.append(f"{m.name}: {m.value:.2f} is {side} {limit:g}")
    if bad:
        return "do not use", tuple(bad)
    return ("use with care", tuple(care)) if care else ("fit", ())


def _left_out(name: str, key: str, limits: Limits, option: str) -> Measure:
    return Measure(name, key, None, None, 0, limits, note=f"not measured ({option} does)")


def plan_of(labels: Labels, plan: Plan, *, by_group: bool) -> int:
    """About how many questions a check asks the judge."""
    samples = min(len(labels.samples), plan.limit)
    answers = list(itertools.islice((len(s.answers) for s in labels.samples), samples))
    some = min(samples, MOST_PROBED)
    each = 1 if by_group else max(1, round(sum(answers) / len(answers)))
    asked = samples if by_group else sum(answers)
    asked += some * (2 if by_group else 1) + some * (plan.repeats - 1) * each
    return asked + len(ATTACKS) * 2 * plan.attacks


def _costs(judge: JudgeUnderTest) -> list[Measure]:
    """Seconds, requests and cost of a verdict, of those that were made here and not taken from a cache."""
    fresh = [t for t in judge.took if t.seconds is not None]
    seconds = sorted(t.seconds for t in fresh if t.seconds is not None)
    requests = [t.requests for t in judge.took]
    found = []
    if seconds:
        for what, key, q in (("median", "seconds_median", 0.5), ("95th percentile", "seconds_p95", 0.95)):
            found.append(Measure(f"seconds for a verdict, {what}", key, quantile(seconds, q), None, len(seconds)))
    if any(requests):
        mean = sum(requests) / len(requests)
        found.append(Measure("helper requests for a verdict, mean", "requests", mean, None, len(requests)))
        if fresh:
            cost = sum(t.cost for t in fresh) / len(fresh)
            found.append(Measure("cost of 1,000 verdicts", "cost_per_1000", 1000 * cost, None, len(fresh)))
        found.append(Measure("cost of this check", "cost", sum(t.cost for t in judge.took), None, len(judge.took)))
    return found


_HEADS = ("", "value", "95 % interval", "of", "wanted", "")
_SAID = {"good": "good", "care": "care", "bad": "bad", "unknown": "too few", "info": ""}
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "table{border-collapse:collapse;width:100%}td,th{padding:.25rem .6rem;border-bottom:1px solid #ccc;text-align:left}"
    ".bad{color:#a00}.care,.unknown{color:#850}.good{color:#060}"
)


def as_markdown(card: Card) -> str:
    """The whole card."""
    lines = [f"# {card.judge}: {card.fitness}", "", _about(card), ""]
    lines += [f"- {reason}" for reason in card.reasons]
    lines += ["", *_table([_HEADS, *(_row(m) for m in card.measures)]), ""]
    for title, entries in _lists(card):
        lines += [f"**{title}**", "", *(f"- {_inline(entry)}" for entry in entries), ""]
    return "\n".join(lines)


def as_html(card: Card) -> str:
    """One page, which loads nothing."""
    e = html.escape
    rows = "".join(
        f'<tr class="{m.grade}">' + "".join(f"<td>{e(cell)}</td>" for cell in _row(m)) + "</tr>" for m in card.measures
    )
    heads = "".join(f"<th>{e(h)}</th>" for h in _HEADS)
    lists = "".join(
        f"<h2>{e(title)}</h2><ul>{''.join(f'<li>{e(entry)}</li>' for entry in entries)}</ul>"
        for title, entries in [("Why", list(card.reasons)), *_lists(card)]
        if entries
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{e(card.judge)}</title><style>{_STYLE}</style>'
        f"<h1>{e(card.judge)}: {e(card.fitness)}</h1><p>{e(_about(card))}</p>"
        f"<table><tr>{heads}</tr>{rows}</table>{lists}</html>\n"
    )


def write(card: Card, path: Path) -> None:
    """Write the card as the file's name says."""
    text = as_html(card) if path.suffix in (".html", ".htm") else as_markdown(card)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", errors="backslashreplace")


def _about(card: Card) -> str:
    return (
        f"{card.examples} {card.mode.value} examples of {card.labels} (sha256 {card.labels_sha256[:12]}), "
        f"{card.date}, seed {card.seed}."
    )


def _lists(card: Card) -> list[tuple[str, list[str]]]:
    found = [
        ("Attacks that succeeded", [f"{name}: {share:.0%}" for name, share in list(card.weaknesses.items())[:20]]),
        ("Why there was no verdict", [f"{count} times: {why}" for why, count in card.failures.items()]),
        ("Notes", list(card.notes)),
    ]
    return [(title, entries) for title, entries in found if entries]


def _row(m: Measure) -> tuple[str, ...]:
    value = (m.note or "none") if m.value is None else _number(m.value)
    interval = f"{_number(m.interval[0])} to {_number(m.interval[1])}" if m.interval else ""
    wanted = str(m.limits) if m.limits else ""
    return (m.name, value, interval, str(m.n), wanted, "" if m.note else _SAID[m.grade])


def _number(x: float) -> str:
    return f"{x:.2f}" if x == 0 or 0.005 <= abs(x) < 100 else f"{x:.2g}" if abs(x) < 100 else f"{x:,.0f}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_inline(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]]


def _inline(text: str) -> str:
    """One line, with nothing that Markdown takes for a tag, and no control characters for the terminal."""
    line = " ".join(text.split())
    return "".join(c for c in line if c.isprintable()).replace("<", "&lt;")


SCOPE = "judge-check"
"""What budgets are counted for, below the current folder: not the experiment's run, which has a budget of its own."""

_WANTS_HELPER = re.compile(r"astuner\.task_judge\.(\w+)\.helper_model is required")
_REQUIRED = re.compile(r"(astuner\.[\w.]+) is required$")
_SUFFIXES = (".yaml", ".yml")
_SHOWN_PLACES = 5
_GRADES_WITH = "astuner.task_judge.rubrics.helper_model="


def run_check(
    judge: str, labels: Labels, plan: Plan, *, config: Path | None, overrides: Sequence[str], base_url: str | None,
    model: str | None, api_key_env: str | None, answer_field: str, at_once: int, say: Say,
) -> Card:  # fmt: skip
    """Make the judge, and measure it.

    :raises ConfigError: there is no such judge, or its settings are wrong.
    :raises DataError: the labels are of a kind that it cannot be compared with.
    """
    given = section_of(config, base_url, model, api_key_env)
    rubrics = Path(judge) if is_rubric_file(judge) else None
    if rubrics is not None:
        load_rubrics(rubrics)  # what is wrong with it comes before what is wrong with the options
    wanted: dict[str, Any] = {"judge": judge}
    if is_rubric_file(judge):
        wanted = {"judge": "rubrics", "rubrics": {"file": str(Path(judge).resolve()), "helper_model": ONE}}
    if given is not None:
        models = {ONE: given.model_dump(exclude_defaults=True)}
        experiment = _least({"task_judge": wanted, "helper_models": models}, overrides)
    elif config is not None:
        experiment = load_config(config, [*_as_overrides(wanted, config, overrides), *overrides])
    else:
        if is_rubric_file(judge) and not any(text.startswith("astuner.helper_models") for text in overrides):
            raise ConfigError(WHICH_MODEL)
        experiment = _least({"task_judge": wanted}, overrides)
    reference = experiment.astuner.task_judge.judge
    assert reference is not None
    section = experiment.section("judge", reference)
    if isinstance(section, RubricsConfig) and rubrics is None:
        rubrics = experiment.base_dir / section.file
    notes: list[str] = []
    overlap = None
    if rubrics is not None:
        labels, overlap, notes = _held_out(rubrics, labels)
    scope = str(Path.cwd() / SCOPE)
    helpers = WatchedHelpers(experiment.keys_of(HelperModelKeys).helper_models, scope=scope)
    context = BuildContext(config=experiment, helpers=helpers)
    made = Member.build(context, reference, None, where="astuner.task_judge.judge")
    under_test = JudgeUnderTest(
        made, answer_field=answer_field, at_once=at_once, timeout=experiment.astuner.task_judge.judge_timeout
    )
    say(f"about {plan_of(labels, plan, by_group=under_test.by_group)} questions to the judge")
    try:
        card = asyncio.run(check(under_test, labels, plan, name=judge, notes=notes, say=say))
        return replace(card, overlap=overlap)
    finally:
        made.close()


def is_rubric_file(judge: str) -> bool:
    """Whether JUDGE names a file rather than a judge."""
    return judge.endswith(_SUFFIXES) and "->" not in judge


def _held_out(file: Path, labels: Labels) -> tuple[Labels, Overlap | None, list[str]]:
    """The labels that the rubrics were not learned from, how many others there were, and what their file says.

    Where none is left, as all nearly repeat one and none is the same, all are, with a note: texts that are alike may
    still be others, and who has no others could measure nothing.

    :raises DataError: they were learned from all of them, or from some which the others nearly repeat, so agreement
        with them says nothing about others.
    """
    rubrics = load_rubrics(file)
    notes = [f"rubrics {rubrics.digest}"]
    if rubrics.learned is None:
        return labels, None, [*notes, "written by hand: no agreement was measured when they were learned"]
    if rubrics.is_edited:
        was = rubrics.learned.digest
        notes.append(f"edited since they were learned ({was}): the agreement in the file is not theirs")
    else:
        a = rubrics.learned.agreement
        notes.append(f"agreement when learned: {a.share:.0%} ({a.low:.0%} to {a.high:.0%}, {a.n} held-out examples)")
    kept, overlap = without_known(labels.samples, rubrics.learned.prints)
    if rubrics.learned.sha256 == labels.sha256 or (not kept and overlap.same):
        near, way_out = "", ""
        if overlap.near and not kept:
            places = places_of_same(labels.samples, rubrics.learned.prints)
            more = f" and {len(places) - _SHOWN_PLACES} more" if len(places) > _SHOWN_PLACES else ""
            near = f" (or from what {overlap.near} of them nearly repeat)"
            way_out = f"; without {', '.join(places[:_SHOWN_PLACES])}{more}, the others are measured, with a note"
        raise DataError(
            f"--labels {labels.name}: {file} was learned from these very labels{near}, and rubrics agree with what "
            "they were learned from; name labels that learning never saw (the file says how it agreed with those held "
            f"out){way_out}"
        )
    if not rubrics.learned.prints:
        notes.append("the file does not say which examples it was learned from: labels among them are not known again")
        return labels, None, notes
    if not kept:
        notes.append(
            f"all {overlap.near} labels nearly repeat one that the rubrics were learned from, and none was left out: "
            "agreement with labels that are less alike may be lower"
        )
        return labels, replace(overlap, near=0), notes
    if overlap.same or overlap.near:
        notes.append(
            f"{overlap.same + overlap.near} of {len(labels.samples)} labels were left out: the rubrics were learned "
            f"from {overlap.same} of them, and {overlap.near} nearly repeat one that they were learned from"
        )
    if overlap.same_question:
        notes.append(
            f"{overlap.same_question} labels have a question that the rubrics were learned from, with other answers"
        )
    return replace(labels, samples=kept), overlap, notes


def _as_overrides(wanted: dict[str, Any], config: Path, overrides: Sequence[str]) -> list[str]:
    """The judge as ``key=value``; of a rubric file, the helper model is that of the experiment's own section."""
    found = [f"astuner.task_judge.judge={json.dumps(wanted['judge'])}"]
    section = wanted.get("rubrics")
    if section is None:
        return found
    found.append(f"astuner.task_judge.rubrics.file={json.dumps(section['file'])}")
    raw = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None
    astuner = raw.get("astuner") if isinstance(raw, dict) else None
    astuner = astuner if isinstance(astuner, dict) else {}
    own = astuner.get("task_judge", {}).get("rubrics") if isinstance(astuner.get("task_judge"), dict) else None
    said = any(text.startswith(_GRADES_WITH) for text in overrides)
    if not said and not (isinstance(own, dict) and own.get("helper_model")):
        models = list(astuner.get("helper_models") or {})
        if len(models) != 1:
            there = f"there are {', '.join(models)}" if models else "astuner.helper_models is empty"
            raise ConfigError(
                f"{config}: which helper model grades? {there}; say it with "
                f"--set {_GRADES_WITH}NAME"
            )
        found.append(f"{_GRADES_WITH}{json.dumps(models[0])}")
    return found


def _least(astuner: dict[str, Any], overrides: Sequence[str]) -> Config:
    """An experiment of options alone.

    :raises ConfigError: something is wrong or missing; no message names a file that the person did not write.
    """
    helper = next(iter(astuner.get("helper_models", {})), None)
    with _experiment(astuner) as file:
        try:
            return load_config(file, overrides)
        except ConfigError as e:
            problems = [re.sub(rf"^{re.escape(str(file))}(:\d+)*: ", "", problem) for problem in e.problems]
    wanting = [m[1] for problem in problems if (m := _WANTS_HELPER.match(problem))]
    if wanting and helper is None:
        raise ConfigError([WHICH_MODEL, *(_with_option(p) for p in problems if not _WANTS_HELPER.match(p))])
    if wanting:
        sections = {name: {"helper_model": helper} for name in wanting}
        return _least({**astuner, "task_judge": {**astuner["task_judge"], **sections}}, overrides)
    raise ConfigError([_with_option(problem) for problem in problems])


def _with_option(problem: str) -> str:
    """What is required, with the option that gives it."""
    required = _REQUIRED.match(problem)
    if required and required[1] == "astuner.task_judge.rubrics.file":
        return f"{problem}; name the rubric file itself: astuner judge check FILE.yaml, or --config FILE"
    return f"{problem}; --set {required[1]}=VALUE, or --config FILE" if required else problem


@contextlib.contextmanager
def _experiment(astuner: dict[str, Any]) -> Iterator[Path]:
    """A file of the least that a run needs; code of the person's own is found in the current folder."""
    least = {"model": {"path": "unused"}, "rollout": {"num_repeat": 2}, **astuner}
    with tempfile.TemporaryDirectory(prefix="astuner-judge-") as folder:
        path = Path(folder) / "experiment.yaml"
        path.write_text(yaml.safe_dump({"astuner": least}), encoding="utf-8")
        yield path
