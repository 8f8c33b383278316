"""``astuner view``: show runs, episodes and tokens on a local page, or export one run as a page."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astuner.contracts.commands import write_json
from astuner.contracts.errors import ConfigError
from astuner_view.settings import DEFAULT_PORT

if TYPE_CHECKING:
    from astuner_view.runs import Runs

DEFAULT_LIMIT = 200
"""Number of episodes in an exported page."""


def view(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Run folder, or name of a run below --root. Default: all runs.", show_default=False
        ),
    ] = None,
    root: Annotated[Path, typer.Option(metavar="DIR", help="Folder to search for runs.")] = Path("launcher_record"),
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Port. Default: {DEFAULT_PORT} or the next free one; 0 uses any free port.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address to listen on. Others than loopback require a token, included in the link."
        ),
    ] = "127.0.0.1",
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Environment variable with your token. Default: a new token if one is required."
        ),
    ] = None,
    browser: Annotated[
        bool | None,
        typer.Option("--browser/--no-browser", help="Open the page in the browser. Default: if there is a desktop."),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Export RUN as a single page and exit.", show_default=False),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="Export only matching episodes, e.g. 'reward>=0.5', split=train (repeatable).",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Export the newest N episodes. Default: {DEFAULT_LIMIT}.", show_default=False),
    ] = None,
    episode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[RUN/]ID",
            help="Open the page of this episode; with two --episode, show them side by side.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address or file as JSON.")] = False,
) -> None:
    """Show runs, episodes and tokens in the browser, until Ctrl-C."""
    from astuner_view.runs import find_run

    if export is not None:
        if run is None:
            raise ConfigError("--export requires a run: astuner view RUN --export FILE.html")
        _export(find_run(root, run), export, where or [], limit or DEFAULT_LIMIT, as_json)
        return
    if where or limit is not None:
        raise ConfigError("--where and --limit require --export FILE.html. Without it, filter on the page")
    chosen = None if run is None else find_run(root, run)
    shows_page = _is_desktop() if browser is None else browser
    _serve(root, chosen, episode or [], host, port, _token(host, token_env), shows_page, as_json)


def _serve(
    root: Path,
    chosen: Path | None,
    episodes: list[str],
    host: str,
    port: int | None,
    token: str,
    browser: bool,
    as_json: bool,
) -> None:
    from astuner_view.runs import Runs
    from astuner_view.serving import address, open_socket, serve

    runs = Runs(root) if chosen is None else Runs(chosen.parent, only=chosen)
    places = _places(runs, chosen, episodes)
    if chosen is None and not runs.all():
        typer.echo(
            f"There are no runs below {root} yet; the page shows new runs. Use --root DIR for another folder.", err=True
        )
    with open_socket(host, port) as listening:
        number = listening.getsockname()[1]
        if port is None and number != DEFAULT_PORT:
            typer.echo(f"Port {DEFAULT_PORT} is in use; using {number} instead.", err=True)
        run = next(iter(runs.all())) if chosen is not None else ""
        link = address(listening, host, run=run, episodes=places, token=token)
        if as_json:
            write_json({"url": link, "host": host, "port": number, "run": None if chosen is None else str(chosen)})
        else:
            typer.echo(f"{link}\nPress Ctrl-C to stop.")
        sys.stdout.flush()
        if browser:
            import webbrowser

            webbrowser.open(link)
        with contextlib.suppress(KeyboardInterrupt):  # asyncio may raise it while the server is stopping
            asyncio.run(serve(runs, listening, host=host, token=token))
        typer.echo("Stopped", err=True)


def _places(runs: Runs, chosen: Path | None, episodes: list[str]) -> list[tuple[str, str]]:
    """Return run ID and episode ID of each ``--episode``.

    :raises ConfigError: there are more than two, a run is missing, or an episode is not in its run.
    """
    from astuner_record.episode_log import EpisodeLog
    from astuner_view.runs import find_run

    if len(episodes) > 2:
        raise ConfigError("--episode is possible once, or twice to compare two episodes")
    known, places = runs.all(), []
    for text in episodes:
        run, _, episode = text.rpartition("/")
        if not (run or chosen):
            raise ConfigError(f"--episode {text}: name the run, as in `astuner view RUN --episode {text}`")
        folder = find_run(runs.root, run) if chosen is None else chosen
        with EpisodeLog(folder, check=False) as log:
            log.find(episode)
        places.append((next(id_ for id_, place in known.items() if place.path.resolve() == folder.resolve()), episode))
    return places


def _export(run: Path, file: Path, where: list[str], limit: int, as_json: bool) -> None:
    from astuner_view.export import export

    done = export(run, file.expanduser(), where, limit)
    if as_json:
        write_json({"file": str(file), "run": str(run), **done})
        return
    for problem in done["problems"]:
        typer.echo(problem, err=True)
    left_out = f" (the newest of {done['of']:,}; use --limit N for more)" if done["episodes"] < done["of"] else ""
    typer.echo(f"{done['episodes']:,} episodes{left_out}, {done['bytes'] / 2**20:,.1f} MiB: {file}")


def _token(host: str, token_env: str | None) -> str:
    """Return the token that every request needs; empty on loopback unless the user sets one.

    :raises ConfigError: the user's token is missing or invalid.
    """
    from astuner_gateway.listening import is_loopback, own_key

    if token_env is None:
        return "" if is_loopback(host) else secrets.token_urlsafe(24)
    return own_key(host, token_env, host_at="--host", key_at="--token-env") or ""


def _is_desktop() -> bool:
    """Return whether a browser window would be visible."""
    if not sys.stdout.isatty() or "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
