"""``astuner env serve`` and ``try``: the service by hand, and an environment by hand."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astuner.contracts.errors import ConfigError, EnvironmentFailed, RunError
from astuner_env.cli.common import NameArgument, disabled_plugins, pairs, write_json
from astuner_env.cli.endings import ended_by_signals
from astuner_env.manager.capacity import IDLE_TTL

if TYPE_CHECKING:
    from astuner_env.env_service import EnvClient
    from astuner_env.manager.served import ServedEnvironment


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
    from astuner_env.env_service.server import TOKEN_VARIABLE, EnvServer

    if url is not None:
        token, start_it = os.environ.get(TOKEN_VARIABLE, ""), f"astuner env serve {name}, or leave out --url"
        yield EnvClient(url, token=token, token_name=TOKEN_VARIABLE, start_it=start_it), name, ()
        return
    from astuner import run_service
    from astuner.runs.services import log_file
    from astuner_env.env_service.own_script import own_script

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
    from astuner_env.cli.common import offered
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
