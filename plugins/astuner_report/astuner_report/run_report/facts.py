"""Everything a report says, as data: gathered from the files of a run folder alone.

So a report can be written at the end of a run, when it fails, or a year later with ``astuner report``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from astuner import RunDir
from astuner.config.sentinel import Sentinel as Watched
from astuner.rollout.updated import updated
from astuner.support.json_lines import read_jsonl
from astuner_report.run_report import origin
from astuner_report.run_report.cost import cost
from astuner_report.run_report.held_out import held_out
from astuner_report.run_report.verdict import verdict
from astuner_report.sentinel import Sentinel
from astuner_report.sentinel.statistics import normal_tail, trend

FORMAT = 1
_MOST_ERRORS = 3
"""Different messages that are told for each kind of failure."""


def gather(run_dir: RunDir, ledger: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The facts, JSON-serialisable; what is not known is None or missing.

    :param ledger: how the episodes ended; None: as in the folder's ``summary.json``, if it has one.
    """
    config = yaml.safe_load(run_dir.resolved.read_text(encoding="utf-8")) or {}
    settings = config.get("astuner", {})
    rows = run_dir.read_metrics()
    starts = origin.read(run_dir)
    if ledger is None and run_dir.summary.exists():
        ledger = json.loads(run_dir.summary.read_text(encoding="utf-8")).get("ledger")
    trained = [row for row in rows if "reward/mean" in row]
    facts = {
        "format": FORMAT,
        "name": run_dir.path.name,
        "state": _state(run_dir, starts),
        "trained": _trained(settings),
        "data": _data(settings),
        "plan": starts[-1]["plan"] if starts else None,
        "steps": trained[-1]["step"] if trained else 0,
        "reward": _reward(trained),
        "updated": updated(trained),
        "held_out": held_out(rows, run_dir.episodes),
        "failures": _failures(read_jsonl(run_dir.failures), ledger),
        "alarms": _alarms(read_jsonl(run_dir.alarms), settings, rows),
        "watched": bool(settings.get("trainer_common", {}).get("sentinel", {}).get("enabled")),
        "certificate": _certificate(run_dir),
        "cost": cost(rows, watts=settings.get("trainer_common", {}).get("watts")),
        "origin": starts,
        "seed": settings.get("seed"),
    }
    facts["verdict"] = verdict(facts)
    return {name: _writable(value) for name, value in facts.items()}


def _writable(value: Any) -> Any:
    """``value`` with texts that UTF-8 can hold: a model may write half a surrogate pair."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, (list, tuple)) else value


def _state(run_dir: RunDir, starts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """How the run ended, if it did."""
    error = str(starts[-1].get("error") or "") if starts else ""
    if error:
        kind, _, why = error.partition(": ")
        return {"word": "stopped" if kind == "Interrupted" else "failed", "why": why or error}
    if run_dir.summary.exists() or (starts and "ended" in starts[-1]):
        return {"word": "ended", "why": ""}
    return {"word": "unfinished", "why": "it is still running, or was killed"}


def _trained(settings: Mapping[str, Any]) -> dict[str, Any]:
    common = settings.get("trainer_common", {})
    return {
        "model": settings.get("model", {}).get("path"),
        "lora_rank": settings.get("model", {}).get("lora", {}).get("rank"),
        "backbone": settings.get("backbone"),
        "algorithm": common.get("algorithm"),
        "optim": common.get("optim"),
        "kl": common.get("kl_loss_coef") if common.get("use_kl_loss") else None,
        "agents": settings.get("agents"),
        "policies": settings.get("policies"),
    }


def _data(settings: Mapping[str, Any]) -> dict[str, Any]:
    rollout = settings.get("rollout", {})
    reader = settings.get("task_reader", {})
    return {
        "reader": reader.get("type"),
        "reader_settings": {key: value for key, value in reader.items() if key != "type"},
        "workflow": rollout.get("workflow"),
        "judge": settings.get("task_judge", {}).get("judge"),
        "groups_per_step": settings.get("data", {}).get("train_batch_size"),
        "attempts": rollout.get("num_repeat"),
        "temperature": rollout.get("temperature"),
    }


def _reward(trained: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """The mean reward of the first and of the last steps, ten or half of all, and whether it has a trend."""
    if not trained:
        return None
    steps = max(1, min(10, len(trained) // 2))
    z = trend([row["reward/mean"] or 0.0 for row in trained])
    return {
        "steps": steps,
        "first": _mean_reward(trained[:steps]),
        "last": _mean_reward(trained[-steps:]),
        "rising": z > 0,
        "p": min(1.0, 2 * normal_tail(abs(z))),
    }


def _mean_reward(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(sum(row["reward/mean"] or 0.0 for row in rows) / len(rows))


def _alarms(
    raised: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One entry for each rule that raised an alarm: the first one, in how many steps it held, and what these cost.

    How long it held is not written down, but follows from the rows; None for a rule that knows more than these.
    """
    policies = dict.fromkeys(name.split("/")[1] for row in rows for name in row if name.startswith("policy/"))
    sentinel = Sentinel(Watched.model_validate(settings.get("trainer_common", {}).get("sentinel") or {}), [*policies])
    sentinel.replay(rows)
    generated = {row["step"]: row["tokens/generated"] or 0.0 for row in rows if "tokens/generated" in row}
    everything = sum(generated.values()) or 1.0
    first = {alarm["rule"]: alarm for alarm in reversed(raised)}
    found = []
    for rule, alarm in sorted(first.items(), key=lambda item: int(item[1]["step"])):
        held = sentinel.held.get(rule, [])
        share = sum(generated.get(step, 0.0) for step in held) / everything
        found.append({**alarm, "held": len(held) or None, "of": len(generated), "tokens_share": share})
    return found


def _failures(entries: Sequence[Mapping[str, Any]], ledger: Mapping[str, int] | None) -> dict[str, Any]:
    """What failed, by kind, with the commonest messages."""
    kinds: dict[str, Counter[str]] = {}
    for entry in entries:
        if "stop_reason" in entry:
            lines = str(entry.get("error") or "no message").splitlines()
            kinds.setdefault(entry["stop_reason"], Counter())[lines[0] if lines else "no message"] += 1
    return {
        "kinds": {
            kind: {"episodes": sum(errors.values()), "errors": dict(errors.most_common(_MOST_ERRORS))}
            for kind, errors in sorted(kinds.items(), key=lambda item: -sum(item[1].values()))
        },
        "dropped_groups": sum("dropped" in entry for entry in entries),
        "skipped_data": sum("skipped" in entry for entry in entries),
        "endings": dict(ledger) if ledger is not None else None,
    }


def _certificate(run_dir: RunDir) -> dict[str, Any] | None:
    if not run_dir.certificate.exists():
        return None
    found: dict[str, Any] = json.loads(run_dir.certificate.read_text(encoding="utf-8"))
    return found
