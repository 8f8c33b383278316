"""Model card of a promoted model: training recipe, measurements, versions, and license.

The card is a README.md with a YAML header, as on the Hugging Face Hub. Invariant: it contains settings as the run saved
them, without secrets, and no local paths except the configured model name.
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
from astuner.contracts.statistics import percent
from astuner_promote.gate import Comparison, Gate, Judgement
from astuner_promote.keeping import Candidate, licences

_PACKAGES = ("astuner-core", "torch", "transformers", "tokenizers", "peft")
_STEP = re.compile(r"step-(\d+)")
_HEAD = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)


def write_card(gate: Gate, candidate: Candidate, judged: Judgement, serving: str, at: str) -> str:
    """Return the text of the card.

    :param serving: Name of the model it was compared with.
    :param at: Time of the promotion.
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
        f"{', '.join(bases)}, trained with ASTuner on the experiment `{config.path.name}`. Promoted on {at} by "
        f"`astuner promote`. SHA-256 of the weights: `{candidate.weights}`.",
        "## Evaluation",
        *_figures(gate, judged, serving),
        "## Training",
        _table(("", ""), _made(config, candidate, run, recipe, origin)),
        "The complete recipe:",
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
        f"Mean {judged.held_out.by} on {judged.tasks} tasks, compared with {serving}: same tasks and seeds, "
        f"{repeat} episode{'s' * (repeat > 1)} per task, temperature {temperature:g}. Intervals are 95 % intervals of "
        "the mean difference.",
        _table(("experiment", "tasks", "before", "this model", "difference", "interval", "must be", "p"), rows),
    ]
    for one in (judged.held_out, *judged.also):
        if one.success is not None:
            found.append(
                f"{one.experiment}: rewards are compared. Success on the same {one.tasks} tasks went from "
                f"{percent(one.success.before, 1)} to {percent(one.success.after, 1)}."
            )
    if judged.trained_on:
        found.append(f"Overlap with training tasks: {judged.trained_on}.")
    if judged.checks:
        checks = [(one.check, f"{one.complaints} of {one.episodes}", f"{one.most:g}") for one in judged.checks]
        found.append(_table(("check", "failed episodes", "allowed share"), checks))
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
            f"{int(step[1])} of {common.get('total_steps') or 'the configured epochs'}" if step else "unknown",
        ),
        (
            "tasks per step, episodes per task",
            f"{settings.get('data', {}).get('train_batch_size')}, {rollout.get('num_repeat')}",
        ),
        ("backbone", str(settings.get("backbone"))),
        ("seed", str(settings.get("seed"))),
    ]
    if run is not None and step and (seen := _validated(run, int(step[1]))):
        rows.append(("success in the run's validation", seen))
    if origin.get("project"):
        changed = ", with uncommitted changes" if origin["project"].get("changed") else ""
        rows.append(("commit of the experiment", f"{origin['project'].get('commit')}{changed}"))
    if run is None:
        rows.append(
            (
                "recipe",
                "from the experiment file at the time of the evaluation: the checkpoint is not in a run folder",
            )
        )
    return rows


def _validated(run: Path, step: int) -> str:
    """Return the success of the run's validation at this step, or an empty string if it is missing or unreadable."""
    try:
        row = next(
            r for r in read_jsonl(RunDir(run).metrics) if r.get("step") == step and r.get("val/success") is not None
        )
        return f"{row['val/success']:.3f} [{row['val/success_ci_low']:.3f}, {row['val/success_ci_high']:.3f}]"
    except (StopIteration, DataError, OSError, KeyError, TypeError, ValueError):
        return ""


def _recipe(config: Config, candidate: Candidate) -> tuple[Path | None, dict[str, Any]]:
    """Return the candidate's run and its saved settings without secrets, or the experiment's current settings."""
    run = candidate.folder.parents[1] if candidate.folder.parent.name == "checkpoints" else None
    try:
        written = yaml.safe_load(RunDir(run).resolved.read_text(encoding="utf-8")) if run else {}
        known = run is not None and isinstance(written["astuner"], dict)
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        known = False
    settings: dict[str, Any] = dict(written) if known else yaml.safe_load(config.dump_yaml())
    settings.pop("resolved", None)  # a local path
    settings["astuner"].pop("experiment_dir", None)
    return run if known else None, {key: _without_folders(value) for key, value in settings.items()}


def _without_folders(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_folders(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_folders(each) for each in value]
    return _public(value) if isinstance(value, str) else value


def _public(text: str) -> str:
    """Return only the name of a local file or folder."""
    return f"…/{_name(text)}" if text.startswith(("/", "~")) and "\n" not in text else text


def _name(path: str) -> str:
    return Path(path).name if path.startswith(("/", "~")) else path


def _origin(run: Path | None) -> Mapping[str, Any]:
    """Return the run's latest start as recorded by `astuner_report`, or an empty mapping."""
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
    """Return the license identifier of the Hub, if known, and a text for the card."""
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
            "Unknown: the base model has no LICENSE, no NOTICE, and no README.md that names a license. Check the "
            "license before you distribute this model."
        )
    beside = f" The base model's {', '.join(files)} {'is' if len(files) == 1 else 'are'} in this folder."
    return said, f"{said or 'See the license files.'}{'.' if said else ''}{beside if files else ''}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
