"""The body of ``astuner data generate``: plan or make the tasks of an experiment, and say how it goes.

Invariant: stdout has the result alone (text, or one JSON document); progress goes to stderr.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from astuner_flywheel.generation.standing import Standing

_EVERY = 5.0


def generate(
    ctx: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="The experiment, with a section data_generation.", show_default=False),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Override keys, e.g. astuner.seed=1.", show_default=False
        ),
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many tasks; short for data_generation.tasks=N.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where they are kept. Default: generated/<name of CONFIG>.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start over; what is there is kept in a folder earlier-… in it.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what a start would do, ask and cost; ask nobody.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON; everything else goes to stderr.")
    ] = False,
) -> None:
    """Make new tasks from documents (PDF, DOCX, HTML, Markdown, text) or from a few samples.

    CONFIG names them, and the helper model that writes and checks the tasks, in astuner.task_reader.data_generation.
    Stopped for whatever reason, the same command goes on where it was and asks nothing twice. The result is
    train.jsonl, validation.jsonl and report.json in the folder; `type: data_generation` trains on it.
    """
    from astuner.contracts.errors import ConfigError
    from astuner_flywheel.generation.entry import WHERE, Generation
    from astuner_flywheel.generation.result import summary
    from astuner_flywheel.settings_of import settings_of

    given = list(overrides or ())
    if wrong := [text for text in given if "=" not in text]:
        raise ConfigError([f"command line: {text!r} is not key=value, e.g. astuner.seed=1" for text in wrong])
    if tasks is not None:
        given.append(f"{WHERE}.tasks={tasks}")
    if folder is not None:
        given.append(f"{WHERE}.folder={json.dumps(str(folder.expanduser().absolute()), ensure_ascii=False)}")
    off = tuple(str(name).removeprefix("no:") for name in ctx.find_root().params.get("plugin") or ())
    live = _Live()
    again = shlex.join(["astuner", "data", "generate", str(file), *given])
    config = settings_of(file, given, off)
    generation = Generation(config, say=live.say, progress=live.progress, tell=live.tell, again=again)
    try:
        if dry_run:
            plan = generation.plan(fresh=fresh)
            live.end()
            _print(plan.as_json() if as_json else str(plan), as_json)
            return
        report = generation.run(fresh=fresh)
    finally:
        live.end()
    if as_json:
        _print({**report, "folder": str(generation.folder.path)}, True)
    else:
        _print(summary(report, generation.folder), False)


def _print(what: Any, as_json: bool) -> None:
    print(json.dumps(what, ensure_ascii=False, indent=2) if as_json else what)


class _Live:
    """One line that is written over on a terminal; a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last = 0.0
        self._open = False

    def say(self, text: str) -> None:
        self._write(text, 0.2 if self._terminal else _EVERY)

    def progress(self, standing: Standing) -> None:
        from astuner_flywheel.generation.result import progress_line

        self._write(progress_line(standing), 0.2 if self._terminal else _EVERY)

    def tell(self, text: str) -> None:
        """What has to stay."""
        self.end()
        sys.stderr.write(f"{_printable(text)}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the last line standing."""
        if self._open:
            sys.stderr.write("\n")
            self._open = False

    def _write(self, text: str, every: float) -> None:
        if time.monotonic() - self._last < every:
            return
        self._last = time.monotonic()
        text = _printable(text)
        if self._terminal:
            sys.stderr.write(f"\r\x1b[2K{text[:200]}")
            self._open = True
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _printable(text: str) -> str:
    """A file's name may have anything in it, and so may what a model said."""
    return "".join(char if char.isprintable() else "?" for char in text)
