"""The ``astuner`` command.

Invariant: ``astuner --help`` and ``astuner plugins`` import no heavy packages. Every command is an entry in `COMMANDS`
or a provider of a plugin. Its module is imported when the command runs, not when it is listed.

``-p no:NAME`` is accepted anywhere on the command line. The part ``older_spellings`` translates legacy command lines
(``astuner --conf X --with-ray``).
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from astuner.contracts.commands import new_app
from astuner.contracts.errors import AstunerError, ConfigError, Interrupted, PluginError, UnknownName
from astuner.contracts.hookspecs import is_hidden
from astuner.support.collector import collect_rarely
from astuner.support.limits import describe_limit

if TYPE_CHECKING:
    from astuner.contracts.hookspecs import Provider
    from astuner.plugins.loader import PluginManager

COMMANDS = {
    "run": "Train or debug the agent of an experiment file.",
    "plugins": "List installed plugins and what they provide.",
}
"""Commands of the core and their help lines; each is ``astuner.cli.<name>:<name>``."""

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # the code that shells report for Ctrl-C


class PluginSwitches:
    """The plugins that ``-p no:NAME`` leaves enabled; an `astuner.contracts.commands.CommandLine`.

    :raises ConfigError: A value of ``-p`` does not start with ``no:``.
    :raises UnknownName: No plugin or distribution has this name. Raised when the plugins are loaded.
    """

    def __init__(self, given: Sequence[str]) -> None:
        wrong = next((text for text in given if not text.startswith("no:") or text == "no:"), None)
        if wrong is not None:
            raise ConfigError(f"-p {wrong}: -p only disables plugins, as -p no:NAME. Install plugins with pip.")
        self._names = tuple(text.removeprefix("no:") for text in given)

    @classmethod
    def of(cls, ctx: Any) -> PluginSwitches:
        """Return the switches of a command line, given any of its `typer.Context` objects."""
        return cls(ctx.find_root().params.get("plugin") or ())

    @cached_property
    def plugins(self) -> PluginManager:
        from astuner.plugins import loader

        found = loader.load_plugins(self._names)
        found.check_disabled(self._names)
        return found

    @property
    def disabled_plugins(self) -> tuple[str, ...]:
        if self._names:
            _ = self.plugins  # checks the names
        return self._names

    def check_services(self, names: Sequence[str]) -> None:
        if names:
            from astuner.runs import services

            services.check(self.plugins, names)


class LazyGroup(TyperGroup):
    """Command group that lists commands without importing them.

    click's ``format_commands`` loads every command to print its help line, so this class replaces it.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            return _command(f"astuner.cli.{cmd_name}:{cmd_name}", cmd_name)
        return _command_of_plugin(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        if listed := _listed(_commands_of_plugins(ctx)):
            with formatter.section("Commands from plugins"):
                formatter.write_dl(sorted(listed.items()))


def _commands_of_plugins(ctx: Any) -> dict[str, Provider]:
    """Return the commands of enabled plugins: name -> provider."""
    return {name: provider for _, name, provider in PluginSwitches.of(ctx).plugins.offers("command")}


def _listed(commands: Mapping[str, Provider]) -> dict[str, str]:
    """Return the help lines of all commands that are not hidden."""
    return {name: provider.summary for name, provider in commands.items() if not is_hidden(provider)}


def _command_of_plugin(ctx: Any, name: str) -> Any:
    """Import a plugin's command.

    :raises PluginError: No enabled plugin provides it. The message names the package to install or a similar command.
    """
    from astuner.plugins import registry

    provided = _commands_of_plugins(ctx)
    if name not in provided and "/" not in name and registry.hint_for("command", name) is None:
        close = get_close_matches(name, [*COMMANDS, *_listed(provided)], n=1)
        raise UnknownName(
            f"unknown command {name!r}; {f'did you mean {close[0]}?' if close else 'list all commands: astuner --help'}"
        )
    provider = registry.find_provider(PluginSwitches.of(ctx).plugins, "command", name)
    registry.check_installed("command", name, provider)
    return _command(provider.target, name)


def _command(target: str, name: str) -> Any:
    """Import ``target``, a `typer.Typer` or a function, and return it as a command with this name."""
    from astuner.plugins import registry

    found = registry.import_target(target)
    if not isinstance(found, typer.Typer):
        function, found = found, new_app()
        found.command()(function)
    command = typer.main.get_command(found)
    command.name = name
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        from astuner import __version__

        typer.echo(f"astuner {__version__}")
        raise typer.Exit


app = new_app(
    name="astuner",
    cls=LazyGroup,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    ctx: typer.Context,
    plugin: Annotated[
        list[str] | None,
        typer.Option("-p", metavar="no:NAME", help="Disable a plugin, by plugin or package name.", is_eager=True),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train the model inside an agent with reinforcement learning."""
    ctx.obj = PluginSwitches.of(ctx)


def normalise(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with legacy spellings translated and ``-p`` moved to the front.

    :raises ConfigError: A legacy option was removed, or an option such as ``--backbone`` has no experiment file.
    """
    at = [i for i, (flag, name) in enumerate(pairwise(arguments)) if flag == "-p" and name.startswith("no:")]
    taken = [n for i in at for n in (i, i + 1)]
    switches, rest = [arguments[n] for n in taken], [text for n, text in enumerate(arguments) if n not in taken]
    if rest[:1] in (["--help"], ["--version"]):
        return switches + rest
    if any(text.startswith("--") for text in rest[:1]) or any(text.startswith("--with-") for text in rest):
        from astuner.plugins import registry

        if part := registry.find_optional_part(PluginSwitches(switches[1::2]).plugins, "older_spellings"):
            rest = part().command_line(rest)
    return switches + rest


def _replace_closed_streams() -> None:
    """Discard output if the caller closed stdout or stderr (``>&-``)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    :raises SystemExit: With 0 (success), 1 (failure), 2 (wrong usage or configuration) or 130 (Ctrl-C).
    """
    collect_rarely()
    _replace_closed_streams()
    if not faulthandler.is_enabled():
        with suppress(OSError):  # stderr is closed
            faulthandler.enable(2)  # for a crash in C, print the Python line that led to it
    try:
        app(args=normalise(sys.argv[1:] if arguments is None else arguments), prog_name="astuner")
    except AstunerError as e:
        print(f"astuner: {e}", file=sys.stderr)
        if isinstance(e, Interrupted):
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_USAGE if isinstance(e, (ConfigError, PluginError)) else EXIT_FAILED)
    except SystemExit as e:
        if e.code == EXIT_INTERRUPTED:  # click exits with this code on Ctrl-C, without a message
            print("astuner: interrupted", file=sys.stderr)
        raise
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone (`| head`), so there is nothing to report
        sys.exit(EXIT_FAILED)
    except Exception as e:
        if not (message := getattr(e, "ending", "") or describe_limit(e)):  # `ending` is set by a run
            raise
        print(f"astuner: {message}", file=sys.stderr)
        sys.exit(EXIT_FAILED)
