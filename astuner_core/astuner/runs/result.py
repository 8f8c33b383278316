"""What a finished run came to: the summary a person reads, the one a machine reads, the curve, and the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.rollout.certificate import summary_of
from astuner.rollout.evaluation import counted
from astuner.rollout.ledger import FailureLedger
from astuner.runs.run_dir import RunDir
from astuner_helpers import Usage
from astuner_report.curve import draw_reward_curve
from astuner_report.run_report import origin, write_report
from astuner_report.run_report.sections import lasted

if TYPE_CHECKING:
    from astuner.runs.plan import Plan

_MOST_ALARMS = 5
"""Alarms that the summary shows."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to."""

    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step and the last validation."""
    plan: Plan | None = None
    """Only of a dry run."""
    updated: Mapping[str, Any] = field(default_factory=dict)
    """What was trained (`astuner.rollout.updated`), where something trains."""
    verdict: Mapping[str, str] = field(default_factory=dict)
    """Whether anything was learned (`astuner_report.run_report.verdict`), where something trains."""
    best_checkpoint: Path | None = None
    """That did best in its validation, of those that are kept."""
    text: str = ""

    def summary(self) -> str:
        """For a person: success before and after, and where things are."""
        return self.text


def finish(
    run_dir: RunDir, ledger: FailureLedger, *, trains: bool, helpers: Mapping[str, Usage] | None = None
) -> RunResult:
    """Draw the curve, write the report, and ``summary.json``, which marks the run as having come to its end.

    :param helpers: what the run used of its helper models, by name.
    """
    rows = run_dir.read_metrics()
    newest: dict[str, float] = {}
    for kind in ("reward/mean", "val/success"):  # the last step and the last validation, each as a whole
        last: dict[str, Any] = next((row for row in reversed(rows) if kind in row), {})
        newest.update({k: v for k, v in last.items() if k not in ("step", "time")})
    lines = _before_and_after(rows)
    lines["episodes"] = _endings(ledger.counts)
    if run_dir.certificate.exists():
        lines |= summary_of(json.loads(run_dir.certificate.read_text(encoding="utf-8")))
    facts: dict[str, Any] = {}
    best = run_dir.best if trains else None
    if trains:
        origin.end(run_dir)
        facts = {"report": write_report(run_dir, ledger.counts)}
        lines["tokens trained"] = _trained(facts["report"])
        lines["alarms"] = _alarms(facts["report"]["alarms"])
        lines["reward curve"] = draw_reward_curve(rows, run_dir.curve)
        lines["report"] = str(run_dir.report_html)
        lines["model"] = _models(run_dir.models[-1:])
        if best is not None and best != run_dir.models[-1]:
            lines["best in validation"] = _models([best])
        facts["best_checkpoint"] = str(best) if best else None
    if helpers:
        lines |= {f"helper model {name}": str(usage) for name, usage in helpers.items()}
        facts["helper_models"] = {name: asdict(usage) for name, usage in helpers.items()}
    lines["conversations"] = str(run_dir.episodes)
    lines["run folder"] = str(run_dir.path)
    told = {name: facts["report"][name] for name in ("updated", "verdict")} if trains else {}
    if trains:  # the last line, since it is the one that is read
        lines["verdict"] = told["verdict"]["text"]
    run_dir.write_json(run_dir.summary, {"metrics": newest, "ledger": dict(ledger.counts), **facts})
    text = "\n".join(f"{name:<23} {value}" for name, value in lines.items())
    return RunResult(run_dir=run_dir.path, metrics=newest, text=text, best_checkpoint=best, **told)


@contextmanager
def also_if_cut_short(run_dir: RunDir, ledger: FailureLedger, note: Callable[[str], None]) -> Iterator[None]:
    """Write the report of a run that an error ends, with what there is, and let the error go on."""
    try:
        yield
    except OSError:  # a disk that is full takes no report either
        raise
    except Exception as error:
        try:
            origin.end(run_dir, error)
            write_report(run_dir, ledger.counts)
        except Exception as e:  # what ended the run is what the person must see
            note(f"the report of this run could not be written: {type(e).__name__}: {e}")
        raise


def _alarms(alarms: list[dict[str, Any]]) -> str:
    said = [", ".join(filter(None, (f"{a['rule']} since step {a['step']}", lasted(a)))) for a in alarms]
    more = f" and {len(said) - _MOST_ALARMS} more" if len(said) > _MOST_ALARMS else ""
    return f"{len(said)}: {'; '.join(said[:_MOST_ALARMS])}{more}" if said else "none"


def _trained(facts: Mapping[str, Any]) -> str:
    """What was updated: tokens with a gradient, and how often the weights changed."""
    updated, generated = facts["updated"], facts["cost"]["tokens"]["generated"] or 0.0
    taken = updated["optimizer_steps"]
    steps = f"{updated['steps']:,} of {updated['of']:,} steps changed weights"
    often = steps if taken is None else f"{taken:,.0f} optimizer steps, {steps}"
    return f"{updated['tokens']:,.0f} in updates (of {generated:,.0f} generated); {often}"


def _models(checkpoints: Sequence[Path]) -> str:
    """The folders of a checkpoint that hold a model: one, or one for each policy."""
    folders = [p.parent for checkpoint in checkpoints for p in sorted(checkpoint.glob("**/config.json"))]
    return ", ".join(map(str, folders)) or "none saved"


def _before_and_after(rows: list[dict[str, Any]]) -> dict[str, str]:
    validated = [row for row in rows if "val/success" in row]
    if not validated:
        return {}
    first, last = validated[0], validated[-1]
    if first["step"] == 0 and last is not first:
        return {"held-out success before": _success(first), "held-out success after": _success(last)}
    return {"held-out success": _success(last)}


def _success(row: Mapping[str, Any]) -> str:
    low, high = row["val/success_ci_low"], row["val/success_ci_high"]
    return f"{row['val/success']:.1%}  (95 %: {low:.1%} to {high:.1%}; {counted(row)}; step {row['step']})"


def _endings(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"
