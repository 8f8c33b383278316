"""``astuner kill``: end what this user's runs started, by recorded pid and start time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from astuner.contracts.commands import write_json
from astuner.contracts.errors import ConfigError
from astuner.support import processes


def kill(
    run_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="What belongs to this run folder.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="What belongs to any of your runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list it.")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to end in good order before being killed.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """End what your ASTuner runs started, and only that."""
    found = processes.registered(run_dir)
    rows: Sequence[tuple[processes.Process, str]]
    if which := bool(found) and not dry_run and not everything and run_dir is None:
        rows = [(p, "running") for p in found]
    elif dry_run:
        rows = [(p, "would end") for p in found]
    else:
        rows = processes.terminate(found, grace=grace)
    if as_json:
        write_json([{"pid": p.pid, "what": p.what, "run_dir": p.run_dir, "outcome": outcome} for p, outcome in rows])
    elif not rows:
        typer.echo("nothing of yours is running")
    for p, outcome in () if as_json else rows:
        typer.echo(f"{outcome:13}  {p.pid:8}  {p.what}  {p.run_dir}".rstrip())
    if which:
        raise ConfigError("which of them? type: astuner kill --all, or: astuner kill --run-dir DIR")
    if any(outcome == "not permitted" for _, outcome in rows):
        raise typer.Exit(1)
