"""``astuner doctor RUN``: check which parts of a run folder are intact and whether the run can resume. Reads only."""

from __future__ import annotations

import json
import os
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from astuner import LockTaken, RunDir, check_unlocked, find_backbone, load_config, read_jsonl
from astuner.contracts.diagnosis import Finding, fail, ok, warn
from astuner.contracts.errors import AstunerError

_WHOLE = "size and checksum of every file match"


def of_run(path: Path) -> Iterator[Finding]:
    """Yield findings about a run folder: its files first, then how to continue the run."""
    folder = RunDir(path)
    if not folder.path.is_dir():
        yield fail(what="run folder", detail=f"{folder.path} is not a folder", fix="ls -d launcher_record/*")
        return
    try:
        check_unlocked(folder.path.with_name(f".{folder.path.name}.lock"))
    except LockTaken as e:
        yield warn(what="run folder", detail=f"a run (pid {e.pid}) is writing to it; results may change")
    yield from _lines(folder)
    yield from _documents(folder)
    for database in sorted(folder.episodes.glob("*.sqlite")):
        yield _database(database)
    yield from _states(folder)


def _lines(folder: RunDir) -> Iterator[Finding]:
    for file in (folder.metrics, folder.failures, folder.alarms):
        if file.is_file():
            try:
                rows = len(read_jsonl(file))
                yield ok(what=file.name, detail=f"{rows} rows")
            except (AstunerError, OSError, RecursionError) as e:
                yield fail(what=file.name, detail=f"--resume would fail on this file: {e}")


def _documents(folder: RunDir) -> Iterator[Finding]:
    for file in (folder.origin, folder.certificate, folder.summary):
        if file.is_file():
            try:
                json.loads(file.read_text(encoding="utf-8"))
                yield ok(what=file.name, detail="readable")
            except (OSError, ValueError, RecursionError) as e:
                yield warn(what=file.name, detail=f"not readable: {e}", fix=f"mv {file} {file}.damaged")


def _database(file: Path) -> Finding:
    try:
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as database:
            (said,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as e:
        said = str(e)
    if said == "ok":
        return ok(what=f"episodes/{file.name}", detail="the database is intact")
    return fail(
        what=f"episodes/{file.name}",
        detail=f"the episode log is damaged: {' '.join(said.split())}",
        fix=f"sqlite3 {file} .recover | sqlite3 {file}.recovered",
    )


def _states(folder: RunDir) -> Iterator[Finding]:
    """Yield the saved states and how to continue: from the first intact one, even if newer ones are damaged."""
    again = _command(folder) or "astuner run FILE"
    try:
        config = load_config(folder.resolved)
        backbone, _ = find_backbone(config)
        states = list(backbone.saved_states(folder))
    except (AstunerError, OSError) as e:
        yield fail(what="resolved.yaml", detail=f"does not match the saved states: {e}", fix=f"{again} --resume")
        return
    whole = [state for state, why in states if not why]
    damaged = warn if whole else fail
    for state, why in states:
        name = str(state.relative_to(folder.path))
        yield damaged(what=name, detail=f"cannot be used: {why}") if why else ok(what=name, detail=_WHOLE)
    known = [state for state, _ in states]
    models = [model for model in folder.models if model not in known]
    for model in models:
        yield ok(what=str(model.relative_to(folder.path)), detail="model written without checksums")
    if whole:
        yield ok(what="resume", detail=f"from {whole[0].relative_to(folder.path)}", fix=f"{again} --resume")
    elif models:
        new = f"astuner run FILE astuner.experiment_name=NAME astuner.model.path={shlex.quote(str(models[-1]))}"
        yield fail(
            what="resume", detail="no state is intact, but you can train from the weights of a checkpoint", fix=new
        )
    else:
        nothing = "no state is intact" if states else "no state was saved yet"
        yield fail(what="resume", detail=f"{nothing}; start over", fix=f"{again} --no-resume")


def _command(folder: RunDir) -> str:
    """Return the command that started the run, to be typed in the current folder; empty if unknown."""
    if not folder.origin.is_file():
        return ""
    try:
        start = json.loads(folder.origin.read_text(encoding="utf-8"))["starts"][-1]
        command, typed_in = str(start["command"]), str(start.get("folder") or os.getcwd())
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return command if typed_in == os.getcwd() else f"cd {shlex.quote(typed_in)} && {command}"
