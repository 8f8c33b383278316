"""``astuner export FILE --to DIR``: a trained model as a folder that anybody loads; or a run's episodes as data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from astuner import load_config
from astuner.contracts.commands import (
    BackboneOption,
    CheckpointOption,
    JsonOption,
    OverridesArgument,
    RunDirOption,
    all_overrides,
    command_line,
    only_data_on_stdout,
    write_json,
)
from astuner.contracts.errors import ConfigError
from astuner_export.model import Exported
from astuner_export.model import export as export_model
from astuner_record.episode_log.convert import Choice, write_episodes
from astuner_record.episode_log.salvage import end_partly

DATA = ("parquet", "jsonl", "sft", "tokens", "dpo")
"""What --to may say instead of a folder; `astuner_record.episode_log.convert` writes them."""


def export(
    ctx: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="The experiment file; for data also a run folder.", show_default=False),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="DIR|parquet|jsonl|sft|tokens|dpo",
            help="The new folder for the model; or the form of the episodes, then with --out.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: CheckpointOption = "best",
    run_dir: RunDirOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The new file with episodes.", show_default=False)
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Only such episodes, e.g. 'reward>=0.5', agent=NAME, text~word (repeatable). For sft, tokens and "
            "dpo split=train holds, unless one is about split.",
            show_default=False,
        ),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Episodes for sft and tokens have this reward. Default: they succeeded.")
    ] = None,
    min_gap: Annotated[float, typer.Option(help="Rewards of a pair for dpo differ by this.")] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Replace the model in DIR, or the file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a trained model to a folder that transformers and vLLM load, or a run's episodes to a file.

    Of a damaged log what is whole is written, with exit code 3, and what is not is named.
    """
    line, given = command_line(ctx), all_overrides(overrides, run_dir)
    if to not in DATA:
        if out is not None or where or min_reward is not None or min_gap:
            raise ConfigError(
                f"--out, --where, --min-reward and --min-gap are for episodes: --to {'|'.join(DATA)}, not {to}"
            )
        with only_data_on_stdout(as_json):
            model = export_model(
                file,
                given,
                to=to,
                checkpoint=checkpoint,
                force=force,
                backbone=backbone,
                disabled_plugins=line.disabled_plugins,
            )
        _show_model(model, as_json)
        return
    if out is None:
        raise ConfigError(f"--to {to} writes episodes to a file: add --out FILE (a folder for a model: --to ./{to})")
    run = file if file.is_dir() else load_config(file, given, backbone=backbone, plugins=line.plugins).run_dir
    target = out.expanduser().resolve()
    choice = Choice(where=where or (), min_reward=min_reward, min_gap=min_gap)
    rows, problems, lost = write_episodes(run, to, target, choice, force=force)
    size = target.stat().st_size
    if as_json:
        damage = {"problems": problems, "lost": [one._asdict() for one in lost]}
        write_json({"run": str(run), "file": str(target), "rows": rows, "bytes": size, **damage})
    else:
        typer.echo(f"{rows:,} rows, {size / 2**20:,.1f} MiB: {target}")
    end_partly(problems)


def _show_model(model: Exported, as_json: bool) -> None:
    source = "base" if model.checkpoint is None else str(model.checkpoint)
    if as_json:
        models = {policy: str(folder) for policy, folder in model.models.items()}
        write_json({"checkpoint": source, "models": models, "bytes": model.bytes})
        return
    folders = sorted(set(model.models.values()))
    typer.echo(f"{source}: {model.bytes / 2**20:,.1f} MiB exported; load it with")
    for folder in folders:
        typer.echo(f'  AutoModelForCausalLM.from_pretrained("{folder}")')
    typer.echo(f"or: vllm serve {folders[0]}")
