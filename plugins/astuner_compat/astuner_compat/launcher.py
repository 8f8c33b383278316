"""What the first documents type: ``launcher.py``, ``killer`` and ``beast_logger_go``, each by commands of today."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from astuner import load_config
from astuner.cli import main
from astuner.contracts.commands import new_app
from astuner.contracts.errors import ConfigError
from astuner.contracts.events import Event, RunContext, RunStarted, Subscriber
from astuner_compat.spellings import OLDER_COMMANDS, conf_first, note

_RECORD = Path("launcher_record")
"""Where the runs of a folder are, unless their experiments say otherwise."""
_VIEWER_PORT = 8181

app = new_app()


@app.command(context_settings={"ignore_unknown_options": True})
def launcher(
    ctx: typer.Context,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[--kill=NAMES] [--with-NAME]... [--conf FILE] [OPTIONS OF RUN]", show_default=False),
    ] = None,
) -> None:
    """End what earlier runs left, start an environment service, or run an experiment, as launcher.py did.

    --kill=NAMES ends what your own earlier runs of FILE started (without a FILE, of all below launcher_record), and
    nothing else, whatever the names. --with-NAME without a FILE serves that environment until Ctrl-C.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--kill", nargs="?")
    found, rest = parser.parse_known_args(arguments or [])
    conf = "--conf" in {word.partition("=")[0] for word in rest}
    run = conf_first(rest) if conf else []
    served = [] if conf else [word.removeprefix("--with-") for word in rest]
    if any(name.startswith("-") for name in served):
        raise ConfigError(f"{' '.join(rest)}: name the experiment file too: --conf FILE, or: astuner run FILE")
    if found.kill is not None:
        end_earlier_runs(found.kill, run)
    switches = [word for name in ctx.find_root().params["plugin"] or () for word in ("-p", name)]
    if run:
        main([*switches, "run", *run])
    elif served:
        note(f"launcher.py {' '.join(rest)} is: astuner env serve {' '.join(served)}")
        main([*switches, "env", "serve", *served])
    elif found.kill is None:
        raise ConfigError("launcher.py needs --conf FILE, --with-ENVIRONMENT or --kill=NAMES; today: astuner --help")


def end_earlier_runs(names: str, run: Sequence[str] = ()) -> None:
    """End what this user's earlier runs started.

    :param names: what the first documents looked for among everybody's processes; it is told, and decides nothing.
    :param run: the words behind ``astuner run``: only runs of that experiment; without, those below `_RECORD`.
    """
    if run:
        own = load_config(run[0], [word for word in run[1:] if "=" in word and not word.startswith("-")]).run_dir
        folders = [own, *own.parent.glob(f"{own.name}.*")]  # a backbone that only tries has a folder beside it
    else:
        own, folders = _RECORD, [path for path in _RECORD.glob("*") if path.is_dir()]
    note(f"of what is called {names}, only what your runs in {own} started is ended: astuner kill --run-dir DIR")
    for folder in folders:
        _succeed(["kill", "--run-dir", str(folder)])


def killer() -> None:
    """``killer NAME``."""
    end_earlier_runs(" ".join(sys.argv[1:]))


def beast_logger_go() -> None:
    """``beast_logger_go``: the viewer, where it was."""
    note("beast_logger_go is: astuner view")
    main(["view", "--port", str(_VIEWER_PORT), *sys.argv[1:]])


def _succeed(arguments: Sequence[str]) -> None:
    """Run a command whose success is not the end."""
    try:
        main(list(arguments))
    except SystemExit as e:
        if e.code:
            raise


class DatedName(Subscriber):
    """``RUN/2025_11_10_02_52/rollout``: the episodes of a run that launcher.py started, by the name that they had."""

    @classmethod
    def for_run(cls, context: RunContext) -> Sequence[Subscriber]:
        return [cls(context)] if OLDER_COMMANDS else []

    def wants(self, event: Event) -> bool:
        return isinstance(event, RunStarted)

    def handle(self, event: Event) -> None:
        assert isinstance(event, RunStarted)
        dated = event.run_dir / time.strftime("%Y_%m_%d_%H_%M") / "rollout"
        dated.parent.mkdir(exist_ok=True)
        if not dated.is_symlink():
            dated.symlink_to(Path("..", "episodes"), target_is_directory=True)
