"""Command ``astuner export FILE --to FORM --out PATH``: export a trained model, or a run's episodes as data."""

from __future__ import annotations

from dataclasses import asdict
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
from astuner.contracts.errors import ConfigError, did_you_mean
from astuner_export.model import DTYPES, FORMS, Exported
from astuner_export.model import export as export_model
from astuner_record.episode_log.convert import Choice, Written, write_episodes
from astuner_record.episode_log.salvage import end_partly

DATA = ("parquet", "jsonl", "sft", "tokens", "dpo", "labels", "tasks")
"""Formats of episodes, written by `astuner_record.episode_log.convert`."""
ALL = (*FORMS, *DATA)


def export(
    ctx: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Experiment file; for episodes also a run folder.", show_default=False),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="|".join(ALL),
            help="Output format. hf: model folder for transformers and vLLM; gguf: file for llama.cpp and Ollama; "
            "others: episodes. A folder without --out means --to hf.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: CheckpointOption = "best",
    run_dir: RunDirOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="New folder or file.", show_default=False)
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Select episodes, e.g. 'reward>=0.5', agent=NAME, text~word (repeatable). sft, tokens and dpo add "
            "split=train unless a condition is on split.",
            show_default=False,
        ),
    ] = None,
    min_reward: Annotated[
        float | None,
        typer.Option(help="Minimum reward of episodes for sft and tokens. Default: successful episodes."),
    ] = None,
    min_gap: Annotated[float, typer.Option(help="Minimum reward difference of a pair for dpo.")] = 0.0,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), help="Data type of the weights. auto: unchanged.")
    ] = "auto",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Load the export and compare its logits with the trainer's model."),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing model or file.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Export a trained model for transformers, vLLM, llama.cpp or Ollama, or a run's episodes to a file.

    If the logits of an exported model differ from the trainer's, the export is removed and the exit code is 1. For a
    damaged log, intact episodes are exported, damaged parts are listed, and the exit code is 3.
    """
    line, given = command_line(ctx), all_overrides(overrides, run_dir)
    if to not in DATA:
        if where or min_reward is not None or min_gap:
            raise ConfigError(f"--where, --min-reward and --min-gap apply to --to {'|'.join(DATA)}, not to {to}.")
        form, place = _model_place(to, out)
        with only_data_on_stdout(as_json):
            model = export_model(
                file,
                given,
                to=place,
                form=form,
                dtype=dtype,
                check=check,
                checkpoint=checkpoint,
                force=force,
                backbone=backbone,
                disabled_plugins=line.disabled_plugins,
            )
        _show_model(model, form, as_json)
        return
    if dtype != "auto" or not check:
        raise ConfigError(f"--dtype and --no-check apply to --to {'|'.join(FORMS)}, not to {to}.")
    if out is None:
        raise ConfigError(f"--to {to} writes a file. Add --out FILE.")
    run = file if file.is_dir() else load_config(file, given, backbone=backbone, plugins=line.plugins).run_dir
    target = out.expanduser().resolve()
    choice = Choice(where=where or (), min_reward=min_reward, min_gap=min_gap)
    with only_data_on_stdout(as_json):
        written = write_episodes(run, to, target, choice, force=force, plugins=line.plugins)
    _show_episodes(run, target, written, as_json)
    end_partly(written.problems)


def _show_episodes(run: Path, target: Path, written: Written, as_json: bool) -> None:
    size = target.stat().st_size
    if as_json:
        summary = {**asdict(written), "lost": [one._asdict() for one in written.lost]}
        write_json({"run": str(run), "file": str(target), "bytes": size, **summary})
        return
    typer.echo(f"{written.rows:,} rows, {size / 2**20:,.1f} MiB: {target}")
    if written.chat_template:
        typer.echo(f"render the rows with the run's chat template, {written.chat_template}, not with the tokenizer's")
    if written.differing:
        typer.echo(
            f"{written.differing:,} rows do not render to the recorded text (column `difference`), first: "
            f"{written.first_difference}. Use --to tokens for the recorded IDs."
        )
    if written.other_tokens:
        typer.echo(
            f"{written.other_tokens:,} rows render to the recorded text, but tokenize differently than the model "
            "sampled (column `same_tokens`)"
        )


def _model_place(to: str, out: Path | None) -> tuple[str, Path]:
    """Return the format of a model export, and its target.

    :raises ConfigError: ``--to`` is not a known format, or ``--out`` is missing.
    """
    if to in FORMS:
        if out is None:
            raise ConfigError(f"--to {to} writes a model. Add --out {'FILE.gguf' if to == 'gguf' else 'DIR'}.")
        return to, out
    hint = did_you_mean(to.lower(), ALL)
    if out is not None or (hint and not Path(to).is_dir()):
        raise ConfigError(f"--to {to!r} is not a known format ({', '.join(ALL)}). For a folder, use ./{to}{hint}")
    return "hf", Path(to)


def _show_model(model: Exported, form: str, as_json: bool) -> None:
    source = "base" if model.checkpoint is None else str(model.checkpoint)
    if as_json:
        models = {policy: str(place) for policy, place in model.models.items()}
        parity = {policy: asdict(found) for policy, found in model.parity.items()}
        told = {"checkpoint": source, "form": form, "models": models, "dtypes": dict(model.dtypes)}
        write_json({**told, "bytes": model.bytes, "parity": parity})
        return
    places = sorted(set(model.models.values()))
    typer.echo(f"{source}: {model.bytes / 2**20:,.1f} MiB exported in {', '.join(sorted(set(model.dtypes.values())))}")
    for policy, found in model.parity.items():
        typer.echo(f"checked{f' ({policy})' if len(model.parity) > 1 else ''}: {found}")
    if not model.parity:
        typer.echo("not checked (--no-check)")
    typer.echo("load it with")
    for place in places:
        typer.echo(
            f"  llama-server --model {place}"
            if form == "gguf"
            else f'  AutoModelForCausalLM.from_pretrained("{place}")'
        )
    if form == "hf":
        typer.echo(f"or: vllm serve {places[0]}")
