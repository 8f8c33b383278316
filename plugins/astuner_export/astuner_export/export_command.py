"""``astuner export FILE --to FORM --out PATH``: a trained model for others, or a run's episodes as data."""

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
"""Forms of episodes; `astuner_record.episode_log.convert` writes them."""
ALL = (*FORMS, *DATA)


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
            metavar="|".join(ALL),
            help="hf: the model as a folder for transformers and vLLM; gguf: as a file for llama.cpp and Ollama; the "
            "others: the episodes. A folder without --out is that of --to hf.",
            show_default=False,
        ),
    ],
    overrides: OverridesArgument = None,
    backbone: BackboneOption = None,
    checkpoint: CheckpointOption = "best",
    run_dir: RunDirOption = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="The new folder, or the new file.", show_default=False)
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
        float | None,
        typer.Option(help="Episodes for sft and tokens have this reward. Default: they succeeded."),
    ] = None,
    min_gap: Annotated[float, typer.Option(help="Rewards of a pair for dpo differ by this.")] = 0.0,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), help="Of the model's weights; auto: as they are.")
    ] = "auto",
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Load what was written, and compare its logits with the trainer's."),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace the model, or the file, that is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a trained model for transformers, vLLM, llama.cpp or Ollama, or a run's episodes to a file.

    Of a model that does not say what the trainer's says nothing is left, and the exit code is 1. Of a damaged log what
    is whole is written, with exit code 3, and what is not is named.
    """
    line, given = command_line(ctx), all_overrides(overrides, run_dir)
    if to not in DATA:
        if where or min_reward is not None or min_gap:
            raise ConfigError(f"--where, --min-reward and --min-gap are for episodes: --to {'|'.join(DATA)}, not {to}")
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
        raise ConfigError(f"--dtype and --no-check are for models: --to {'|'.join(FORMS)}, not {to}")
    if out is None:
        raise ConfigError(f"--to {to} writes episodes to a file: add --out FILE")
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
        typer.echo(f"render them with the run's chat template, {written.chat_template}, and not with the tokenizer's")
    if written.differing:
        typer.echo(
            f"{written.differing:,} rows do not render to the recorded text (column `difference`); the first: "
            f"{written.first_difference}. --to tokens writes the recorded ids"
        )
    if written.other_tokens:
        typer.echo(
            f"{written.other_tokens:,} rows render to the recorded text, but a tokenizer splits it into other tokens "
            "than the model sampled (column `same_tokens`)"
        )


def _model_place(to: str, out: Path | None) -> tuple[str, Path]:
    """Which form a model is to have, and where.

    :raises ConfigError: ``--to`` names no form, or ``--out`` is missing.
    """
    if to in FORMS:
        if out is None:
            raise ConfigError(f"--to {to} writes a model: add --out {'FILE.gguf' if to == 'gguf' else 'DIR'}")
        return to, out
    hint = did_you_mean(to.lower(), ALL)
    if out is not None or (hint and not Path(to).is_dir()):
        raise ConfigError(f"--to: there is no form {to!r} ({', '.join(ALL)}; a folder of that name: ./{to}){hint}")
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
