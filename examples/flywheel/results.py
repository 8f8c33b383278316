"""What came of it: the right answers of every model to the same questions, and what augmenting brought."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from users import MAKERS, Asked

from astuner.contracts.statistics import wilson_interval
from astuner_record.statistics import Interval, PairedTable, crossed_bootstrap_interval, mcnemar_exact

ARMS = {
    "first": "first model",
    "control": "+ more of the old tasks",
    "again": "+ users' feedback",
    "augmented": "+ users' feedback, augmented",
}
"""What is compared, in the order of the table."""


def of_augmenting(found: dict[str, Any]) -> str:
    """How many tasks came from where, and why others did not."""
    why = ", ".join(f"{count} {reason}" for reason, count in found["rejected"].items()) or "none"
    unused = f" ({found['unused']} not needed)" if found["unused"] else ""
    return (
        f"{found['asked']} answers gave {found['users']} tasks; {found['written']} more were written{unused}; refused: "
        f"{why}; of the {found['made']} that passed, {found['near']} nearly repeat a held-out question and "
        f"{found['reserved']} have its numbers; {found['kept']} were kept, {found['wrong']} of them with a wrong answer"
    )


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
            pairs = PairedTable.of([(c.right, each.right) for c, each in zip(arms["control"], asked, strict=True)])
            p = "" if arm == "control" else f"{mcnemar_exact(pairs):.1g}"
            lines.append(f"| {seed} | {title} | {share(makers)} | {share(others)} | {share(asked)} | {p} |")
    lines.append("")
    for one, other in (
        ("again", "first"), ("again", "control"), ("augmented", "again"), ("augmented", "control"), ("control", "first")
    ):  # fmt: skip
        difference, interval = gain(results, one, other)
        lines.append(
            f"- {ARMS[one]!r} minus {ARMS[other]!r}: {difference * 100:+.1f} points, 95 % interval "
            f"{interval.low * 100:+.1f} to {interval.high * 100:+.1f} (bootstrap over seeds and questions)"
        )
    return "\n".join(lines) + "\n"


def gain(results: dict[int, dict[str, list[Asked]]], one: str, other: str) -> tuple[float, Interval]:
    """Return the mean difference of two arms over all seeds, with its interval."""
    of_one, of_other = (
        [[float(each.right) for each in arms[arm]] for arms in results.values()] for arm in (one, other)
    )
    means = [sum(map(sum, side)) / sum(map(len, side)) for side in (of_one, of_other)]
    return means[0] - means[1], crossed_bootstrap_interval(of_one, of_other)
