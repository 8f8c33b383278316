"""The ``astuner`` command.

Invariant: ``astuner --help`` and ``astuner plugins`` import nothing heavy.  Every command is a line in `COMMANDS`, or a
provider of a plugin; its module is imported when the command is run, not when it is listed.
"""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from astuner.cli.common import PluginSwitches, load_plugins
from astuner.cli.spelling import normalise
from astuner.contracts.errors import AstunerError, ConfigError, Interrupted, PluginError, UnknownName

COMMANDS = {
    "run": "Train, or debug, as an experiment file says.",
    "eval": "Measure the success of a checkpoint on the validation tasks.",
    "config": "Show, check and explain experiment files.",
    "plugins": "List installed plugins and what they provide.",
    "new": "Write a new plugin or experiment that runs.",
    "doctor": "Check this machine and installation.",
    "kill": "End what your ASTuner runs started.",
}
"""The core's commands: each is ``astuner.cli.<name>:app``."""

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as shells report a program ended by Ctrl-C


class LazyGroup(TyperGroup):
    """Lists commands without importing them.

    click's own ``format_commands`` asks for every command object to print its help line, so it is replaced too.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in COMMANDS:
            return _command(f"astuner.cli.{cmd_name}:app", cmd_name)
        provided = self._provided(ctx)
        from astuner.plugins import registry

        if cmd_name not in provided and "/" not in cmd_name and registry.hint_for("command", cmd_name) is None:
            close = get_close_matches(cmd_name, [*COMMANDS, *provided], n=1)
            hint = f"did you mean {close[0]}?" if close else "see astuner --help"
            raise UnknownName(f"no command is called {cmd_name!r}; {hint}")
        manager = load_plugins(ctx)
        provider = registry.find(manager, "command", cmd_name)
        registry.check_installed("command", cmd_name, provider)
        return _command(provider.target, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))
        if provided := self._provided(ctx):
            with formatter.section("Commands from plugins"):
                formatter.write_dl(sorted(provided.items()))

    def _provided(self, ctx: Any) -> dict[str, str]:
        return {name: provider.summary for _, name, provider in load_plugins(ctx).offers("command")}


def _command(target: str, name: str) -> Any:
    module, _, attribute = target.partition(":")
    command = typer.main.get_command(getattr(import_module(module), attribute))
    command.name = name
    return command


def _print_version(wanted: bool) -> None:
    if wanted:
        from astuner import __version__

        typer.echo(f"astuner {__version__}")
        raise typer.Exit


app = typer.Typer(
    name="astuner", cls=LazyGroup, rich_markup_mode=None, pretty_exceptions_enable=False,
    no_args_is_help=True, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


@app.callback()
def root(
    ctx: typer.Context,
    plugin: Annotated[
        list[str] | None,
        typer.Option("-p", metavar="no:NAME", help="Turn a plugin off, by plugin or package name.", is_eager=True),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Tune the model inside an agent with reinforcement learning."""
    ctx.obj = PluginSwitches.of(ctx)


def _exit_code(error: AstunerError) -> int:
    if isinstance(error, Interrupted):
        return EXIT_INTERRUPTED
    return EXIT_USAGE if isinstance(error, (ConfigError, PluginError)) else EXIT_FAILED


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; raises `SystemExit` with 0, 1 (it failed), 2 (asked wrongly) or 130 (Ctrl-C)."""
    try:
        app(args=normalise(sys.argv[1:] if arguments is None else arguments), prog_name="astuner")
    except AstunerError as e:
        print(f"astuner: {e}", file=sys.stderr)
        sys.exit(_exit_code(e))
    except SystemExit as e:
        if e.code == EXIT_INTERRUPTED:  # click turns Ctrl-C into this, and says nothing
            print("astuner: interrupted", file=sys.stderr)
        raise
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output went away (`| head`); nothing is left to say
        sys.exit(EXIT_FAILED)
