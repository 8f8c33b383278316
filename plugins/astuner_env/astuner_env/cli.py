"""``astuner env``: install, diagnose, serve and try environments.

Invariant: listing and help import no environment and no server.
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

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The environment.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NUDGE_EVERY = 0.1
"""Seconds."""
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

app = new_app(no_args_is_help=True, help="Install, diagnose, serve and try environments.")


@app.callback()
def _line(ctx: typer.Context) -> None:
    """``-p no:NAME``, for whatever looks plugins up, in this process and those that it starts."""
    from astuner import DISABLE_PLUGINS

    off = [text.removeprefix("no:") for text in ctx.find_root().params.get("plugin") or ()]
    named = ",".join(filter(None, (os.environ.get(DISABLE_PLUGINS), *off)))
    ctx.with_resource(variables_set({DISABLE_PLUGINS: named}))


@app.command("list")
def list_environments(as_json: JsonOption = False) -> None:
    """List environments, and whether each is ready."""
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
        typer.echo("no plugin brings an environment; write one with: astuner new plugin NAME --environment")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        state = "ready" if row["ready"] else f"type: {row['missing']}"
        typer.echo(f"{row['name']:{width}}  {row['summary']}")
        typer.echo(f"{'':{width}}  {state}  ·  splits: {', '.join(row['splits'])}  ·  plugin: {row['plugin']}")


@app.command()
def setup(
    name: NameArgument,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Options of the environment.", show_default=False),
    ] = None,
    python: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Make its interpreter from this Python. Default: one that fits.")
    ] = None,
    show_options: Annotated[bool, typer.Option("--options", help="List the options of NAME, and stop.")] = False,
) -> None:
    """Install what an environment needs; harmless to do again."""
    from astuner_env.setup import options_of, set_up

    bare, provider = find(name)
    if show_options:
        for key, text in options_of(bare, provider).items():
            typer.echo(f"{key}=…  {text}")
        return
    given = pairs("", options or ())
    kept = set_up(bare, provider, given, python=python, say=partial(typer.echo, err=True))
    where = f" on {kept.python}" if kept.python else ""
    typer.echo(f"{bare} is ready{where}; play it with: astuner env try {bare}")


@app.command()
def doctor(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this environment.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what environments lack here, and what to type.

    Exits with 1 when NAME lacks something; without NAME, when one that was set up does.
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
                    typer.echo(f"  {'':4}  type: {finding.hint}")
    if any(d.wanted and not d.is_ready for d in found):
        raise typer.Exit(1)


@app.command()
def serve(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Which environments; none: all that are ready.", show_default=False),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8080,
    max_instances: Annotated[
        int | None, typer.Option(min=1, help="Instances at once. Default: what memory and cores allow.")
    ] = None,
    idle_ttl: Annotated[float, typer.Option(metavar="SECONDS", help="End instances that nobody uses.")] = IDLE_TTL,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object per log line.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log every request; send tracebacks to clients.")] = False,
    max_memory_mb: Annotated[
        int | None, typer.Option(min=64, metavar="MB", help="End instances beyond this, not what the environment says.")
    ] = None,
    max_processes: Annotated[
        int | None, typer.Option(min=1, help="End instances with more, not what the environment says.")
    ] = None,
    token_from_stdin: Annotated[
        bool, typer.Option("--token-from-stdin", help="The token is the first line of standard input.")
    ] = False,
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="Stop when standard input closes, as at the starter's end.")
    ] = False,
) -> None:
    """Serve environments over HTTP until Ctrl-C.

    Any address but loopback needs a token in the variable ASTUNER_ENV_TOKEN.
    """
    import asyncio

    from astuner_env.env_service.server import TOKEN_VARIABLE, own_script
    from astuner_env.server import ServiceSettings
    from astuner_env.server import serve as run_until_stopped
    from astuner_sandbox.isolation.linux import hide

    for own in filter(None, map(own_script, names or ())):  # instead, as for `--with NAME`
        if len(names or ()) > 1:
            raise ConfigError(f"{' '.join(names or ())}: one of them has a service of your own; serve that one alone")
        os.chdir(own.folder)
        os.execvpe("bash", ["bash", "-c", own.command], {**own.variables, **os.environ})
    token = os.environ.get(TOKEN_VARIABLE, "")
    if token_from_stdin and not (token := sys.stdin.readline().strip()):
        raise ConfigError("--token-from-stdin: standard input has no first line; write the token there")
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
        str | None, typer.Argument(metavar="[TASK]", help="Its id. Default: the split's first.", show_default=False)
    ] = None,
    split: Annotated[str | None, typer.Option(metavar="SPLIT", help="Default: the environment's first.")] = None,
    params: Annotated[
        list[str] | None, typer.Option("--param", metavar="KEY=VALUE", help="As astuner.env_service.params.")
    ] = None,
    url: Annotated[str | None, typer.Option(metavar="URL", help="A service that runs, instead of one's own.")] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="Print the split's task ids, and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as a line of JSON, or the list.")] = False,
) -> None:
    """Play an environment by hand, from the terminal or a pipe."""
    from astuner.contracts.types import Task
    from astuner_env.env_service import RemoteEnvironment
    from astuner_env.play import HELP, Lines, Screen, Show, json_line, play

    given = {key: _value(text) for key, text in pairs("--param", params or ()).items()}
    at_terminal = sys.stdin.isatty() and not as_json
    if at_terminal and url is None:
        typer.echo(f"starting {name} …", err=True)
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
            raise EnvironmentFailed(f"{env_type} has no task in the split {chosen!r}; choose another with --split")
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
) -> Iterator[tuple[EnvClient, str, Sequence[str]]]:  # client, the environment's name there, its splits
    """The service at ``url``, or one that is started for this and ended after it."""
    from astuner_env.env_service import EnvClient
    from astuner_env.env_service.server import TOKEN_VARIABLE, EnvServer, own_script

    if url is not None:
        token, start_it = os.environ.get(TOKEN_VARIABLE, ""), f"astuner env serve {name}, or leave out --url"
        yield EnvClient(url, token=token, token_name=TOKEN_VARIABLE, start_it=start_it), name, ()
        return
    from astuner import log_file, run_service

    env_type, splits = name, tuple[str, ...]()
    if own_script(name) is None:  # then it is our service, which knows more
        (environment,) = _served([name])
        env_type, splits = environment.name, tuple(environment.provider.splits)
    server, what = EnvServer([name]), f"the environment service ({name})"
    log = log_file(what)
    try:
        with run_service(server, what, "", log):
            yield EnvClient(server.address(), token=server.environ().get(TOKEN_VARIABLE, "")), env_type, splits
    except EnvironmentFailed as e:
        raise EnvironmentFailed(f"{e}; the log of its service: {log}") from e
    except RunError:  # it did not start; the message names the log
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
    """``4`` is a number, ``true`` a truth value, anything that is no YAML-like word stays text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"--param …={text}: {e}") from None


def offered() -> list[tuple[str, str, EnvironmentProvider]]:
    """Name, plugin, provider of every environment."""
    from astuner import load_plugins
    from astuner_env.manager.served import as_environment

    found = load_plugins().offers("environment")
    return sorted(((name, plugin.name, as_environment(it)) for plugin, name, it in found), key=lambda row: row[:2])


def find(reference: str) -> tuple[str, EnvironmentProvider]:
    """The name that an environment goes by, and its provider.

    :raises UnknownName: there is no such environment; says what is close.
    :raises AmbiguousName: several plugins bring it; one of them must be turned off.
    """
    from astuner import find_offer, load_plugins
    from astuner_env.manager.served import as_environment

    found = find_offer(load_plugins(), "environment", reference)
    return found.name, as_environment(found.provider)


def pairs(option: str, texts: Sequence[str]) -> Mapping[str, str]:
    wrong = [text for text in texts if not text.partition("=")[1] or text.startswith("=")]
    if wrong:
        raise ConfigError([f"{option or 'command line:'} {text!r} is not KEY=VALUE" for text in wrong])
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """A closed terminal, a plain kill and Ctrl-C end the block in good order; in the main thread.

    The first signal becomes an exception there, a `KeyboardInterrupt` for Ctrl-C and else a `SystemExit` with the code
    that shells show; what follows is ignored.  Python runs a signal's handler between two of its own instructions, and
    one that comes just before a line is waited for would be handled after that line has come, which may be never.
    Invariant: here it is handled at once (an alarm that means nothing ends every wait, again and again).
    """
    ended = False

    def handle(number: int, _: object) -> None:
        nonlocal ended
        if not ended:  # else what was begun is being put away
            ended = True
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    with handled(ENDINGS, handle), handled([signal.SIGALRM], lambda *_: None):
        signal.setitimer(signal.ITIMER_REAL, NUDGE_EVERY, NUDGE_EVERY)
        try:
            yield
        finally:
            ended = True
            signal.setitimer(signal.ITIMER_REAL, 0)
