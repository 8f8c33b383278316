"""``astuner kill``: end processes of this user's runs, by PID and start time, recorded or left behind."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer

from astuner import RecordedProcess, forget_process, is_same_process, recorded_processes
from astuner.contracts.commands import write_json
from astuner.contracts.errors import ConfigError
from astuner_debug.left_behind import left_behind

Outcome = Literal["ended", "killed", "gone", "not permitted"]


def kill(
    run_dir: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="End processes of this run folder (repeatable).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="End processes of all your runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the processes without ending them.")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Wait this many seconds before killing a process.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """End processes that your ASTuner runs started, and no others."""
    folders: Sequence[Path | None] = run_dir or [None]
    found = [p for folder in folders for p in (*recorded_processes(folder), *left_behind(folder))]
    rows: Sequence[tuple[RecordedProcess, str]]
    if which := bool(found) and not dry_run and not everything and not run_dir:
        rows = [(p, "running") for p in found]
    elif dry_run:
        rows = [(p, "would end") for p in found]
    else:
        rows = terminate(found, grace=grace)
    if as_json:
        write_json([{"pid": p.pid, "what": p.what, "run_dir": p.run_dir, "outcome": outcome} for p, outcome in rows])
    elif not rows:
        typer.echo("no process of your runs is running")
    for p, outcome in () if as_json else rows:
        typer.echo(f"{outcome:13}  {p.pid:8}  {p.what}  {p.run_dir}".rstrip())
    if which:
        raise ConfigError("select processes with: astuner kill --all, or: astuner kill --run-dir DIR")
    if any(outcome == "not permitted" for _, outcome in rows):
        raise typer.Exit(1)


def terminate(processes: Iterable[RecordedProcess], *, grace: float = 10.0) -> list[tuple[RecordedProcess, Outcome]]:
    """Send SIGTERM to each process, and SIGKILL to those still running after ``grace`` seconds.

    A process whose start time differs from the record is a different process: it is left alone and reported as
    ``gone``.
    """
    outcomes = {p.pid: (p, _signal(p, signal.SIGTERM) or "ended") for p in processes}
    waiting = [process for process, outcome in outcomes.values() if outcome == "ended"]
    deadline = time.monotonic() + grace
    while (waiting := [p for p in waiting if is_same_process(p.pid, p.started)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in waiting:
        if _signal(process, signal.SIGKILL) is None:
            outcomes[process.pid] = (process, "killed")
    for process, outcome in outcomes.values():
        if outcome != "not permitted":
            forget_process(process.pid)
    return list(outcomes.values())


def _signal(process: RecordedProcess, number: signal.Signals) -> Outcome | None:
    """Send a signal; return None if it was sent."""
    try:
        found = psutil.Process(process.pid)  # refuses to signal another process with the same PID
        if not is_same_process(process.pid, process.started):
            return "gone"
        found.send_signal(number)
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "not permitted"
    return None
