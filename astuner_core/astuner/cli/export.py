"""``astuner export FILE --to DIR``: a trained model as a folder that anybody loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from astuner.cli.common import check_overrides, disabled_plugins, only_data_on_stdout, write_json
from astuner.cli.eval import CheckpointOption
from astuner.cli.run import BackboneOption, FileArgument, JsonOption, OverridesArgument, RunDirOption, in_run_dir

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def export(
    ctx: typer.Context,
    file: FileArgument,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The new folder.", show_default=False)],
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: CheckpointOption = "latest",
    run_dir: RunDirOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is in DIR.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the model of a checkpoint to a folder that transformers and vLLM load."""
    from astuner import export as exporting

    given = list(overrides or ())
    check_overrides(given)
    with only_data_on_stdout(as_json):
        result = exporting.export(
            file,
            given + in_run_dir(run_dir),
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
