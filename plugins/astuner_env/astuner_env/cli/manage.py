"""``astuner env list``, ``setup`` and ``doctor``: what there is, and whether it can run here."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner_env.cli.common import JsonOption, NameArgument, find, offered, pairs, say, write_json

if TYPE_CHECKING:
    from astuner_env.doctor import Diagnosis


def list_environments(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List environments, and whether each is ready."""
    from astuner_env.doctor import missing_for

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": provider.summary,
            "plugin": plugin,
            "ready": not (missing := missing_for(name, provider)),
            "missing": missing,
            "splits": list(provider.splits),
        }
        for name, plugin, provider in offered(ctx)
    ]
    if as_json:
        write_json(rows)
        return
    if not rows:
        typer.echo("no plugin brings an environment; write one with: astuner new plugin NAME --environment")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        state = "ready" if row["ready"] else f"type: {row['missing']}"
        typer.echo(f"{row['name']:{width}}  {row['summary']}")
        typer.echo(f"{'':{width}}  {state}  ·  splits: {', '.join(row['splits'])}  ·  plugin: {row['plugin']}")


def setup(
    ctx: typer.Context,
    name: NameArgument,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the environment.", show_default=False),
    ] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Make its interpreter from this Python. Default: one that fits.")
    ] = None,
    show_options: Annotated[bool, typer.Option("--options", help="List the options of NAME, and stop.")] = False,
) -> None:
    """Install what an environment needs; harmless to do again."""
    from astuner_env.setup import options_of, set_up

    bare, provider = find(ctx, name)
    if show_options:
        for key, text in options_of(bare, provider).items():
            typer.echo(f"{key}=…  {text}")
        return
    given = pairs("", options or ())
    kept = set_up(bare, provider, given, python=python, say=say)
    where = f" on {kept.python}" if kept.python else ""
    typer.echo(f"{bare} is ready{where}; play it with: astuner env try {bare}")


def doctor(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this environment.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what environments lack here, and what to type.

    Exits with 1 when NAME lacks something; without NAME, when one that was set up does.
    """
    from astuner_env.doctor import diagnose, machine

    if name is None:
        found = [diagnose(bare, provider) for bare, _, provider in offered(ctx)]
    else:
        found = [replace(diagnose(*find(ctx, name)), wanted=True)]
    found.append(machine())
    if as_json:
        write_json([_as_data(d) for d in found])
    else:
        for diagnosis in found:
            _show(diagnosis)
    if any(d.wanted and not d.is_ready for d in found):
        raise typer.Exit(1)


def _as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "name": diagnosis.name,
        "ready": diagnosis.is_ready,
        "wanted": diagnosis.wanted,
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }


def _show(diagnosis: Diagnosis) -> None:
    typer.echo(diagnosis.name)
    for finding in diagnosis.findings:
        level = "ok" if finding.ok else "fail" if diagnosis.wanted else "-"
        typer.echo(f"  {level:4}  {finding.what}")
        if finding.hint:
            typer.echo(f"  {'':4}  type: {finding.hint}")
