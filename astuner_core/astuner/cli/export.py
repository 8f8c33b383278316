"""``astuner export FILE --to DIR``: a trained model as a folder that anybody loads; or a run's episodes as data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from astuner.cli.common import check_overrides, disabled_plugins, load_plugins, only_data_on_stdout, write_json
from astuner.cli.eval import CheckpointOption
from astuner.cli.run import BackboneOption, JsonOption, OverridesArgument, RunDirOption, in_run_dir
from astuner.contracts.errors import ConfigError

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)

DATA = ("parquet", "jsonl", "sft", "dpo")
"""What --to may say instead of a folder; the part ``episode_data`` writes them."""


@app.command()
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
            metavar="DIR|parquet|jsonl|sft|dpo",
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
            help="Only such episodes, e.g. 'reward>=0.5', agent=NAME, text~word (repeatable). For sft and dpo "
            "split=train holds, unless one is about split.",
            show_default=False,
        ),
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option(help="Episodes for sft have this reward. Default: they succeeded.")
    ] = None,
    min_gap: Annotated[float, typer.Option(help="Rewards of a pair for dpo differ by this.")] = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Replace the model in DIR, or the file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy a trained model to a folder that transformers and vLLM load, or a run's episodes to a file."""
    given = list(overrides or ())
    check_overrides(given)
    if to in DATA:
        if out is None:
            raise ConfigError(
                f"--to {to} writes episodes to a file: add --out FILE (a folder for a model: --to ./{to})"
            )
        folder = file if file.is_dir() else _run_folder(ctx, file, given + in_run_dir(run_dir), backbone)
        _episodes(ctx, folder, to, out, where or [], min_reward, min_gap, force, as_json)
        return
    if out is not None or where or min_reward is not None or min_gap:
        raise ConfigError(
            f"--out, --where, --min-reward and --min-gap are for episodes: --to {'|'.join(DATA)}, not {to}"
        )
    _model(ctx, file, Path(to), given + in_run_dir(run_dir), backbone, checkpoint, force, as_json)


def _model(
    ctx: typer.Context,
    file: Path,
    to: Path,
    overrides: list[str],
    backbone: str | None,
    checkpoint: str,
    force: bool,
    as_json: bool,
) -> None:
    from astuner.runs import export as exporting

    with only_data_on_stdout(as_json):
        result = exporting.export(
            file,
            overrides,
            to=to,
            checkpoint=checkpoint,
            force=force,
            backbone=backbone,
            disabled_plugins=disabled_plugins(ctx),
        )
    source = "base" if result.checkpoint is None else str(result.checkpoint)
    if as_json:
        models = {policy: str(folder) for policy, folder in result.models.items()}
        write_json({"checkpoint": source, "models": models, "bytes": result.bytes})
        return
    folders = sorted(set(result.models.values()))
    typer.echo(f"{source}: {result.bytes / 2**20:,.1f} MiB exported; load it with")
    for folder in folders:
        typer.echo(f'  AutoModelForCausalLM.from_pretrained("{folder}")')
    typer.echo(f"or: vllm serve {folders[0]}")


def _run_folder(ctx: typer.Context, file: Path, overrides: list[str], backbone: str | None) -> Path:
    from astuner.config import load_config

    return load_config(file, overrides, backbone=backbone, disabled_plugins=disabled_plugins(ctx)).run_dir


def _episodes(
    ctx: typer.Context,
    run: Path,
    to: str,
    out: Path,
    where: list[str],
    min_reward: float | None,
    min_gap: float,
    force: bool,
    as_json: bool,
) -> None:
    from astuner.plugins import registry

    part = registry.part(load_plugins(ctx), "episode_data", wanted_by=f"--to {to}")
    target = out.expanduser().resolve()
    rows = part.write(run, to, target, where=where, min_reward=min_reward, min_gap=min_gap, force=force)
    if as_json:
        write_json({"run": str(run), "file": str(target), "rows": rows, "bytes": target.stat().st_size})
        return
    typer.echo(f"{rows:,} rows, {target.stat().st_size / 2**20:,.1f} MiB: {target}")
