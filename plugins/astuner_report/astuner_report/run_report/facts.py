"""Everything a report says, as data: gathered from the files of a run folder alone.

So a report can be written at the end of a run, when it fails, or a year later with ``astuner report``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
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
from astuner_report.run_report.files import NONSENSE, has, is_measured, read_json, read_rows
from astuner_report.sentinel import Sentinel, StepFacts, causes
from astuner_report.sentinel.outcomes import SameAnswer
from astuner_report.sentinel.rules import normal_tail, trend, two_proportions
from astuner_report.sentinel.settings import Sentinel as Watched

FORMAT = 1
_MOST_ERRORS = 3
"""Different messages that are told for each kind of failure."""
_TRAINED = re.compile(r"(policy/[^/]+/)?tokens/trained")
_TRAINED_BY = {
    "model": "model.path", "lora_rank": "model.lora.rank", "backbone": "backbone", "agents": "agents",
    "algorithm": "trainer_common.algorithm", "optim": "trainer_common.optim", "policies": "policies",
}  # fmt: skip
_DATA = {
    "reader": "task_reader.type", "workflow": "rollout.workflow", "judge": "task_judge.judge",
    "groups_per_step": "data.train_batch_size", "attempts": "rollout.num_repeat", "temperature": "rollout.temperature",
}  # fmt: skip
"""Fact -> the setting that it is."""
_MEASURED = {
    "step": "step", "success": "val/success", "low": "val/success_ci_low", "high": "val/success_ci_high",
    "reward": "val/reward/mean", "tasks": "val/tasks", "unscored_tasks": "val/unscored_tasks",
    "failed_episodes": "val/failed_episodes",
}  # fmt: skip
"""Fact of a validation -> its metric."""
_PHASES = ("rollout", "train", "validation", "save")
_KWH = 3.6e6
"""Joules."""
_ENOUGH = "64 or more held-out tasks"


_ADVICE = {
    SOLVED: "these tasks are solved, so take harder ones",
    "no generated token is in a loss mask": "certificate.json says what became of the tokens (left_out); give the "
    "agent model=model_tuner",
    "every update was left out, since loss or gradient was not finite": "lower astuner.trainer_common.optim.lr, or "
    "train in float32",
    "every group had equal rewards": "read some of episodes/ in the run folder: does the reward tell a good attempt "
    "from a bad one? If so, take tasks that succeed now and then, or raise astuner.rollout.temperature or num_repeat",
    "no sample had a gradient": "look at the rewards in episodes/, and at the penalties that are subtracted from them",
}
"""Why a step taught nothing -> what to do."""
_ALARM = {"step": int, "severity": str, "rule": str, "message": str, "advice": str}


def gather(run_dir: RunDir, ledger: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The facts, JSON-serialisable; what is not known is None or missing.

    :param ledger: how the episodes ended; None: as the folder's ``summary.json`` says, and its log is looked at, too.
    """
    damage: list[str] = []
    settings = (read_resolved(run_dir.resolved) or {}).get("astuner", {})
    rows, starts = read_rows(run_dir.metrics, damage, is_measured), origin.read(run_dir, damage)
    if ledger is None:
        summary = read_json(run_dir.summary, damage, lambda found: sum((found.get("ledger") or {}).values()))
        ledger = (summary or {}).get("ledger")
        damage += _of_log(run_dir)
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
        "failures": _failures(read_rows(run_dir.failures, damage, bool), ledger),
        "alarms": _alarms(read_rows(run_dir.alarms, damage, lambda row: has(row, **_ALARM)), settings, rows, damage),
        "watched": bool(_at(settings, "trainer_common.sentinel.enabled")),
        "certificate": read_json(run_dir.certificate, damage, _certified),
        "cost": _cost(rows, watts=_at(settings, "trainer_common.watts")),
        "origin": starts,
        "seed": settings.get("seed"),
        "damage": damage,
    }
    facts["verdict"] = _verdict(facts)
    return {name: _writable(value) for name, value in facts.items()}


def _same_answer(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what `SameAnswer` finds in the last validation, or an empty string."""
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "val/success" in row), {})
    numbers = {name: value for name, value in last.items() if isinstance(value, (int, float))}
    return SameAnswer().validated(StepFacts(step=int(last.get("step", 0)), row=numbers)) or ""


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


def _at(settings: Any, key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def _reward(rewards: Sequence[float]) -> dict[str, float] | None:
    """The mean reward of the first and of the last steps, ten or half of all, and whether it has a trend."""
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
    """What was trained in some steps.

    :param rows: of ``metrics.jsonl``, training steps.
    :returns: ``tokens`` in updates, once for each pass; ``optimizer_steps``, None where the backbone does not count
        them; ``steps`` that changed weights, and ``of`` how many; ``why`` no step had a reward to learn from, with
        ``advice``, else empty.
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
        "why": why if rows else "no step came to its end",
        "advice": next((advice for reason, advice in _ADVICE.items() if why.startswith(reason)), ""),
    }


def _alarms(
    raised: Sequence[Mapping[str, Any]],
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    damage: list[str],
) -> list[dict[str, Any]]:
    """One entry for each cause: its first alarm, since when there are signs of it, in how many steps, what these cost.

    ``with``: the rules that raised alarms, too, and follow from it.  How long it held is not written down, but follows
    from the rows; None for a rule that knows more than these.
    """
    policies = dict.fromkeys(name.split("/")[1] for row in rows for name in row if name.startswith("policy/"))
    sentinel = Sentinel(Watched.model_validate(_at(settings, "trainer_common.sentinel") or {}), [*policies])
    try:
        sentinel.replay(rows)
    except NONSENSE as e:
        damage.append(f"metrics.jsonl has numbers that no run writes, so how long alarms held is not known: {e}")
    generated = {row["step"]: row["tokens/generated"] or 0.0 for row in rows if "tokens/generated" in row}
    everything = sum(generated.values()) or 1.0
    first = {alarm["rule"]: alarm for alarm in reversed(raised)}
    found = []
    for rule, others in causes(first).items():
        held = {step for name in (rule, *others) for step in sentinel.held.get(name, ()) if step in generated}
        lasted = {
            "step": min(int(first[name]["step"]) for name in (rule, *others)),
            "held": len(held) or None,
            "of": len(generated),
            "tokens_share": sum(generated[step] for step in held) / everything,
        }
        found.append({**first[rule], **lasted, **({"with": others} if others else {})})
    return sorted(found, key=lambda alarm: int(alarm["step"]))


def _failures(entries: Sequence[Mapping[str, Any]], ledger: Mapping[str, int] | None) -> dict[str, Any]:
    """What failed, by kind, with the commonest messages."""
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


def _of_log(run_dir: RunDir) -> Sequence[str]:
    """What of the episode log is damaged."""
    try:
        with EpisodeLog(run_dir.path) as log:
            return log.problems
    except DataError as e:
        return [str(e)] if any(run_dir.episodes.glob("*.sqlite")) else []


# ---------------------------------------------------------------------------------------------------- before and after


def _held_out(rows: Sequence[Mapping[str, Any]], run_dir: RunDir, damage: list[str]) -> dict[str, Any] | None:
    """The first and the last validation, the best one, and what the first two differ by; None without a validation.

    :param rows: of ``metrics.jsonl``.
    :param run_dir: has what each validation found of each task.
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
    """The best validation of all, on the tasks that all scored: how many these are, and its success over them.

    Where results of tasks are missing, as in an older run, each counts with its own tasks.
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
    """How many validation tasks are also trained on, in words; empty: they are held out; None: nobody looked."""
    overlap = tasks.get("overlap")
    return None if overlap is None else overlapping(overlap) if overlap["tasks"] else ""


def _measured(row: Mapping[str, Any]) -> dict[str, Any]:
    return {ours: row.get(theirs) for ours, theirs in _MEASURED.items()}


def _difference(
    first: Mapping[str, Any], last: Mapping[str, Any], run_dir: RunDir, damage: list[str]
) -> dict[str, Any]:
    """What two validations differ by: of success, and below ``reward`` of the reward; which one tells, and why."""
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
        "test": "two-proportion z-test (the episodes are not there to pair by task, so it is on the safe side)",
        "tasks": min(n1, n2),
        "reward": None,
        "measure": "success",
        "reason": "",
    }


def _from_transcripts(episodes: Path, step: int, damage: list[str]) -> Results:
    """What an older run's conversations say of each task, by its number: a validation goes through the tasks in the
    order of another."""
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
    """Tokens, time and energy: sums over the rows, so a run that was continued is counted whole.

    :param watts: what the machine draws, where a person says so.
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
    """Measured where something counts, else estimated if a person gave a number to estimate from, else None."""
    measured = {part: _total(rows, f"energy/{part}_joules") for part in ("cpu", "gpu")}
    known = {part: joules for part, joules in measured.items() if joules is not None}
    if known:
        return {"how": "measured", "kwh": sum(known.values()) / _KWH, "parts": {p: j / _KWH for p, j in known.items()}}
    if watts is not None:
        return {"how": "estimated", "kwh": watts * seconds / _KWH, "watts": watts}
    return None


# ------------------------------------------------------------------------------------------------------------- verdict


def _verdict(facts: Mapping[str, Any]) -> dict[str, str]:
    """What a run came to, in one line: was anything trained, and is the policy better on tasks not trained on?

    :returns: ``word``: learned, reward rose, one answer for all, may be chance, nothing was learned, reward fell, got
        worse, nothing was trained, or not measured; ``text``: the line, which begins with it; ``level``: ``good``,
        ``warning`` or ``error``.
    """
    updated, found = facts["updated"], facts["held_out"]
    if not updated["steps"]:
        cut = next((alarm for alarm in facts["alarms"] if alarm["rule"] == "cut_off"), None)
        advice = f"{cut['message']}, so raise that first" if cut else updated["advice"]
        return _said("nothing was trained", "; ".join(filter(None, (updated["why"], advice))))
    if updated["why"] and not _is_significant((found or {}).get("difference", {})):  # worse is said before why
        moved = f"{updated['why']}, so only the KL or entropy term moved the weights"
        return _said("nothing was learned", "; ".join(filter(None, (moved, updated["advice"]))))
    if found is None:
        in_training = _in_training(facts["reward"])
        return _said("not measured", f"there are no held-out tasks; {in_training}; {_ENOUGH} can tell")
    if "difference" not in found:
        missing = "before" if found["after"]["step"] else "after"
        key = "; set astuner.trainer_common.val_before_train=true" if missing == "before" else ""
        return _said("not measured", f"there was no validation {missing} training{key}")
    verdict = _compared(found, facts["also_trained_on"], (facts["trained"]["optim"] or {}).get("lr"))
    if verdict["word"] in ("learned", "reward rose") and facts["same_answer"]:
        return _said("one answer for all", f"{facts['same_answer']} ({verdict['text']})", "error")
    return verdict


def _is_significant(difference: Mapping[str, Any]) -> bool:
    """Whether success or the reward changed beyond chance."""
    reward = difference.get("reward")
    return bool(difference.get("significant") or (reward and reward["significant"]))


def _compared(found: Mapping[str, Any], trained_on: str | None, rate: float | None) -> dict[str, str]:
    """The verdict on two validations, by the measure that tells them apart."""
    d = found["difference"]
    reward, tasks = d["reward"], f"{d['tasks']} {'held-out' if trained_on == '' else 'validation'} tasks"
    notes = [f"{trained_on}, so it does not measure how the policy does on others"] if trained_on else []
    good = "warning" if trained_on else "good"
    if d["measure"] == "reward":
        notes = [d["reason"], *notes]
        by_success = f"success {d['before']:.1%} to {d['after']:.1%}" if d["constant_success"] is None else ""
        text = "; ".join(filter(None, (f"{_reward_change(reward)}, {tasks}", by_success, *notes)))
        if reward["significant"] and reward["mean"] > 0:
            failing = d["success_stated"] and d["constant_success"] == 0
            return _said("reward rose", text) if failing else _said("learned", text, good)
        if reward["significant"]:
            return _said("got worse", text, "error")
        return _undecided(text, reward, rate)
    on = "held out" if trained_on == "" else "validation"
    text = (
        f"{_points(d['mean'])}, p {_p_value(d['p'])} ({on} {d['before']:.1%} to {d['after']:.1%}, {d['tasks']} tasks)"
    )
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
        why = "; without the results of each task that cannot be tested"
        return _said("not measured", f"{text}; the mean reward went from {was or 0:.4g} to {now or 0:.4g}{why}")
    return _undecided(text, d, rate)


def _undecided(text: str, d: Mapping[str, Any], rate: float | None) -> dict[str, str]:
    """The verdict on a difference that is not significant."""
    if d["tasks"] < FEWEST:
        word = "may be chance" if d["mean"] else "nothing was learned"
        return _said(word, f"{text}; so few cannot tell: {_ENOUGH} can")
    if d["mean"]:
        return _said("may be chance", f"{text}, so nothing is shown to be learned")
    advice = f", or with a larger astuner.trainer_common.optim.lr than {rate:g}" if rate is not None else ""
    return _said("nothing was learned", f"{text}; train longer{advice}")


def _reward_change(d: Mapping[str, Any]) -> str:
    change = f"{d['mean']:+.3g}, 95 %: {d['low']:+.3g} to {d['high']:+.3g}, p {_p_value(d['p'])}"
    return f"reward {d['before']:.4g} to {d['after']:.4g} ({change})"


def _in_training(reward: Mapping[str, float] | None) -> str:
    if reward is None:
        return "nor is there a reward"
    change = f"{reward['first']:.3g} to {reward['last']:.3g}, p {_p_value(reward['p'])}"
    if reward["p"] >= LEVEL:
        return f"the reward in training did not change beyond chance ({change}), so nothing was learned that shows"
    return f"the reward in training {'rose' if reward['rising'] else 'fell'} ({change})"


def _points(difference: float) -> str:
    """A difference of two shares: ``+71 points``."""
    return f"{100 * difference:+.{0 if abs(difference) >= 0.0995 else 1}f} points"


def _p_value(p: float) -> str:
    return f"= {p:.2g}" if p >= 0.001 else "< 0.001"


def _said(word: str, text: str, level: str = "warning") -> dict[str, str]:
    return {"word": word, "text": f"{word}: {text}", "level": level}
