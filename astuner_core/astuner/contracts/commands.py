"""Arguments, options and helpers shared by all commands, including commands of plugins.

A command that reads an experiment takes the same arguments as ``astuner run``::

    def measure(ctx: Context, file: FileArgument, overrides: OverridesArgument = None, as_json: JsonOption = False):
        with only_data_on_stdout(as_json):
            config = astuner.load_config(file, all_overrides(overrides), plugins=command_line(ctx).plugins)
        …
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from astuner.contracts.errors import ConfigError

if TYPE_CHECKING:
    from astuner.plugins.loader import PluginManager

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="Experiment file (YAML).", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Override keys, e.g. astuner.rollout.num_repeat=8.", show_default=False
    ),
]
BackboneOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Backbone to use, e.g. local. List them with `astuner plugins`.")
]
CheckpointOption = Annotated[
    str,
    typer.Option(
        metavar="best|latest|promoted|base|DIR",
        help="Checkpoint to use: best validation, newest, promoted, untrained model, or a directory.",
    ),
]
RunDirOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Directory of the run. Default: launcher_record/<name of FILE>.")
]
WithOption = Annotated[
    list[str] | None,
    typer.Option(
        "--with", metavar="NAME", help="Start a service or serve an environment during the command (repeatable)."
    ),
]
DebugTagsOption = Annotated[
    list[str] | None,
    typer.Option("--db", "--debug-tags", metavar="'TAG|TAG'", help='Stop at bp("TAG") in the agent\'s code.'),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout. Other output goes to stderr.")
]


def new_app(**options: Any) -> typer.Typer:
    """Return a `typer.Typer` with plain help texts, standard tracebacks and no shell completion."""
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, **options)


class CommandLine(Protocol):
    """State of the ``astuner`` command line, available to every command."""

    @property
    def plugins(self) -> PluginManager:
        """Enabled plugins, for `astuner.load_config`."""

    @property
    def disabled_plugins(self) -> tuple[str, ...]:
        """Names disabled by ``-p no:NAME``, for `astuner.run` and other functions that load a config themselves."""

    def check_services(self, names: Sequence[str]) -> None:
        """Check that each name passed to ``--with`` is available, before anything is loaded.

        :raises astuner.contracts.errors.UnknownName: A name is neither a service nor an environment.
        :raises astuner.contracts.errors.MissingDependency: A service or environment cannot be imported or served here.
        """


def command_line(ctx: typer.Context) -> CommandLine:
    """Return the command line that called a command, given the command's context.

    :raises RuntimeError: The command was not called by ``astuner``.
    """
    found: CommandLine | None = ctx.find_root().obj
    if found is None:
        raise RuntimeError(f"{ctx.command_path} is a command of `astuner`; run it as: astuner {ctx.command_path}")
    return found


def all_overrides(overrides: Sequence[str] | None, run_dir: Path | None = None) -> list[str]:
    """Return the values of `OverridesArgument` and `RunDirOption` as config overrides.

    :raises ConfigError: An override is not ``key=value``.
    """
    given = list(overrides or ())
    if wrong := [text for text in given if "=" not in text]:
        raise ConfigError(
            [f"command line: {text!r} is not KEY=VALUE, e.g. astuner.rollout.num_repeat=8" for text in wrong]
        )
    if run_dir is not None:
        full = run_dir.expanduser().absolute()
        # Quoted as YAML strings: a folder may be named 007.
        parent, name = (json.dumps(str(text), ensure_ascii=False) for text in (full.parent, full.name))
        given += [f"astuner.experiment_dir={parent}", f"astuner.experiment_name={name}"]
    return given


def asked(
    ctx: typer.Context,
    file: Path,
    overrides: Sequence[str] | None,
    run_dir: Path | None,
    services: Sequence[str] | None,
    **options: Any,
) -> dict[str, Any]:
    """Return keyword arguments for `astuner.run`, `astuner.serve` and `astuner.evaluate` from a command's parameters.

    Raises the errors of `CommandLine.check_services` and `all_overrides`.

    :param options: Further keyword arguments, passed through.
    """
    line, given = command_line(ctx), all_overrides(overrides, run_dir)
    line.check_services(beside := tuple(services or ()))
    told = {"path": file, "overrides": given, "services": beside, "disabled_plugins": line.disabled_plugins}
    return {**told, **options}


@contextmanager
def only_data_on_stdout(wanted: bool) -> Iterator[None]:
    """Redirect stdout to stderr if ``wanted`` (``--json``), so that stdout holds one JSON document.

    On exit, reopen stdout and stderr if the code in the block closed them.
    """
    try:
        with redirect_stdout(sys.stderr) if wanted else nullcontext():
            yield
    finally:
        for number, name in enumerate(("stdout", "stderr"), start=1):
            if getattr(sys, name).closed:
                setattr(sys, name, open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115


def write_json(data: Any) -> None:
    """Print a command's result as JSON, for `JsonOption`."""
    print(json.dumps(data, ensure_ascii=False, indent=2, default=str))
