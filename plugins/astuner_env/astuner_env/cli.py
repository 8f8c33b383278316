"""``astuner env``: install, diagnose, serve and try environments.

Invariant: listing and help import no environment and no server.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.errors import ConfigError, EnvironmentFailed, RunError
from astuner.contracts.hookspecs import EnvironmentProvider
from astuner_env.manager.capacity import IDLE_TTL
from astuner_env.providers import as_environment

if TYPE_CHECKING:
    from astuner.plugins.loader import PluginManager
    from astuner_env.doctor import Diagnosis
    from astuner_env.env_service import EnvClient
    from astuner_env.manager.served import ServedEnvironment

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The environment.", show_default=False)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
NUDGE_EVERY = 0.1
"""Seconds."""
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    help="Install, diagnose, serve and try environments.",
)


@app.command("list")
def list_environments(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List environments, and whether each is ready."""
    from astuner_env.doctor import missing_for

    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "summary": provider.summary,
            "plugin": plugin,
            "ready": not (missing := missing_for(name, provider)),
            "missing": missing,
            "splits": list(provider.splits),
        }
        for name, plugin, provider in offered(ctx)
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
    ctx: typer.Context,
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

    bare, provider = find(ctx, name)
    if show_options:
        for key, text in options_of(bare, provider).items():
            typer.echo(f"{key}=…  {text}")
        return
    given = pairs("", options or ())
    kept = set_up(bare, provider, given, python=python, say=say)
    where = f" on {kept.python}" if kept.python else ""
    typer.echo(f"{bare} is ready{where}; play it with: astuner env try {bare}")


@app.command()
def doctor(
    ctx: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only this environment.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what environments lack here, and what to type.

    Exits with 1 when NAME lacks something; without NAME, when one that was set up does.
    """
    from astuner_env.doctor import diagnose, machine

    if name is None:
        found = [diagnose(bare, provider) for bare, _, provider in offered(ctx)]
    else:
        found = [replace(diagnose(*find(ctx, name)), wanted=True)]
    found.append(machine())
    if as_json:
        write_json([_as_data(d) for d in found])
    else:
        for diagnosis in found:
            _show(diagnosis)
    if any(d.wanted and not d.is_ready for d in found):
        raise typer.Exit(1)


def _as_data(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "name": diagnosis.name,
        "ready": diagnosis.is_ready,
        "wanted": diagnosis.wanted,
        "findings": [asdict(finding) for finding in diagnosis.findings],
    }


def _show(diagnosis: Diagnosis) -> None:
    typer.echo(diagnosis.name)
    for finding in diagnosis.findings:
        level = "ok" if finding.ok else "fail" if diagnosis.wanted else "-"
        typer.echo(f"  {level:4}  {finding.what}")
        if finding.hint:
            typer.echo(f"  {'':4}  type: {finding.hint}")


@app.command()
def serve(
    ctx: typer.Context,
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
    stop_with_stdin: Annotated[
        bool, typer.Option("--stop-with-stdin", help="Stop when standard input closes, as at the starter's end.")
    ] = False,
) -> None:
    """Serve environments over HTTP until Ctrl-C.

    Any address but loopback needs a token in the variable ASTUNER_ENV_TOKEN.
    """
    import asyncio

    from astuner_env.env_service.server import TOKEN_VARIABLE
    from astuner_env.server import serve as run_until_stopped

    with _without_disabled(ctx):
        asyncio.run(
            run_until_stopped(
                _served(ctx, names or ()),
                host=host,
                port=port,
                token=os.environ.get(TOKEN_VARIABLE, ""),
                max_instances=max_instances,
                idle_ttl=idle_ttl,
                log_json=log_json,
                debug=debug,
                stop_with_stdin=stop_with_stdin,
            )
        )


@app.command("try")
def try_(
    ctx: typer.Context,
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
    from astuner_env.play import HELP, JsonLines, Lines, Screen, Show, play

    given = {key: _value(text) for key, text in pairs("--param", params or ()).items()}
    at_terminal = sys.stdin.isatty() and not as_json
    if at_terminal and url is None:
        typer.echo(f"starting {name} …", err=True)
    with (
        _without_disabled(ctx),
        ended_by_signals(),
        _service(ctx, name, url) as (client, env_type, splits),
    ):
        chosen = split or next(iter(splits), "train")
        if list_tasks:
            ids = client.task_ids(env_type, chosen, given)
            if as_json:
                write_json(ids)
            else:
                typer.echo("".join(f"{listed}\n" for listed in ids), nl=False)
            return
        task_id = task_id or _first(client, env_type, chosen, given)
        show: Show = JsonLines() if as_json else Screen(echo=not at_terminal)
        if at_terminal:
            typer.echo(HELP + "\n")
        world = RemoteEnvironment(given, client=client, env_type=env_type)
        try:
            task = Task(task_id=task_id, env_type=env_type)
            play(world, task, Lines("> " if at_terminal else ""), show, strict=not at_terminal)
        finally:
            world.close()


def _first(client: EnvClient, env_type: str, split: str, params: Mapping[str, Any]) -> str:
    ids = client.task_ids(env_type, split, params)
    if not ids:
        raise EnvironmentFailed(f"{env_type} has no task in the split {split!r}; choose another with --split")
    return ids[0]


@contextmanager
def _service(
    ctx: typer.Context, name: str, url: str | None
) -> Iterator[tuple[EnvClient, str, Sequence[str]]]:  # client, the environment's name there, its splits
    """The service at ``url``, or one that is started for this and ended after it."""
    from astuner_env.env_service import EnvClient
    from astuner_env.env_service.server import TOKEN_VARIABLE, EnvServer, own_script

    if url is not None:
        token, start_it = os.environ.get(TOKEN_VARIABLE, ""), f"astuner env serve {name}, or leave out --url"
        yield EnvClient(url, token=token, token_name=TOKEN_VARIABLE, start_it=start_it), name, ()
        return
    from astuner import run_service
    from astuner.runs.services import log_file

    env_type, splits = name, tuple[str, ...]()
    if own_script(name) is None:  # then it is our service, which knows more
        (environment,) = _served(ctx, [name])
        env_type, splits = environment.name, tuple(environment.splits)
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


def _served(ctx: typer.Context, names: Sequence[str]) -> list[ServedEnvironment]:
    from astuner_env.doctor import missing_for
    from astuner_env.manager.served import find_environments

    if not names:
        names = [name for name, _, provider in offered(ctx) if not missing_for(name, provider)]
    return find_environments(names)


@contextmanager
def _without_disabled(ctx: typer.Context) -> Iterator[None]:
    """``-p no:NAME``, for what looks plugins up by itself and for the processes that are started."""
    from astuner.plugins.loader import DISABLE_VARIABLE

    before = os.environ.get(DISABLE_VARIABLE)
    if off := disabled_plugins(ctx):
        os.environ[DISABLE_VARIABLE] = ",".join(filter(None, (before, *off)))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(DISABLE_VARIABLE, None)
        else:
            os.environ[DISABLE_VARIABLE] = before


def _value(text: str) -> Any:
    """``4`` is a number, ``true`` a truth value, anything that is no YAML-like word stays text."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as e:
        raise ConfigError(f"--param …={text}: {e}") from None


def offered(ctx: typer.Context) -> list[tuple[str, str, EnvironmentProvider]]:
    """Name, plugin, provider of every environment; with ``-p no:NAME`` honoured."""
    found = []
    for plugin, name, provider in load_plugins(ctx).offers("environment"):
        found.append((name, plugin.name, as_environment(provider)))
    return sorted(found, key=lambda row: row[:2])


def find(ctx: typer.Context, reference: str) -> tuple[str, EnvironmentProvider]:
    """The name that an environment goes by, and its provider.

    :raises UnknownName: there is no such environment; says what is close.
    :raises AmbiguousName: several plugins bring it; one of them must be turned off.
    """
    from astuner.plugins import registry

    found = registry.offer(load_plugins(ctx), "environment", reference)
    return found.name, as_environment(found.provider)


def load_plugins(ctx: typer.Context) -> PluginManager:
    from astuner.plugins import loader as plugins

    return plugins.load_plugins(disabled_plugins(ctx))


def disabled_plugins(ctx: typer.Context) -> tuple[str, ...]:
    """The names behind ``-p no:NAME``; that they are well-formed was checked when this command was looked up."""
    return tuple(text.removeprefix("no:") for text in ctx.find_root().params.get("plugin") or ())


def pairs(option: str, texts: Sequence[str]) -> Mapping[str, str]:
    wrong = [text for text in texts if not text.partition("=")[1] or text.startswith("=")]
    if wrong:
        raise ConfigError([f"{option or 'command line:'} {text!r} is not KEY=VALUE" for text in wrong])
    return {key: value for key, _, value in (text.partition("=") for text in texts)}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, indent=2))


class Endings:
    """The first signal that asks to end becomes an exception in the main thread; what follows is ignored.

    Python runs a signal's handler between two of its own instructions.  A signal that comes just before a line is
    waited for is therefore handled after that line has come, which may be never.  Invariant: here it is handled at once
    (a thread hears of it and wakes the waiting one up).
    """

    def __init__(self) -> None:
        self.handled = threading.Event()

    def handle(self, number: int, _: object = None) -> None:
        """What Python calls for a signal.

        :raises KeyboardInterrupt: for Ctrl-C.
        :raises SystemExit: for the others, with the code that shells show for a program ended by them.
        """
        if self.handled.is_set():
            return  # what was begun is being put away
        self.handled.set()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


@contextmanager
def ended_by_signals() -> Iterator[Endings]:
    """A closed terminal, a plain kill and Ctrl-C end the block in good order; in the main thread."""
    endings = Endings()

    def nudge() -> None:
        while told_of := os.read(heard, 1):  # nothing is read when the other end is closed
            while told_of[0] in before and not endings.handled.wait(NUDGE_EVERY):
                signal.pthread_kill(threading.main_thread().ident or 0, told_of[0])

    heard, told = os.pipe()
    os.set_blocking(told, False)
    before = {number: signal.signal(number, endings.handle) for number in ENDINGS}
    other = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    watching = threading.Thread(target=nudge, name="astuner-signals", daemon=True)
    watching.start()
    try:
        yield endings
    finally:
        endings.handled.set()
        signal.set_wakeup_fd(other)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(told)
        watching.join()
        os.close(heard)
