"""Makes a log forget what came after a step, so that a run that is resumed from there writes it anew.

A file with something to forget, or with a torn end, is written again without it under another name, byte by byte, and
then takes the old one's place.  So a crash in between leaves whole files, of which some are rewound already; doing it
again does the rest; and whoever has the old one mapped into memory keeps it, which cutting it short would not allow.
What was only cut keeps its id: all that anybody knows of its beginning is still true.
"""

from __future__ import annotations

import os
from pathlib import Path

from astuner_record.episode_log.journal import SUFFIX, recover
from astuner_record.episode_log.schema import files, identified
from astuner_record.episode_log.stream import END, Place, StreamFile, TornHeader


def rewind(folder: Path, step: int) -> tuple[str, ...]:
    """Forget what the log in ``folder`` says of steps after ``step``; nobody may be writing it.

    :returns: what of a killed process could not be taken over, a sentence each.
    :raises MissingDependency: there is a log, and pyarrow is not installed.
    :raises DataError: a file is damaged before its end.
    """
    problems = recover(folder, alone=True)
    for left_behind in (*folder.glob(".*.arrows.tmp"), *folder.glob(f".*{SUFFIX}.tmp")):
        left_behind.unlink()
    for path in files(folder):
        try:
            file = StreamFile(path)
        except TornHeader:
            path.unlink()
            continue
        try:
            _rewind(file, step)
        finally:
            file.close()
    return problems


def _rewind(file: StreamFile, step: int) -> None:
    kept: list[Place] = []
    forgotten = False
    was_cut = True
    for place, of in file.steps():
        if of <= step:
            kept.append(place)
            was_cut = was_cut and not forgotten
        else:
            forgotten = True
    if not forgotten and not file.is_torn:
        return
    if not kept:
        file.path.unlink()
        return
    temporary = file.path.with_name(f".{file.path.name}.tmp")
    with temporary.open("wb") as out:
        out.write(file.header(file.schema if was_cut else identified(file.schema, file.kind)))
        for place in kept:
            out.write(file.raw(place))
        out.write(END)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(file.path)
