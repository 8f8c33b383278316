"""All facts of a report, gathered only from the files of a run folder.

A report can therefore be written when a run ends, when it fails, or at any later time with ``astuner report``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from astuner import RunDir
from astuner.contracts.errors import DataError
from astuner.contracts.statistics import mean
from astuner.contracts.updated import SOLVED, missed, no_signal, total
from astuner.contracts.validation import Figures, Results, TaskResult, best_of, best_step
from astuner_record.certificate import summary_of
from astuner_record.episode_log import EpisodeLog
from astuner_record.foreign import read_resolved
from astuner_record.paired import FEWEST, LEVEL, Pairs, choose_measure, reward_test, success_test
from astuner_report.leakage import overlapping
from astuner_report.run_report import origin
from astuner_report.run_report.changes import changes, informative_episodes
from astuner_report.run_report.files import NONSENSE, has, is_measured, read_json, read_rows
from astuner_report.run_report.next_step import next_step
from astuner_report.run_report.sampling import RECENT, sampling_note
from astuner_report.sentinel import Sentinel, StepFacts, causes
from astuner_report.sentinel.outcomes import SameAnswer
from astuner_report.sentinel.settings import Sentinel as Watched
from astuner_report.sentinel.statistics import normal_tail, percent, trend, two_proportions

FORMAT = 1
_MOST_ERRORS = 3
"""Maximum number of different messages listed for each kind of failure."""
_TRAINED = re.compile(r"(policy/[^/]+/)?tokens/trained")
_TRAINED_BY = {
    "model": "model.path", "lora_rank": "model.lora.rank", "backbone": "backbone", "agents": "agents",
    "algorithm": "trainer_common.algorithm", "optim": "trainer_common.optim", "policies": "policies",
}  # fmt: skip
_DATA = {
    "reader": "task_reader.type", "workflow": "rollout.workflow", "judge": "task_judge.judge",
    "groups_per_step": "data.train_batch_size", "attempts": "rollout.num_repeat", "temperature": "rollout.temperature",
}  # fmt: skip
"""Fact -> its setting."""
_MEASURED = {
    "step": "step", "success": "val/success", "low": "val/success_ci_low", "high": "val/success_ci_high",
    "reward": "val/reward/mean", "tasks": "val/tasks", "unscored_tasks": "val/unscored_tasks",
    "failed_episodes": "val/failed_episodes",
}  # fmt: skip
"""Fact of a validation -> its metric."""
_PHASES = ("rollout", "train", "validation", "save")
_KWH = 3.6e6
"""Joules per kWh."""
_ENOUGH = "use 64 or more held-out tasks"


_ADVICE = {
    SOLVED: "Use harder tasks, because these are solved",
    "no generated token is in a loss mask": "Look up the reason in certificate.json (left_out), and pass "
    "model=model_tuner to the agent",
    "every update was left out, since loss or gradient was not finite": "Lower astuner.trainer_common.optim.lr, or "
    "train in float32",
    "every group had equal rewards": "Read a few episodes in episodes/ and check that the reward separates good "
    "attempts from bad ones; if it does, use tasks that sometimes succeed, or raise astuner.rollout.temperature or "
    "num_repeat",
    "no sample had a gradient": "Check the rewards in episodes/ and the penalties that are subtracted from them",
}
"""Reason why a step taught nothing -> what to do next."""
_ALARM = {"step": int, "severity": str, "rule": str, "message": str, "advice": str}


def gather(run_dir: RunDir, ledger: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Return the facts, JSON-serializable; unknown facts are None or missing.

    :param ledger: how the episodes ended; None: read ``summary.json`` of the folder, and check its episode log.
    """
    damage: list[str] = []
    resolved = read_resolved(run_dir.resolved) or {}
    settings = resolved.get("astuner", {})
    is_own, failed = ledger is not None, read_rows(run_dir.failures, damage, bool)
    rows, starts = read_rows(run_dir.metrics, damage, is_measured), origin.read(run_dir, damage)
    if ledger is None:
        summary = read_json(run_dir.summary, damage, lambda found: sum((found.get("ledger") or {}).values()))
        ledger = (summary or {}).get("ledger")
    trained = [row for row in rows if "reward/mean" in row]
    facts = {
        "format": FORMAT,
        "name": run_dir.path.name,
        "state": _state(run_dir, starts),
        "trained": {
            **{name: _at(settings, key) for name, key in _TRAINED_BY.items()},
            "kl": _at(settings, "trainer_common.kl_loss_coef") if _at(settings, "trainer_common.use_kl_loss") else None,
        },
        "data": {
            **{name: _at(settings, key) for name, key in _DATA.items()},
            "reader_settings": {key: v for key, v in (settings.get("task_reader") or {}).items() if key != "type"},
        },
        "plan": starts[-1]["plan"] if starts else None,
        "steps": trained[-1]["step"] if trained else 0,
        "reward": _reward([row["reward/mean"] or 0.0 for row in trained]),
        "updated": _updated(trained),
        "tasks": (tasks := read_json(run_dir.tasks, damage, _also_trained_on)),
        "also_trained_on": _also_trained_on(tasks or {}),
        "held_out": _held_out(rows, run_dir, damage),
        "same_answer": _same_answer(rows),
        "sampling": _sampling(rows, settings),
        "failures": _failures(failed, ledger),
        "alarms": _alarms(read_rows(run_dir.alarms, damage, lambda row: has(row, **_ALARM)), settings, rows, damage),
        "watched": bool(_at(settings, "trainer_common.sentinel.enabled")),
        "certificate": read_json(run_dir.certificate, damage, _certified),
        "cost": _cost(rows, watts=_at(settings, "trainer_common.watts")),
        "origin": starts,
        "seed": settings.get("seed"),
        "damage": damage,
    }
    chosen = (tasks or {}).get("slices")
    with _log_of(run_dir, damage, check=not is_own) as log:
        facts |= changes(log, run_dir.path, facts["held_out"], chosen)
        training = sum(int(row.get("rollout/episodes") or 0) for row in trained)
        facts["informative_episodes"] = informative_episodes(log, run_dir.path, facts["won_and_lost"], failed, training)
    facts["verdict"] = _verdict(facts)
    written = (resolved.get("resolved") or {}).get("written") or ()
    facts["next"] = next_step(facts, run_dir, settings, written)
    return {name: _writable(value) for name, value in facts.items()}


def _same_answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the message of `SameAnswer` for the last validation, or an empty string."""
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "val/success" in row), {})
    numbers = {name: value for name, value in last.items() if isinstance(value, (int, float))}
    return SameAnswer().validated(StepFacts(step=int(last.get("step", 0)), row=numbers)) or ""


def _writable(value: Any) -> Any:
    """Return ``value`` with texts that UTF-8 can encode; a model may generate half a surrogate pair."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, (list, tuple)) else value


def _state(run_dir: RunDir, starts: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return how the run ended, if it did."""
    error = str(starts[-1].get("error") or "") if starts else ""
    if error:
        kind, _, why = error.partition(": ")
        return {"word": "stopped" if kind == "Interrupted" else "failed", "why": why or error}
    if run_dir.summary.exists() or (starts and "ended" in starts[-1]):
        return {"word": "ended", "why": ""}
    return {"word": "unfinished", "why": "it is still running or was killed"}


def _at(settings: Any, key: str) -> Any:
    """Return the value of a dotted key; None if it is missing."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def _reward(rewards: Sequence[float]) -> dict[str, float] | None:
    """Return the mean reward of the first and of the last steps (ten, or half of all), and the test for a trend."""
    if not rewards:
        return None
    steps = max(1, min(10, len(rewards) // 2))
    z = trend(rewards)
    return {
        "steps": steps,
        "first": mean(rewards[:steps]),
        "last": mean(rewards[-steps:]),
        "rising": z > 0,
        "p": min(1.0, 2 * normal_tail(abs(z))),
    }


def _updated(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what some training steps updated.

    :param rows: rows of ``metrics.jsonl`` of training steps.
    :returns: ``tokens`` in updates, counted once per pass; ``optimizer_steps``, None if the backbone does not count
        them; ``steps`` that changed weights, and ``of`` how many; ``why`` no step had a reward signal, with ``advice``,
        else empty.
    """
    counted = [n for n in (total(row, "optimizer_steps") for row in rows) if n is not None]
    trained = sum(not missed(row) for row in rows)
    silent = [why for row in rows if (why := no_signal(row))]
    why = Counter(silent).most_common(1)[0][0] if rows and len(silent) == len(rows) else ""
    return {
        "tokens": sum(total(row, "tokens/trained") or 0.0 for row in rows if not missed(row)),
        "optimizer_steps": sum(counted) if counted else None,
        "steps": trained,
        "of": len(rows),
        "why": why if rows else "no training step finished",
        "advice": next((advice for reason, advice in _ADVICE.items() if why.startswith(reason)), ""),
    }


def _alarms(
    raised: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    damage: list[str],
) -> list[dict[str, Any]]:
    """Return one entry per cause: its first alarm, the step of the first sign, and its duration in steps and tokens.

    ``with`` lists rules that raised alarms, too, and follow from it. The duration is computed from the rows; it is None
    for a rule that needs more than these. ``current`` is false if the latest row refutes the rule and its consequences;
    ``last_step`` is then the last step with a finding. Current alarms come first.
    """
    policies = dict.fromkeys(name.split("/")[1] for row in rows for name in row if name.startswith("policy/"))
    sentinel = Sentinel(Watched.model_validate(_at(settings, "trainer_common.sentinel") or {}), [*policies])
    try:
        sentinel.replay(rows)
    except NONSENSE as e:
        damage.append(f"metrics.jsonl contains invalid numbers, so the duration of alarms is unknown ({e})")
    generated = {row["step"]: row["tokens/generated"] or 0.0 for row in rows if "tokens/generated" in row}
    everything = sum(generated.values()) or 1.0
    first = {alarm["rule"]: alarm for alarm in reversed(raised)}
    found = []
    for rule, others in causes(first).items():
        held = {step for name in (rule, *others) for step in sentinel.held.get(name, ()) if step in generated}
        began = min(int(first[name]["step"]) for name in (rule, *others))
        known = [step for name in (rule, *others) for step in sentinel.held.get(name, ())]
        lasted = {
            "step": began,
            "first_step": min([began, *known]),
            "last_step": max(known, default=None),
            "current": not known or any(name in sentinel.complaining for name in (rule, *others)),
            "held": len(held) or None,
            "of": len(generated),
            "tokens_share": sum(generated[step] for step in held) / everything,
        }
        found.append({**first[rule], **lasted, **({"with": others} if others else {})})
    return sorted(found, key=lambda alarm: (not alarm["current"], int(alarm["step"])))


def _failures(entries: Sequence[Mapping[str, Any]], ledger: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the failures by kind, with the most frequent messages."""
    kinds: dict[str, Counter[str]] = {}
    for entry in entries:
        if "stop_reason" in entry:
            lines = str(entry.get("error") or "no message").splitlines()
            kinds.setdefault(str(entry["stop_reason"]), Counter())[lines[0] if lines else "no message"] += 1
    return {
        "kinds": {
            kind: {"episodes": sum(errors.values()), "errors": dict(errors.most_common(_MOST_ERRORS))}
            for kind, errors in sorted(kinds.items(), key=lambda item: -sum(item[1].values()))
        },
        "dropped_groups": sum("dropped" in entry for entry in entries),
        "skipped_data": sum("skipped" in entry for entry in entries),
        "endings": dict(ledger) if ledger is not None else None,
    }


def _certified(found: Mapping[str, Any]) -> Sequence[Any]:
    return summary_of(found), found["tokens"]["trained_with_zero_advantage"] + 0, found.get("meaning", {}).items()


@contextmanager
def _log_of(run_dir: RunDir, damage: list[str], *, check: bool) -> Iterator[EpisodeLog | None]:
    """Yield the episode log, or None if there is none that can be read; its problems are added to ``damage``.

    :param check: Check the complete log; otherwise it is healthy, because this run writes it.
    """
    try:
        log = EpisodeLog(run_dir.path, check=check)
    except DataError as e:
        damage += [str(e)] if any(run_dir.episodes.glob("*.sqlite")) else []
        yield None
        return
    with log:
        damage += log.problems
        yield log


def _sampling(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> str:
    """Return the note on sampling for the last validation after training, or an empty string."""
    last = max((i for i, row in enumerate(rows) if row.get("val/success") is not None), default=0)
    recent = [row["success/mean"] for row in rows[:last] if row.get("success/mean") is not None][-RECENT:]
    return sampling_note(settings.get("rollout") or {}, mean(recent), rows[last]["val/success"]) if recent else ""


# ---------------------------------------------------------------------------------------------------- before and after


def _held_out(rows: Sequence[Mapping[str, Any]], run_dir: RunDir, damage: list[str]) -> dict[str, Any] | None:
    """Return the first, the last and the best validation, and the difference of the first two.

    :param rows: rows of ``metrics.jsonl``.
    :param run_dir: run folder with the results of each task.
    :returns: None without a validation.
    """
    validated = [row for row in rows if row.get("val/success") is not None]
    if not validated:
        return None
    first, last = validated[0], validated[-1]
    found: dict[str, Any] = {
        "validations": len(validated),
        "best": _best(validated, run_dir),
        "after": _measured(last),
    }
    if first["step"] == 0 and last is not first:
        found |= {"before": _measured(first), "difference": _difference(first, last, run_dir, damage)}
    return found


def _best(validated: Sequence[Mapping[str, Any]], run_dir: RunDir) -> dict[str, Any]:
    """Return the best validation on the tasks that all of them scored, with their number and its success on them.

    Without results of each task, as in runs of older versions, each validation counts with its own tasks.
    """
    results = {int(row["step"]): run_dir.task_results(int(row["step"])) for row in validated}
    best = best_of(results) if all(results.values()) else None
    if best is not None:
        step, common = best.step, {"tasks": best.tasks, "success": best.compared[best.step].success}
    else:
        figures = {row["step"]: Figures(row["val/success"], row.get("val/reward/mean") or 0.0) for row in validated}
        step, common = best_step(figures), {}
    return {**_measured(next(row for row in validated if row["step"] == step)), "compared": common or None}


def _also_trained_on(tasks: Mapping[str, Any]) -> str | None:
    """Return how many validation tasks are also training tasks; empty: they are held out; None: not checked."""
    overlap = tasks.get("overlap")
    return None if overlap is None else overlapping(overlap) if overlap["tasks"] else ""


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: row.get(theirs) for ours, theirs in _MEASURED.items()}


def _difference(
    first: Mapping[str, Any], last: Mapping[str, Any], run_dir: RunDir, damage: list[str]
) -> dict[str, Any]:
    """Return the difference of two validations in success and in reward.

    ``reward`` has the difference in reward, ``measure`` and ``reason`` which of the two decides and why.
    """
    before: Results = run_dir.task_results(first["step"])
    after: Results = run_dir.task_results(last["step"])
    if not before or not after:
        before, after = (_from_transcripts(run_dir.episodes, row["step"], damage) for row in (first, last))
    if pairs := [(before[task], after[task]) for task in before if task in after]:
        return _paired(pairs)
    tasks = [round(row["val/tasks"]) for row in (first, last)]
    return _unpaired(first["val/success"], tasks[0], last["val/success"], tasks[1])


def _paired(pairs: Pairs) -> dict[str, Any]:
    choice = choose_measure(pairs)
    return {
        **success_test(pairs).as_dict(),
        "reward": reward_test(pairs).as_dict(),
        "measure": choice.measure,
        "reason": choice.reason,
        "success_stated": choice.stated,
        "constant_success": choice.constant,
    }


def _unpaired(p1: float, n1: int, p2: float, n2: int) -> dict[str, Any]:
    p = 2 * normal_tail(abs(two_proportions((p1 * n1, n1), (p2 * n2, n2))))
    half = 1.959964 * math.sqrt(p1 * (1 - p1) / max(n1, 1) + p2 * (1 - p2) / max(n2, 1))
    return {
        "before": p1,
        "after": p2,
        "mean": p2 - p1,
        "low": max(-1.0, p2 - p1 - half),
        "high": min(1.0, p2 - p1 + half),
        "p": p,
        "significant": p < LEVEL,
        "test": "two-proportion z-test (conservative, because results per task are missing)",
        "tasks": min(n1, n2),
        "reward": None,
        "measure": "success",
        "reason": "",
    }


def _from_transcripts(episodes: Path, step: int, damage: list[str]) -> Results:
    """Return the results of each task from the conversations of an older run.

    Tasks are matched by their number, because every validation uses the same order.
    """
    tried: dict[str, list[Mapping[str, Any]]] = {}
    file = episodes / f"validation_{step:06d}.jsonl"
    for row in read_rows(file, damage, lambda row: has(row, group_id=str, task_id=str)):
        if row.get("reward") is not None:
            tried.setdefault(f"{row['group_id'].rpartition('-')[2]}/{row['task_id']}", []).append(row)
    return {
        task: TaskResult(
            successes=sum(bool(row.get("is_success")) for row in rows),
            scored=len(rows),
            stated=0,
            reward=mean([float(row["reward"]) for row in rows]),
        )
        for task, rows in tried.items()
    }


# ---------------------------------------------------------------------------------------------------------------- cost


def _cost(rows: Sequence[Mapping[str, Any]], *, watts: float | None) -> dict[str, Any]:
    """Return tokens, time and energy as sums over the rows, so a resumed run is counted completely.

    :param watts: power draw of the machine, if configured.
    """
    seconds = {phase: _total(rows, f"time/{phase}") for phase in _PHASES}
    spent = {phase: total for phase, total in seconds.items() if total is not None}
    whole = sum(_total(rows, f"time/{name}") or 0.0 for name in ("step", "validation", "save"))
    trained = [value for row in rows for name, value in row.items() if _TRAINED.fullmatch(name) and value is not None]
    return {
        "tokens": {
            "generated": _total(rows, "tokens/generated"),
            "trainable": _total(rows, "tokens/trainable"),
            "trained": sum(trained) if trained else None,
        },
        "seconds": {"whole": whole, **spent},
        "energy": _energy(rows, whole, watts),
    }


def _total(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return sum(values) if values else None


def _energy(rows: Sequence[Mapping[str, Any]], seconds: float, watts: float | None) -> dict[str, Any] | None:
    """Return measured energy, else an estimate from the configured power draw, else None."""
    measured = {part: _total(rows, f"energy/{part}_joules") for part in ("cpu", "gpu")}
    known = {part: joules for part, joules in measured.items() if joules is not None}
    if known:
        return {"how": "measured", "kwh": sum(known.values()) / _KWH, "parts": {p: j / _KWH for p, j in known.items()}}
    if watts is not None:
        return {"how": "estimated", "kwh": watts * seconds / _KWH, "watts": watts}
    return None


# ------------------------------------------------------------------------------------------------------------- verdict


def _verdict(facts: Mapping[str, Any]) -> dict[str, str]:
    """Return the verdict of the run.

    It states whether anything was trained, and whether the policy is better on held-out tasks.

    :returns: ``word``: learned, reward rose, one answer for all, may be chance, nothing was learned, reward fell, got
        worse, nothing was trained, or not measured; ``text``: the line for users; ``level``: ``good``, ``warning`` or
        ``error``.
    """
    updated, found = facts["updated"], facts["held_out"]
    if not updated["steps"]:
        cut = next((alarm for alarm in facts["alarms"] if alarm["rule"] == "cut_off"), None)
        advice = f"{cut['message']}; raise that limit first" if cut else updated["advice"]
        return _said("nothing was trained", ". ".join(filter(None, (updated["why"], advice))))
    if updated["why"] and not _is_significant((found or {}).get("difference", {})):  # a change matters more
        moved = f"{updated['why']}, so only the KL or entropy term changed the weights"
        text = ". ".join(filter(None, (moved, updated["advice"])))
        return _said("nothing was learned", text, headline="No learning signal")
    if found is None:
        in_training = _in_training(facts["reward"])
        return _said("not measured", f"no held-out tasks; {in_training}. To measure progress, {_ENOUGH}")
    if "difference" not in found:
        missing = "before" if found["after"]["step"] else "after"
        key = ". Set astuner.trainer_common.val_before_train=true" if missing == "before" else ""
        return _said("not measured", f"no validation {missing} training{key}")
    verdict = _compared(found, facts["also_trained_on"], (facts["trained"]["optim"] or {}).get("lr"))
    if verdict["word"] in ("learned", "reward rose") and facts["same_answer"]:
        return _said("one answer for all", f"{facts['same_answer']} ({verdict['text']})", "error")
    findings = [row["finding"] for row in facts["slices"] if row.get("fell")]
    return {**verdict, "text": "; ".join([verdict["text"], *findings])}


def _is_significant(difference: Mapping[str, Any]) -> bool:
    """Return whether success or the reward changed beyond chance."""
    reward = difference.get("reward")
    return bool(difference.get("significant") or (reward and reward["significant"]))


def _compared(found: Mapping[str, Any], trained_on: str | None, rate: float | None) -> dict[str, str]:
    """Return the verdict on two validations, by the measure that separates them."""
    d = found["difference"]
    reward, tasks = d["reward"], f"{d['tasks']} {'held-out' if trained_on == '' else 'validation'} tasks"
    notes = [f"{trained_on}, so this does not measure other tasks"] if trained_on else []
    good = "warning" if trained_on else "good"
    if d["measure"] == "reward":
        notes = [d["reason"], *notes]
        success = f"success {percent(d['before'], 1)} to {percent(d['after'], 1)}"
        by_success = success if d["constant_success"] is None else ""
        text = "; ".join(filter(None, (f"{_reward_change(reward)}, {tasks}", by_success, *notes)))
        if reward["significant"] and reward["mean"] > 0:
            failing = d["success_stated"] and d["constant_success"] == 0
            return _said("reward rose", text) if failing else _said("learned", text, good)
        if reward["significant"]:
            return _said("got worse", text, "error")
        return _undecided(text, reward, rate)
    on = "held-out success" if trained_on == "" else "validation success"
    change = f"{on} {percent(d['before'], 1)} to {percent(d['after'], 1)}, {d['tasks']} tasks"
    text = f"{_points(d['mean'])}, p {_p_value(d['p'])} ({change})"
    text = "; ".join((text, *notes))
    moved = bool(reward and (reward["significant"] or (reward["mean"] and not d["mean"])))
    if d["significant"]:
        against = moved and reward["mean"] * d["mean"] < 0
        text += f"; {_reward_change(reward)}" if against else ""
        return _said("learned", text, good) if d["mean"] > 0 else _said("got worse", text, "error")
    if reward and reward["significant"]:
        word = "reward rose" if reward["mean"] > 0 else "reward fell"
        return _said(word, f"{_reward_change(reward)}; success did not change beyond chance: {text}")
    if moved:
        return _said("may be chance", f"{text}; {_reward_change(reward)}")
    was, now = found["before"]["reward"], found["after"]["reward"]
    if reward is None and not d["mean"] and was != now:
        why = ", which cannot be tested without results per task"
        return _said("not measured", f"{text}; the mean reward went from {was or 0:.4g} to {now or 0:.4g}{why}")
    return _undecided(text, d, rate)


def _undecided(text: str, d: Mapping[str, Any], rate: float | None) -> dict[str, str]:
    """Return the verdict on a difference that is not significant."""
    if d["tasks"] < FEWEST:
        word = "may be chance" if d["mean"] else "nothing was learned"
        return _said(word, f"{text}. Too few tasks for a test; {_ENOUGH}")
    if d["mean"]:
        return _said("may be chance", f"{text}. The change is within chance, so learning is not shown")
    advice = f", or with a larger astuner.trainer_common.optim.lr than {rate:g}" if rate is not None else ""
    return _said("nothing was learned", f"{text}. Train longer{advice}")


def _reward_change(d: Mapping[str, Any]) -> str:
    change = f"{d['mean']:+.3g}, 95 %: {d['low']:+.3g} to {d['high']:+.3g}, p {_p_value(d['p'])}"
    return f"reward {d['before']:.4g} to {d['after']:.4g} ({change})"


def _in_training(reward: Mapping[str, float] | None) -> str:
    if reward is None:
        return "no training reward"
    change = f"{reward['first']:.3g} to {reward['last']:.3g}, p {_p_value(reward['p'])}"
    if reward["p"] >= LEVEL:
        return f"the training reward did not change beyond chance ({change})"
    return f"the training reward {'rose' if reward['rising'] else 'fell'} ({change})"


def _points(difference: float) -> str:
    """Return a difference of two shares in percentage points, for example ``+71 points``."""
    return f"{100 * difference:+.{0 if abs(difference) >= 0.0995 else 1}f} points"


def _p_value(p: float) -> str:
    return f"= {p:.2g}" if p >= 0.001 else "< 0.001"


_HEADLINES = {
    "learned": "Learned",
    "reward rose": "Reward rose",
    "one answer for all": "Same answer for all tasks",
    "may be chance": "Inconclusive",
    "nothing was learned": "No change",
    "reward fell": "Reward fell",
    "got worse": "Got worse",
    "nothing was trained": "Not trained",
    "not measured": "Not measured",
}
"""Word of a verdict -> the first words of its text."""


def _said(word: str, text: str, level: str = "warning", headline: str = "") -> dict[str, str]:
    return {"word": word, "text": f"{headline or _HEADLINES[word]}: {text}", "level": level}
