"""Command ``astuner promote FILE``: promote a checkpoint to serve, or reject it with all reasons."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.commands import (
    BackboneOption,
    FileArgument,
    JsonOption,
    OverridesArgument,
    RunDirOption,
    WithOption,
    all_overrides,
    command_line,
    only_data_on_stdout,
    write_json,
)
from astuner.contracts.errors import ConfigError

if TYPE_CHECKING:
    from astuner import Config
    from astuner_models.promoted import Promotions
    from astuner_promote.gate import Judgement

EXIT_REFUSED = 4


def promote(
    ctx: typer.Context,
    file: FileArgument,
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: Annotated[
        str, typer.Option(metavar="best|latest|NAME|DIR", help="Candidate checkpoint, as in `astuner eval`.")
    ] = "best",
    run_dir: RunDirOption = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(metavar="OTHER", help="Require no regression on this experiment's tasks (repeatable)."),
    ] = None,
    margin: Annotated[
        float, typer.Option(min=0, metavar="X", help="Minimum lower bound of the difference's interval.")
    ] = 0.0,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="X",
            help="Allowed loss on --also experiments (lower bound of the interval), and of success if rewards are "
            "compared.",
        ),
    ] = 0.05,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="success|reward",
            help="Measure to compare. Default: success, or the reward if success is constant.",
        ),
    ] = None,
    allow_lower_success: Annotated[
        bool,
        typer.Option(
            "--allow-lower-success",
            help="Accept a success that is lower by more than --tolerance if rewards are compared.",
        ),
    ] = False,
    check: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[=SHARE]",
            help="Run an output check or a judge, which may fail this share of the episodes. Default share: 0 "
            "(repeatable).",
        ),
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use the first N validation tasks.")] = None,
    repeat: Annotated[int | None, typer.Option(min=1, metavar="K", help="Episodes per task.")] = None,
    services: WithOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and report without changes.")] = False,
    back: Annotated[bool, typer.Option("--back", help="Return to the previous model immediately.")] = False,
    list_them: Annotated[bool, typer.Option("--list", help="List promotions and the serving model.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Promote a checkpoint to serve if it is better than the serving model, or roll back.

    Both models run the same validation tasks with the same seeds. A rejected candidate gives exit code 4 and lists
    every reason.
    """
    from astuner import load_config
    from astuner_models.promoted import Promotions

    if by not in (None, "success", "reward"):
        raise ConfigError(f"--by {by} is invalid. Use success or reward.")
    if back and (list_them or dry_run):
        raise ConfigError("--back takes effect immediately. Remove --list and --dry-run.")
    shares = dict(map(_check, check or ()))
    line, given = command_line(ctx), all_overrides(overrides, run_dir)
    line.check_services(beside := tuple(services or ()))
    with only_data_on_stdout(as_json):
        config = load_config(file, given, backbone=backbone, plugins=line.plugins)
        now = Promotions.read(config.run_dir)
        if list_them:
            data: dict[str, Any] = _history(now)
            text, refused = _history_text(config, now), False
        elif back:
            data, text = _back(config, now)
            refused = False
        else:
            others = [
                load_config(path, backbone=config.astuner.backbone, plugins=config.plugins) for path in also or ()
            ]
            options: dict[str, Any] = {
                "others": others,
                "margin": margin,
                "tolerance": tolerance,
                "by": by,
                "allow_lower_success": allow_lower_success,
                "checks": shares,
                "tasks": tasks,
                "repeat": repeat,
                "services": beside,
            }
            data, text = _promote(config, now, checkpoint, options, dry_run)
            refused = bool(data["reasons"])
    if as_json:
        write_json(data)
    else:
        typer.echo(text)
    if refused:
        raise typer.Exit(EXIT_REFUSED)


def _check(text: str) -> tuple[str, float]:
    """Parse a check's name, which may be code (``file.py->name``), and its allowed share."""
    name, _, share = text.rpartition("=") if "=" in text else (text, "", "0")
    try:
        most = float(share)
    except ValueError:
        most = -1.0
    if not name or not 0 <= most < 1:
        raise ConfigError(f"--check {text} is invalid. Use NAME or NAME=SHARE, with 0 <= SHARE < 1, e.g. nonsense=0.01")
    return name, most


def _promote(
    config: Config, now: Promotions | None, checkpoint: str, options: dict[str, Any], dry_run: bool
) -> tuple[dict[str, Any], str]:
    from astuner_models.serving import find_checkpoint
    from astuner_promote.card import write_card
    from astuner_promote.gate import Gate
    from astuner_promote.keeping import Candidate, now_is, promote

    folder = find_checkpoint(config, checkpoint)
    if folder is None:
        raise ConfigError(
            f"--checkpoint {checkpoint} is the base model, which candidates are compared with. Choose another "
            "checkpoint, or return to the base model with --back."
        )
    candidate = Candidate.of(config, folder)
    serving = now.model(now.serving) if now else None
    now_is(config, now, candidate)
    gate = Gate(config=config, progress=lambda text: typer.echo(text, err=True), **options)
    judged = gate.judge(serving, candidate.folder)
    name = f"{serving.name} ({serving.parent.name})" if serving else "base model"
    data = {
        "promoted": False,
        "dry_run": dry_run,
        "candidate": str(candidate.folder),
        "serving": str(serving or "base"),
        "by": judged.held_out.by,
        "by_chosen": gate.by is None,
        "allow_lower_success": gate.allow_lower_success,
        "margin": gate.margin,
        "tolerance": gate.tolerance,
        **_figures(judged),
        "trained_on": judged.trained_on,
        "reasons": judged.reasons,
        "model": None,
    }
    kind = judged.tasks.capitalize()
    lines = [f"Candidate   {candidate.folder}", f"Serving     {name}", f"{kind:<11} {judged.held_out}"]
    lines += [f"Also        {one.experiment}: {one}" for one in judged.also]
    lines += [f"By reward   {one.experiment}: {one.note}" for one in (judged.held_out, *judged.also) if one.note]
    lines += [f"Check       {one.check} {one}" for one in judged.checks]
    if judged.reasons:
        lines += ["Rejected:", *(f"  - {reason}" for reason in judged.reasons)]
    elif dry_run:
        lines.append("Would be promoted. To promote it, remove --dry-run.")
    else:
        from astuner_promote.keeping import timestamp

        at = timestamp()
        told = {key: data[key] for key in ("by", "margin", "tolerance", "held_out", "also", "checks")}
        model = promote(config, candidate, now, write_card(gate, candidate, judged, name, at), told)
        data |= {"promoted": True, "model": str(model)}
        lines += [f"Promoted    {model}", f"Model card  {model / 'README.md'}"]
        lines.append(f"`astuner serve` now uses it. To roll back, run: astuner promote {config.path} --back")
    return data, "\n".join(lines)


def _figures(judged: Judgement) -> dict[str, Any]:
    """Return the measurements as plain data."""

    def plain(one: Any) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(asdict(one)))
        return {key: value for key, value in found.items() if key != "reason"}

    compared = [
        {**plain(one), "difference": one.difference, "success_fell": one.success_fell}
        for one in (judged.held_out, *judged.also)
    ]
    checks = [{**plain(one), "share": one.share} for one in judged.checks]
    return {"held_out": compared[0], "also": compared[1:], "checks": checks}


def _back(config: Config, now: Promotions | None) -> tuple[dict[str, Any], str]:
    from astuner_promote.keeping import back

    folder = back(config, now)
    told = f"{folder} serves again" if folder else "the base model serves again"
    return {"serving": str(folder or "base")}, told


def _history(now: Promotions | None) -> dict[str, Any]:
    if now is None:
        return {"serving": None, "entries": {}, "changes": []}
    entries = {name: {**entry, "folder": str(now.model(name))} for name, entry in now.entries.items()}
    return {"serving": now.serving or "base", "entries": entries, "changes": list(now.changes)}


def _history_text(config: Config, now: Promotions | None) -> str:
    if now is None:
        return f"No checkpoint was promoted yet. To promote one, run: astuner promote {config.path}"
    lines = []
    for change in now.changes:
        entry = now.entries.get(change["to"], {})
        what = f"{change['to']}  {entry['name']}" if entry else "base model"
        line = f"{change['at']}  {change['by']:<8} {what}"
        if change["by"] == "promote" and (held := entry.get("held_out")):
            low, high = held["interval"]["low"], held["interval"]["high"]
            line += f"  {held['serving']:.3f} -> {held['candidate']:.3f} [{low:+.3f}, {high:+.3f}]"
        lines.append(line)
    return "\n".join([*lines, f"Serving: {now.model(now.serving) or 'base model'}"])
