"""Legacy commands of the first documents: ``killer`` (and ``--kill``) and ``beast_logger_go``.

Each runs current commands and prints them. The module also provides the older path of a run's episodes.
"""

from __future__ import annotations

import re
import runpy
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from astuner import load_config
from astuner.contracts.commands import all_overrides, new_app
from astuner.contracts.events import Event, RunContext, RunStarted, Subscriber
from astuner_compat.spellings import Spellings, note

_RECORD = Path("launcher_record")
"""Default folder of runs."""
_OURS = {"python", "ray", "vllm", "env_service", "appworld", "logview"}
"""Process names that the first documents use for processes of a run."""

app = new_app()


@app.command(context_settings={"ignore_unknown_options": True})
def killer(
    ctx: typer.Context,
    names: Annotated[str, typer.Argument(metavar="NAME[|NAME]...", help="Accepted and ignored.", show_default=False)],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[COMMAND]...", help="Command to run afterwards, e.g. --conf FILE.", show_default=False),
    ] = None,
) -> None:
    """End processes that your own earlier runs started, and no others, independent of NAME.

    This covers the runs of the experiment in COMMAND, or all runs below launcher_record. COMMAND runs afterwards.
    """
    root, words = ctx.find_root(), list(command or ())
    wanted = re.split(r"[|,\s]+", names)
    for name in wanted:
        if name.lower() not in _OURS:
            note(f"{name!r} is ignored: ASTuner starts no processes with that name")
    folders = _folders(words) if any(name.lower() in _OURS for name in wanted) else []
    if folders:
        kill = ["kill", *(word for folder in folders for word in ("--run-dir", str(folder)))]
        of = f"{len(folders)} run folders below {_RECORD}" if len(folders) > 2 else " and ".join(map(str, folders))
        note(f"killer {names} ends only processes that your own runs started ({of}). Use: astuner kill --run-dir DIR")
        _then(root, kill)
    if words:
        _then(root, words)


def _folders(words: Sequence[str]) -> list[Path]:
    """Return the run folders of a command line."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--conf", type=Path)
    parser.add_argument("--run-dir", type=Path)
    given, rest = parser.parse_known_args(words)
    if given.conf is None:
        return sorted(path for path in _RECORD.glob("*") if path.is_dir())
    overrides = [word for word in rest if "=" in word and not word.startswith("-")]
    run = load_config(Spellings.file_now(given.conf), all_overrides(overrides, given.run_dir)).run_dir
    return [run, run.with_name(f"{run.name}.debug")]


def _then(root: Any, words: Sequence[str]) -> None:
    """Run ``astuner WORDS`` and exit on failure."""
    switches = [word for name in root.params.get("plugin") or () for word in ("-p", name)]
    if code := root.command.main([*switches, *Spellings().command_line(words)], "astuner", standalone_mode=False):
        raise typer.Exit(code)


def killer_script() -> None:
    """Run ``killer NAME``."""
    _astuner("killer")


def beast_logger_go() -> None:
    """Run ``beast_logger_go [FOLDER]``: open the viewer for all runs below a folder, or for the run it belongs to."""
    given = [Path(word).absolute() for word in sys.argv[1:2] if not word.startswith("-")]
    run = next(
        (folder for path in given for folder in (path, *path.parents) if (folder / "resolved.yaml").exists()), None
    )
    words = [str(run)] if run else ["--root", str(given[0])] if given else []
    note(" ".join(["the current command is: astuner view", *words]))
    del sys.argv[1 : 1 + len(given)]
    _astuner("view", *words)


def _astuner(*words: str) -> None:
    sys.argv[1:1] = words
    runpy.run_module("astuner", run_name="__main__")


class DatedName(Subscriber):
    """Create ``RUN/2025_11_10_02_52/rollout``, the older path of a run's episodes.

    It is created only for runs started with ``--conf``, as in the first documents.
    """

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        return [cls(context)] if any(word.partition("=")[0] == "--conf" for word in sys.argv) else []

    def wants(self, event: Event) -> bool:
        return isinstance(event, RunStarted)

    def handle(self, event: Event) -> None:
        assert isinstance(event, RunStarted)
        dated = event.run_dir / time.strftime("%Y_%m_%d_%H_%M") / "rollout"
        dated.parent.mkdir(exist_ok=True)
        if not dated.is_symlink():
            dated.symlink_to(Path("..", "episodes"), target_is_directory=True)
