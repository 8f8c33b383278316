"""What a finished run came to: the summary a person reads, and the one a machine reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.rollout.evaluation import counted

if TYPE_CHECKING:
    from astuner.runs.plan import Plan
    from astuner.runs.run import RunWriter


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to."""

    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step and the last validation."""
    plan: Plan | None = None
    """Only of a dry run."""
    updated: Mapping[str, Any] = field(default_factory=dict)
    """What was trained (as the report has it), where something trains."""
    verdict: Mapping[str, str] = field(default_factory=dict)
    """Whether anything was learned (the report's verdict), where something trains."""
    best_checkpoint: Path | None = None
    """That did best in its validation, of those that are kept."""
    text: str = ""

    def summary(self) -> str:
        """For a person: success before and after, and where things are."""
        return self.text


def finish(run: RunWriter, *, trains: bool) -> RunResult:
    """Write ``summary.json``, which marks the run as having come to its end; what subscribers say of it is in there."""
    run_dir, ledger = run.run_dir, run.ledger
    rows = run_dir.read_metrics()
    newest: dict[str, float] = {}
    for kind in ("reward/mean", "val/success"):  # the last step and the last validation, each as a whole
        last: dict[str, Any] = next((row for row in reversed(rows) if kind in row), {})
        newest.update({k: v for k, v in last.items() if k not in ("step", "time")})
    lines = _before_and_after(rows)
    lines["episodes"] = _endings(ledger.counts)
    facts: dict[str, Any] = {}
    verdict = ""
    for said in run.ended():
        lines |= said.lines
        facts |= said.facts
        verdict = said.verdict or verdict
    best = run_dir.best if trains else None
    if trains:
        lines["model"] = _models(run_dir.models[-1:])
        if best is not None and best != run_dir.models[-1]:
            lines["best in validation"] = _models([best])
        facts["best_checkpoint"] = str(best) if best else None
    lines["conversations"] = str(run_dir.episodes)
    lines["run folder"] = str(run_dir.path)
    if verdict:  # the last line, since it is the one that is read
        lines["verdict"] = verdict
    run_dir.write_json(run_dir.summary, {"metrics": newest, "ledger": dict(ledger.counts), **facts})
    text = "\n".join(f"{name:<23} {value}" for name, value in lines.items())
    report = facts.get("report", {})
    return RunResult(
        run_dir=run_dir.path,
        metrics=newest,
        text=text,
        best_checkpoint=best,
        updated=report.get("updated", {}),
        verdict=report.get("verdict", {}),
    )


@contextmanager
def told_if_cut_short(run: RunWriter) -> Iterator[None]:
    """Tell subscribers of an error that ends the run, so that there is a report of what there is; it goes on."""
    try:
        yield
    except OSError:  # a disk that is full takes no report either
        raise
    except Exception as error:
        run.ended(error)
        raise


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
