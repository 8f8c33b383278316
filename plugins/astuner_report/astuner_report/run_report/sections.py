"""From facts to a document: what a person who was not there wants to know, in the order of their questions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from astuner_record.certificate import summary_of
from astuner_report.run_report.document import Block, Callout, Code, Document, Figure, Section, Table, Text, facts_table

_LEVELS = {"ended": "good", "stopped": "warning", "unfinished": "warning", "failed": "error"}
_WORDS = {
    "ended": "The run came to its end.",
    "stopped": "The run was stopped by a person.",
    "unfinished": "The run has not ended",
    "failed": "The run failed.",
}


def make_document(facts: Mapping[str, Any], svg: str) -> Document:
    """
    :param facts: of `astuner_report.run_report.facts.gather`.
    :param svg: the curve.
    """
    sections = (
        Section("Result", tuple(_result(facts))),
        Section("Curve", (Figure(svg, "reward_curve.svg", "Reward of each step, and success on held-out tasks."),)),
        Section("What was trained, and on what", tuple(_what(facts))),
        Section("Alarms", tuple(_alarms(facts["alarms"], facts["watched"]))),
        Section("Failures", tuple(_failures(facts["failures"]))),
        Section("Tokens", tuple(_tokens(facts["certificate"]))),
        Section("Cost", tuple(_cost(facts))),
        Section("How to reproduce", tuple(_reproduce(facts))),
    )
    starts = facts["origin"]
    began = f"began {_when(starts[0]['started'])}" if starts else "an older run"
    return Document(f"{facts['name']}: report", f"{facts['steps']} steps, {began}", sections)


# ----------------------------------------------------------------------------------------------------------- the result


def _result(facts: Mapping[str, Any]) -> list[Block]:
    state, found = facts["state"], facts["held_out"]
    why = f" {state['why']}" if state["why"] else ""
    word = _WORDS[state["word"]] + (":" if state["word"] == "unfinished" else "")
    level = _LEVELS[state["word"]]
    if level == "good" and not facts["updated"]["steps"]:
        level, why = "warning", " It trained nothing."
    blocks: list[Block] = [Callout(level, word + why), Callout(facts["verdict"]["level"], facts["verdict"]["text"])]
    blocks += _held_out(found) if found else []
    if facts["reward"]:
        steps, first, last = (facts["reward"][name] for name in ("steps", "first", "last"))
        some = "step" if steps == 1 else f"{steps} steps"
        blocks.append(Text(f"Mean training reward: {first:.3f} in the first {some}, {last:.3f} in the last."))
    return blocks


def _held_out(found: Mapping[str, Any]) -> list[Block]:
    after = "after" if "before" in found else "last"
    names = {"before": "before", after: "after", "best": "best"}
    named = [(name, found[key]) for name, key in names.items() if key in found]
    rows = []
    for name, at in named:
        if name == "best" and at["step"] in [other["step"] for n, other in named if n != "best"]:
            continue
        unscored = f" of {at['tasks'] + at['unscored_tasks']:.0f}" if at["unscored_tasks"] else ""
        rows.append(
            (
                name,
                f"{at['step']}",
                f"{at['success']:.1%}",
                f"{at['low']:.1%} to {at['high']:.1%}",
                f"{at['tasks']:.0f}{unscored}",
                f"{at['failed_episodes'] or 0:.0f}",
            )
        )
    head = ("held-out success", "step", "success", "95 % interval", "tasks", "failed episodes, not counted")
    table = Table(head, tuple(rows), frozenset({1, 2, 4, 5}))
    return [table, _difference(found["difference"])] if "difference" in found else [table]


def _difference(d: Mapping[str, Any]) -> Block:
    better = "better" if d["mean"] > 0 else "worse"
    change = f"{100 * d['mean']:+.1f} percentage points (95 %: {100 * d['low']:+.1f} to {100 * d['high']:+.1f})"
    changed = ", ".join(f"{count} {how}" for how, count in d.get("changed", {}).items())
    how = f"{d['test']}, {d['tasks']} tasks{f' ({changed})' if changed else ''}, p {_p(d['p'])}"
    if d["significant"]:
        return Callout("good" if d["mean"] > 0 else "error", f"{change}: {better}, and more than chance. {how}.")
    return Callout("warning", f"{change}: this may be chance. {how}.")


def _p(p: float) -> str:
    return f"= {p:.2g}" if p >= 1e-4 else "below 0.0001"


# ------------------------------------------------------------------------------------------------------------- the rest


def _what(facts: Mapping[str, Any]) -> list[Block]:
    trained, data, plan = facts["trained"], facts["data"], facts["plan"] or {}
    algorithm, optim = trained["algorithm"] or {}, trained["optim"] or {}
    clipped = f"clip {algorithm.get('clip_ratio_low')} / {algorithm.get('clip_ratio_high')}"
    learning = f"{algorithm.get('loss')} loss, {algorithm.get('adv_estimator')} advantages, {clipped}, "
    lora = f", LoRA rank {trained['lora_rank']}" if trained["lora_rank"] else ""
    table = {
        "model": f"{trained['model']}{lora}",
        "backbone": plan.get("backbone") or trained["backbone"],
        "learning": f"{learning}{algorithm.get('loss_agg_mode')}, {optim.get('optimizer')} lr {optim.get('lr')}",
        "KL to the start": trained["kl"],
        "agents": plan.get("agents") or _json(trained["agents"]),
        "policies": plan.get("policies") or _json(trained["policies"]),
        "tasks": plan.get("tasks") or f"{data['reader']} {_json(data['reader_settings'])}",
        "workflow": plan.get("workflow") or data["workflow"],
        "reward": plan.get("reward") or data["judge"] or "set by the workflow",
        "a step": plan.get("a step") or f"{data['groups_per_step']} groups x {data['attempts']} attempts",
        "temperature": data["temperature"],
    }
    return [facts_table(table)]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if value else ""


def _alarms(alarms: list[Mapping[str, Any]], watched: bool) -> list[Block]:
    if not alarms and not watched:
        return [Text("The sentinel did not watch this run.")]
    if not alarms:
        return [Callout("good", "The sentinel raised none.")]
    names = ("step", "severity", "rule", "message")
    rows = tuple((*(f"{a[name]}" for name in names), lasted(a), f"{a['advice']}") for a in alarms)
    return [Table(("since step", "severity", "rule", "what", "how long", "what to do"), rows, frozenset({0}))]


def lasted(alarm: Mapping[str, Any]) -> str:
    """In how many steps an alarm held, and what these cost; empty where that is not known."""
    if not alarm.get("held"):
        return ""
    return f"in {alarm['held']} of {alarm['of']} steps, {alarm['tokens_share']:.0%} of the tokens"


def _failures(failures: Mapping[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    kinds = failures["kinds"]
    if kinds:
        rows = tuple(
            (kind, f"{of['episodes']:,}", "; ".join(f"{count:,} x {error}" for error, count in of["errors"].items()))
            for kind, of in kinds.items()
        )
        blocks.append(Table(("how episodes failed", "episodes", "commonest messages"), rows, frozenset({1})))
    else:
        blocks.append(Callout("good", "No episode failed."))
    if failures["endings"]:
        counted = tuple((name, f"{n:,}") for name, n in sorted(failures["endings"].items()) if n)
        blocks.append(Table(("how all episodes ended", "number"), counted, frozenset({1})))
    return blocks


def _tokens(certificate: Mapping[str, Any] | None) -> list[Block]:
    if certificate is None:
        return [Text("No training episode has ended, so there is nothing to certify.")]
    words = summary_of(certificate)
    tokens = certificate["tokens"]
    blocks: list[Block] = [
        Text(
            "Every trained token is one that the model generated; its id and log-probability were recorded when it did."
        ),
        facts_table({**words, "trained with advantage 0": f"{tokens['trained_with_zero_advantage']:,} tokens"}),
    ]
    if meaning := certificate.get("meaning"):
        blocks.append(Table(("word", "meaning"), tuple((word, text) for word, text in meaning.items())))
    return blocks


def _cost(facts: Mapping[str, Any]) -> list[Block]:
    found = facts["cost"]
    tokens, seconds = found["tokens"], dict(found["seconds"])
    whole = seconds.pop("whole")
    spent = ", ".join(f"{phase} {_duration(s)}" for phase, s in seconds.items())
    table = {
        "tokens generated for training": _count(tokens["generated"]),
        "tokens in loss masks": _count(tokens["trainable"]),
        "tokens in updates, once for each pass": _count(tokens["trained"]),
        "optimizer steps": _count(facts["updated"]["optimizer_steps"]),
        "steps that changed weights": f"{facts['updated']['steps']} of {facts['updated']['of']}",
        "time": f"{_duration(whole)} ({spent})" if spent else _duration(whole),
        "energy": _energy(found["energy"], facts["origin"]),
    }
    return [facts_table(table), Text("Rollouts and training overlap where a backbone runs them at the same time.")]


def _count(n: float | None) -> str:
    return "" if n is None else f"{n:,.0f}"


def _energy(found: Mapping[str, Any] | None, starts: list[Mapping[str, Any]]) -> str:
    how = starts[-1]["energy"] if starts else ""
    if found is None:
        asked = "for an estimate, write astuner.trainer_common.watts"
        return f"not known{f': {how}' if how else ''}; {asked}"
    if found["how"] == "estimated":
        return f"{found['kwh']:.3g} kWh, estimated: {found['watts']:g} W, as trainer_common.watts says, times the time"
    parts = ", ".join(f"{part.upper()} {kwh:.3g} kWh" for part, kwh in found["parts"].items())
    return f"{found['kwh']:.3g} kWh, measured: of all that ran on the machine of `astuner run` ({parts}; {how})"


def _reproduce(facts: Mapping[str, Any]) -> list[Block]:
    starts = facts["origin"]
    if not starts:
        return [Text("What was typed was not written down by this older ASTuner; resolved.yaml has the settings.")]
    first, last = starts[0], starts[-1]
    project, machine = first["project"], first["machine"]
    commit = "in no git repository"
    if project:
        changed = {True: ", with changes that are not committed", False: "", None: ", perhaps with changes"}
        commit = f"{project['commit']}{changed[project['changed']]}"
    table = {
        "project": commit,
        "settings": f"resolved.yaml in the run folder, sha256 {last['config_sha256'][:16]}…",
        "seed": facts["seed"],
        "continued": f"{len(starts) - 1} times" if len(starts) > 1 else "",
        "machine": f"{machine['system']}, {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB",
        "GPUs": "; ".join(machine["gpus"]) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in last["versions"].items()),
    }
    return [Code(first["command"]), facts_table(table)]


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if hours < 2 else f"{hours:.1f} h"
