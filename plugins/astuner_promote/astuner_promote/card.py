"""The card of a promoted model: what it is, how it was made, what was measured, what is known of its licence.

A model card as the Hugging Face hub reads it (README.md with YAML at its head).  Invariant: it holds settings as a run
writes them down, without secrets, and no folder of the machine but the model's name as it was configured.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from astuner import AgentRegistry, Config, RunDir, read_jsonl
from astuner.contracts.errors import DataError
from astuner_promote.gate import Comparison, Gate, Judgement
from astuner_promote.keeping import Candidate, licences

_PACKAGES = ("astuner-core", "torch", "transformers", "tokenizers", "peft")
_STEP = re.compile(r"step-(\d+)")
_HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def write_card(gate: Gate, candidate: Candidate, judged: Judgement, serving: str, at: str) -> str:
    """
    :param serving: what it was compared with.
    :param at: when.
    """
    config = gate.config
    policies = AgentRegistry.of(config.astuner).trained_policies
    bases = list(dict.fromkeys(_name(config.model_of(policy).path) for policy in policies))
    run, recipe = _recipe(config, candidate)
    origin = _origin(run)
    licence = {policy: _licence(config, policy) for policy in policies}
    head = {
        "base_model": bases[0] if len(bases) == 1 else bases,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reinforcement-learning", "astuner"],
        **({"license": known} if (known := next((n for n, _ in licence.values() if n), "")) else {}),
    }
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {config.experiment_name}, {candidate.folder.name}",
        f"{', '.join(bases)}, trained with ASTuner on the experiment `{config.path.name}`; let through on {at} by "
        f"`astuner promote`. SHA-256 of the weights: `{candidate.weights}`.",
        "## What was measured",
        *_figures(gate, judged, serving),
        "## How it was made",
        _table(("", ""), _made(config, candidate, run, recipe, origin)),
        "The recipe, every key with its value:",
        f"```yaml\n{yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=100)}```",
        "## Versions",
        _table(("package", "when trained", "when measured"), _versions(origin)),
        "## Licence",
        *(f"{f'{p}: ' if len(licence) > 1 else ''}{text}" for p, (_, text) in licence.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _figures(gate: Gate, judged: Judgement, serving: str) -> list[str]:
    repeat = gate.repeat or gate.config.astuner.rollout.val_kwargs.num_repeat
    temperature = gate.config.astuner.rollout.val_kwargs.temperature
    rows: list[Sequence[str]] = [_row(judged.held_out, f"above {gate.margin:g}")]
    rows += [_row(one, f"above {-gate.tolerance:g}") for one in judged.also]
    found = [
        f"Mean {judged.held_out.by} on {judged.tasks} tasks, compared with {serving}: the same tasks and seeds, "
        f"{repeat} episode{'s' * (repeat > 1)} a task, temperature {temperature:g}; 95 % intervals of the mean "
        "difference.",
        _table(("experiment", "tasks", "before", "this model", "difference", "interval", "must be", "p"), rows),
    ]
    for one in (judged.held_out, *judged.also):
        if one.success is not None:
            found.append(
                f"{one.experiment}: rewards are compared; success on the same {one.tasks} tasks went from "
                f"{one.success.before:.1%} to {one.success.after:.1%}."
            )
    if judged.trained_on:
        found.append(f"Of the experiment's own tasks: {judged.trained_on}.")
    if judged.checks:
        checks = [(one.check, f"{one.complaints} of {one.episodes}", f"{one.most:g}") for one in judged.checks]
        found.append(_table(("check", "episodes complained of", "share allowed"), checks))
    return found


def _row(one: Comparison, must: str) -> Sequence[str]:
    return (
        one.experiment,
        str(one.tasks),
        f"{one.serving:.3f}",
        f"{one.candidate:.3f}",
        f"{one.difference:+.3f}",
        f"[{one.interval.low:+.3f}, {one.interval.high:+.3f}]",
        must,
        f"{one.p:.2g}",
    )


def _made(
    config: Config, candidate: Candidate, run: Path | None, recipe: Mapping[str, Any], origin: Mapping[str, Any]
) -> list[Sequence[str]]:
    settings = recipe.get("astuner", {})
    reader = settings.get("task_reader", {})
    step = _STEP.fullmatch(candidate.folder.name)
    common, rollout = settings.get("trainer_common", {}), settings.get("rollout", {})
    rows: list[Sequence[str]] = [
        (
            "data",
            f"task reader `{reader.get('type')}`: `{json.dumps(reader.get(reader.get('type')), ensure_ascii=False)}`",
        ),
        ("agent", f"`{rollout.get('workflow')}`"),
        ("judge", f"`{settings.get('task_judge', {}).get('judge')}`"),
        ("objective", f"{common.get('algorithm', {}).get('adv_estimator')}, {common.get('algorithm', {}).get('loss')}"),
        (
            "steps",
            f"{int(step[1])} of {common.get('total_steps') or 'as many as the epochs take'}" if step else "unknown",
        ),
        (
            "tasks a step, episodes a task",
            f"{settings.get('data', {}).get('train_batch_size')}, {rollout.get('num_repeat')}",
        ),
        ("backbone", str(settings.get("backbone"))),
        ("seed", str(settings.get("seed"))),
    ]
    if run is not None and step and (seen := _validated(run, int(step[1]))):
        rows.append(("success in the run's own validation", seen))
    if origin.get("project"):
        changed = ", with changes that were not committed" if origin["project"].get("changed") else ""
        rows.append(("commit of the experiment", f"{origin['project'].get('commit')}{changed}"))
    if run is None:
        rows.append(
            (
                "recipe",
                "of the experiment file as it was when this was measured: no run beside the checkpoint says more",
            )
        )
    return rows


def _validated(run: Path, step: int) -> str:
    """The success of the run's own validation at this step; empty where there was none, or it cannot be read."""
    try:
        row = next(
            r for r in read_jsonl(RunDir(run).metrics) if r.get("step") == step and r.get("val/success") is not None
        )
        return f"{row['val/success']:.3f} [{row['val/success_ci_low']:.3f}, {row['val/success_ci_high']:.3f}]"
    except (StopIteration, DataError, OSError, KeyError, TypeError, ValueError):
        return ""


def _recipe(config: Config, candidate: Candidate) -> tuple[Path | None, dict[str, Any]]:
    """The candidate's run, and its settings as it wrote them down, without secrets; else the experiment's now."""
    run = candidate.folder.parents[1] if candidate.folder.parent.name == "checkpoints" else None
    try:
        written = yaml.safe_load(RunDir(run).resolved.read_text(encoding="utf-8")) if run else {}
        known = run is not None and isinstance(written["astuner"], dict)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        known = False
    settings: dict[str, Any] = dict(written) if known else yaml.safe_load(config.dump_yaml())
    settings.pop("resolved", None)  # where the file was
    settings["astuner"].pop("experiment_dir", None)
    return run if known else None, {key: _without_folders(value) for key, value in settings.items()}


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return _public(value) if isinstance(value, str) else value


def _public(text: str) -> str:
    """Of a folder or file of this machine, the name."""
    return f"…/{_name(text)}" if text.startswith(("/", "~")) and "\n" not in text else text


def _name(path: str) -> str:
    return Path(path).name if path.startswith(("/", "~")) else path


def _origin(run: Path | None) -> Mapping[str, Any]:
    """The run's newest start, as `astuner_report` wrote it down; nothing where it did not, or it is damaged."""
    try:
        start = json.loads(RunDir(run).origin.read_text(encoding="utf-8"))["starts"][-1] if run else {}
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}
    return {key: start[key] for key in ("project", "versions") if isinstance(start.get(key), dict)}


def _versions(origin: Mapping[str, Any]) -> list[Sequence[str]]:
    now = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            now[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    then = origin.get("versions", {})
    return [(name, str(then.get(name, "not known")), version) for name, version in now.items()]


def _licence(config: Config, policy: str) -> tuple[str, str]:
    """What the hub would call the licence, or nothing; and what to say."""
    base = Path(config.locate_model(policy=policy))
    files = [file.name for file in licences(config, policy)]
    said = ""
    card = base / "README.md"
    if card.is_file() and (head := _HEAD.match(card.read_text(encoding="utf-8", errors="replace"))):
        try:
            said = str((yaml.safe_load(head[1]) or {}).get("license") or "")
        except (yaml.YAMLError, AttributeError):
            said = ""
    if not said and not files:
        return "", (
            "Not found: beside the model before training there is no LICENSE, no NOTICE, and no README.md that names "
            "one. Look it up before this model is passed on."
        )
    beside = (
        f" {', '.join(files)} of the model before training {'lies' if len(files) == 1 else 'lie'} beside this file."
    )
    return said, f"{said or 'As the files say.'}{'.' if said else ''}{beside if files else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
