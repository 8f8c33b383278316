"""Implement ``astuner env``: install, diagnose, serve and try environments.

Invariant: ``list`` and ``--help`` import neither an environment nor the server.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.commands import new_app, write_json
from astuner.contracts.errors import ConfigError, EnvironmentFailed, RunError
from astuner.contracts.hookspecs import EnvironmentProvider
from astuner.contracts.interrupt import handled
from astuner.contracts.service import variables_set
from astuner_env.manager.capacity import IDLE_TTL

if TYPE_CHECKING:
    from astuner_env.env_service import EnvClient
    from astuner_env.manager.served import ServedEnvironment

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the environment.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NUDGE_EVERY = 0.1
"""Seconds between alarms that interrupt a blocking read."""
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

app = new_app(no_args_is_help=True, help="Install, diagnose, serve and try environments.")


@app.callback()
def _line(ctx: typer.Context) -> None:
    """Apply ``-p no:NAME`` to plugin lookups in this process and its child processes."""
    from astuner import DISABLE_PLUGINS

    off = [text.removeprefix("no:") for text in ctx.find_root().params.get("plugin") or ()]
    named = ",".join(filter(None, (os.environ.get(DISABLE_PLUGINS), *off)))
    ctx.with_resource(variables_set({DISABLE_PLUGINS: named}))


@app.command("list")
def list_environments(as_json: JsonOption = False) -> None:
    """List environments and whether each one is ready."""
    from astuner_env.setup import missing_for

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": provider.summary,
            "plugin": plugin,
            "ready": not (missing := missing_for(name, provider)),
            "missing": missing,
            "splits": list(provider.splits),
        }
        for name, plugin, provider in offered()
    ]
    if as_json:
        write_json(rows)
        return
    if not rows:
        typer.echo("No installed plugin provides an environment. Create one: astuner new plugin NAME --environment")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        state = "ready" if row["ready"] else f"not ready, run: {row['missing']}"
        typer.echo(f"{row['name']:{width}}  {row['summary']}")
        typer.echo(f"{'':{width}}  {state}  ·  splits: {', '.join(row['splits'])}  ·  plugin: {row['plugin']}")


@app.command()
def setup(
    name: NameArgument,
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Options of the environment (see --options).", show_default=False
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Python to create its virtual environment from. Default: find one."),
    ] = None,
    show_options: Annotated[bool, typer.Option("--options", help="List the options of NAME and exit.")] = False,
) -> None:
    """Install the packages and data of an environment; safe to repeat."""
    from astuner_env.setup import options_of, set_up

    bare, provider = find(name)
    if show_options:
        for key, text in options_of(bare, provider).items():
            typer.echo(f"{key}=…  {text}")
        return
    given = pairs("", options or ())
    kept = set_up(bare, provider, given, python=python, say=partial(typer.echo, err=True))
    where = f" on {kept.python}" if kept.python else ""
    typer.echo(f"{bare} is ready{where}. Try it: astuner env try {bare}")


@app.command()
def doctor(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Environment to check. Default: all.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check what environments need on this machine and how to install it.

    Exits with 1 if NAME is not ready. Without NAME, exits with 1 if an environment that was set up is not ready.
    """
    from astuner_env.setup import diagnose, machine

    if name is None:
        found = [diagnose(bare, provider) for bare, _, provider in offered()]
    else:
        found = [replace(diagnose(*find(name)), wanted=True)]
    found.append(machine())
    if as_json:
        write_json([{**asdict(d), "ready": d.is_ready} for d in found])
    else:
        for diagnosis in found:
            typer.echo(diagnosis.name)
            for finding in diagnosis.findings:
                level = "ok" if finding.ok else "fail" if diagnosis.wanted else "-"
                typer.echo(f"  {level:4}  {finding.what}")
                if finding.hint:
                    typer.echo(f"  {'':4}  run: {finding.hint}")
    if any(d.wanted and not d.is_ready for d in found):
        raise typer.Exit(1)


@app.command()
def serve(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Environments to serve. Default: all that are ready.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.")] = 8080,
    max_instances: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of instances. Default: from memory and cores.")
    ] = None,
    idle_ttl: Annotated[float, typer.Option(metavar="SECONDS", help="End instances after this idle time.")] = IDLE_TTL,
    log_json: Annotated[bool, typer.Option("--log-json", help="Write the log as one JSON object per line.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log every request and send tracebacks to clients.")] = False,
    max_memory_mb: Annotated[
        int | None,
        typer.Option(
            min=64, metavar="MB", help="End instances that use more memory. Overrides the environment's limit."
        ),
    ] = None,
    max_processes: Annotated[
        int | None, typer.Option(min=1, help="End instances with more processes. Overrides the environment's limit.")
    ] = None,
    token_from_stdin: Annotated[
        bool, typer.Option("--token-from-stdin", help="Read the token from the first line of standard input.")
    ] = False,
    stop_with_stdin: Annotated[
        bool,
        typer.Option("--stop-with-stdin", help="Stop when standard input closes, for example when the parent exits."),
    ] = False,
) -> None:
    """Serve environments over HTTP until Ctrl-C.

    Addresses other than loopback require a token in the variable ASTUNER_ENV_TOKEN.
    """
    import asyncio

    from astuner_env.env_service.server import TOKEN_VARIABLE, own_script
    from astuner_env.server import ServiceSettings
    from astuner_env.server import serve as run_until_stopped
    from astuner_sandbox.isolation.linux import hide

    for own in filter(None, map(own_script, names or ())):  # replaces this process, like `--with NAME`
        if len(names or ()) > 1:
            raise ConfigError(f"{' '.join(names or ())}: one of these is served by your own script. Serve it alone.")
        os.chdir(own.folder)
        os.execvpe("bash", ["bash", "-c", own.command], {**own.variables, **os.environ})
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token_from_stdin and not (token := sys.stdin.readline().strip()):
        raise ConfigError("--token-from-stdin: standard input is empty. Write the token to its first line.")
    hide()
    settings = ServiceSettings(
        host=host,
        port=port,
        token=token,
        max_instances=max_instances,
        idle_ttl=idle_ttl,
        debug=debug,
    )
    served = [it.limited(max_memory_mb, max_processes) for it in _served(names or ())]
    asyncio.run(run_until_stopped(served, settings, log_json=log_json, stop_with_stdin=stop_with_stdin))


@app.command("try")
def try_(
    name: NameArgument,
    task_id: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="ID of the task. Default: first task of the split.", show_default=False),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="SPLIT", help="Split to take the task from. Default: first split.")
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option("--param", metavar="KEY=VALUE", help="Set a parameter, as in astuner.env_service.params."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of a running service. Default: start one.")
    ] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="Print the task IDs of the split and exit.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON lines; with --list, print a JSON list.")
    ] = False,
) -> None:
    """Play an environment manually, from the terminal or a pipe."""
    from astuner.contracts.types import Task
    from astuner_env.env_service import RemoteEnvironment
    from astuner_env.play import HELP, Lines, Screen, Show, json_line, play

    given = {key: _value(text) for key, text in pairs("--param", params or ()).items()}
    at_terminal = sys.stdin.isatty() and not as_json
    if at_terminal and url is None:
        typer.echo(f"Starting {name} …", err=True)
    with ended_by_signals(), _service(name, url) as (client, env_type, splits):
        chosen = split or next(iter(splits), "train")
        if list_tasks:
            ids = client.task_ids(env_type, chosen, given)
            if as_json:
                write_json(ids)
            else:
                typer.echo("".join(f"{listed}\n" for listed in ids), nl=False)
            return
        if task_id is None:
            task_id = next(iter(client.task_ids(env_type, chosen, given)), None)
        if task_id is None:
            raise EnvironmentFailed(f"The split {chosen!r} of {env_type} is empty. Select another split with --split.")
        show: Show = json_line if as_json else Screen(echo=not at_terminal)
        if at_terminal:
            typer.echo(HELP + "\n")
        world = RemoteEnvironment(given, client=client, env_type=env_type)
        try:
            task = Task(task_id=task_id, env_type=env_type)
            play(world, task, Lines("> " if at_terminal else ""), show, strict=not at_terminal)
        finally:
            world.close()


@contextmanager
def _service(
    name: str, url: str | None
) -> Iterator[tuple[EnvClient, str, Sequence[str]]]:  # client, name of the environment in the service, splits
    """Yield a client of the service at ``url``, or of a temporary service for this command."""
    from astuner_env.env_service import EnvClient
    from astuner_env.env_service.server import TOKEN_VARIABLE, EnvServer, own_script

    if url is not None:
        token, start_it = os.environ.get(TOKEN_VARIABLE, ""), f"astuner env serve {name}, or leave out --url"
        yield EnvClient(url, token=token, token_name=TOKEN_VARIABLE, start_it=start_it), name, ()
        return
    from astuner import log_file, run_service

    env_type, splits = name, tuple[str, ...]()
    if own_script(name) is None:  # ASTuner's service provides the name and the splits
        (environment,) = _served([name])
        env_type, splits = environment.name, tuple(environment.provider.splits)
    server, what = EnvServer([name]), f"the environment service ({name})"
    log = log_file(what)
    try:
        with run_service(server, what, "", log):
            yield EnvClient(server.address(), token=server.environ().get(TOKEN_VARIABLE, "")), env_type, splits
    except EnvironmentFailed as e:
        raise EnvironmentFailed(f"{e}. Log of the service: {log}") from e
    except RunError:  # the service did not start; the message contains the log's path
        raise
    except BaseException:
        log.unlink()
        raise
    log.unlink()


def _served(names: Sequence[str]) -> list[ServedEnvironment]:
    from astuner_env.manager.served import find_environments
    from astuner_env.setup import missing_for

    if not names:
        names = [name for name, _, provider in offered() if not missing_for(name, provider)]
    return find_environments(names)


def _value(text: str) -> Any:
    """Parse a value as YAML: ``4`` is a number, ``true`` a boolean, other words are strings."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"--param …={text}: {e}") from None


def offered() -> list[tuple[str, str, EnvironmentProvider]]:
    """Return name, plugin and provider of every environment, sorted."""
    from astuner import load_plugins
    from astuner_env.manager.served import as_environment

    found = load_plugins().offers("environment")
    return sorted(((name, plugin.name, as_environment(it)) for plugin, name, it in found), key=lambda row: row[:2])


def find(reference: str) -> tuple[str, EnvironmentProvider]:
    """Return the name and the provider of an environment.

    :raises UnknownName: No such environment; the message suggests similar names.
    :raises AmbiguousName: Several plugins provide the name; all but one must be disabled.
    """
    from astuner import find_offer, load_plugins
    from astuner_env.manager.served import as_environment

    found = find_offer(load_plugins(), "environment", reference)
    return found.name, as_environment(found.provider)


def pairs(option: str, texts: Sequence[str]) -> Mapping[str, str]:
    """Parse ``KEY=VALUE`` arguments.

    :raises ConfigError: An argument has another form.
    """
    wrong = [text for text in texts if not text.partition("=")[1] or text.startswith("=")]
    if wrong:
        raise ConfigError([f"{option or 'command line:'} {text!r} is not KEY=VALUE" for text in wrong])
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Handle SIGHUP, SIGTERM and Ctrl-C inside the block; for the main thread.

    The first signal raises `KeyboardInterrupt` (Ctrl-C) or `SystemExit` with the exit code that shells use. Later
    signals are ignored. Python runs signal handlers between bytecode instructions, so a signal that arrives just
    before a blocking read would wait until the read returns. A periodic alarm interrupts the read.
    Invariant: the first signal is handled immediately.
    """
    ended = False

    def handle(number: int, _: object) -> None:
        nonlocal ended
        if not ended:  # cleanup is already running
            ended = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with handled(ENDINGS, handle), handled([signal.SIGALRM], lambda *_: None):
        signal.setitimer(signal.ITIMER_REAL, NUDGE_EVERY, NUDGE_EVERY)
        try:
            yield
        finally:
            ended = True
            signal.setitimer(signal.ITIMER_REAL, 0)
