"""The card: everything that was measured of a judge, and whether it is fit to give rewards; and the card to read.

It is read as text (which is Markdown), as one HTML page without scripts, or as JSON, all made of the same rows; what
others wrote (a failure's message) is shown as text only.  Invariant: the verdict is decided by the lines of the card
and their limits alone, and names those that decided it.
"""

from __future__ import annotations

import asyncio
import datetime
import html
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from astuner.contracts.errors import DataError, JudgeFailed
from astuner_rubrics.agreement import wilson
from astuner_rubrics.attacks import ATTACKS
from astuner_rubrics.card.asking import JudgeUnderTest
from astuner_rubrics.card.measures import (
    ABSTENTIONS,
    CONSISTENCY,
    FEWEST,
    MOST_PROBED,
    SUCCESSES,
    Judged,
    Limits,
    Measure,
    Probe,
    agreement,
    attack_measures,
    length_bias,
    quantile,
    weaknesses,
)
from astuner_rubrics.labels import Labels, Mode, Overlap, Sample, digest

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
