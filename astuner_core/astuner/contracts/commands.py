"""What commands share: those of the core, of our packages, and of whoever registers one (``register_commands``).

A command that takes an experiment takes it as ``astuner run`` does::

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

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The experiment file.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Override keys, e.g. astuner.rollout.num_repeat=8.", show_default=False
    ),
]
BackboneOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="What runs it, e.g. local; `astuner plugins` lists them.")
]
CheckpointOption = Annotated[
    str,
    typer.Option(
        metavar="best|latest|promoted|base|DIR",
        help="The checkpoint that did best in its validation, the newest, what serves, the untrained one, or a folder.",
    ),
]
RunDirOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The run's folder. Default: launcher_record/<name of FILE>.")
]
WithOption = Annotated[
    list[str] | None,
    typer.Option("--with", metavar="NAME", help="Start a service, or serve an environment, beside it (repeatable)."),
]
DebugTagsOption = Annotated[
    list[str] | None,
    typer.Option("--db", "--debug-tags", metavar="'TAG|TAG'", help='Stop at bp("TAG") in the agent\'s code.'),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON; everything else goes to stderr.")]


def new_app(**options: Any) -> typer.Typer:
    """A `typer.Typer` as all of ours are: plain help texts, Python's own tracebacks, no completion to install."""
    return typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False, **options)


class CommandLine(Protocol):
    """What ``astuner`` knows when it calls a command."""

    @property
    def plugins(self) -> PluginManager:
        """Those that are on; for `astuner.load_config`."""

    @property
    def disabled_plugins(self) -> tuple[str, ...]:
        """The names that ``-p no:NAME`` turns off; for `astuner.run` and others that load a config themselves."""

    def check_services(self, names: Sequence[str]) -> None:
        """Whether what ``--with`` names is there, before anything is loaded.

        :raises astuner.contracts.errors.UnknownName: it is neither a service nor an environment.
        :raises astuner.contracts.errors.MissingDependency: it cannot be imported, or served, here.
        """


def command_line(ctx: typer.Context) -> CommandLine:
    """What stands before and around a command, given the command's own context.

    :raises RuntimeError: ``astuner`` has not called it: it is run as a program of its own.
    """
    found: CommandLine | None = ctx.find_root().obj
    if found is None:
        raise RuntimeError(f"{ctx.command_path} is a command of `astuner`, which knows the plugins: type it after that")
    return found


def all_overrides(overrides: Sequence[str] | None, run_dir: Path | None = None) -> list[str]:
    """What `OverridesArgument` and `RunDirOption` say, as overrides of a config.

    :raises ConfigError: one is not ``key=value``.
    """
    given = list(overrides or ())
    if wrong := [text for text in given if "=" not in text]:
        raise ConfigError(
            [f"command line: {text!r} is not key=value, e.g. astuner.rollout.num_repeat=8" for text in wrong]
        )
    if run_dir is not None:
        full = run_dir.expanduser().absolute()
        # In quotes, as YAML has them: a folder may be called 007.
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
    """What `astuner.run`, `astuner.serve` and `astuner.evaluate` take of a command's parameters; raises as
    `CommandLine.check_services` and `all_overrides`.

    :param options: more of their keywords.
    """
    line, given = command_line(ctx), all_overrides(overrides, run_dir)
    line.check_services(beside := tuple(services or ()))
    told = {"path": file, "overrides": given, "services": beside, "disabled_plugins": line.disabled_plugins}
    return {**told, **options}


@contextmanager
def only_data_on_stdout(wanted: bool) -> Iterator[None]:
    """With ``--json``, what a run prints goes to stderr, so stdout is one JSON document. What it closes is reopened."""
    try:
        with redirect_stdout(sys.stderr) if wanted else nullcontext():
            yield
    finally:
        for number, name in enumerate(("stdout", "stderr"), start=1):
            if getattr(sys, name).closed:
                setattr(sys, name, open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115


def write_json(data: Any) -> None:
    """Print a command's result, for `JsonOption`."""
    print(json.dumps(data, ensure_ascii=False, indent=2, default=str))
