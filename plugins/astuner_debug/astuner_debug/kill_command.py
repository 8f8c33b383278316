"""``astuner kill``: end what this user's runs started, by pid and start time, as recorded or as found to be left."""

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
        list[Path] | None, typer.Option(metavar="DIR", help="What belongs to this run folder (repeatable).")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="What belongs to any of your runs.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list it.")] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds to end in good order before being killed.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """End what your ASTuner runs started, and only that."""
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
        typer.echo("nothing of yours is running")
    for p, outcome in () if as_json else rows:
        typer.echo(f"{outcome:13}  {p.pid:8}  {p.what}  {p.run_dir}".rstrip())
    if which:
        raise ConfigError("which of them? type: astuner kill --all, or: astuner kill --run-dir DIR")
    if any(outcome == "not permitted" for _, outcome in rows):
        raise typer.Exit(1)


def terminate(processes: Iterable[RecordedProcess], *, grace: float = 10.0) -> list[tuple[RecordedProcess, Outcome]]:
    """Ask each to end (SIGTERM), and after ``grace`` seconds make it (SIGKILL).

    A process whose start time differs from the record is another one and is left alone (``gone``).
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
    """Send a signal; None when it was sent."""
    try:
        found = psutil.Process(process.pid)  # which refuses to signal another that has its number
        if not is_same_process(process.pid, process.started):
            return "gone"
        found.send_signal(number)
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "not permitted"
    return None
