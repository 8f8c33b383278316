"""Services beside a run: started before it, waited for until they really answer, stopped after it, whatever happens.

A name is that of a registered service, or of an environment, which the part ``environments`` serves
(`astuner.contracts.parts`); all environments share one server.  Invariant: when `run_services` is left, by
whatever way, everything that it started is gone and its variables are as they were.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from astuner.contracts.building import BuildContext
from astuner.contracts.errors import RunError, UnknownName
from astuner.contracts.interrupt import handled
from astuner.contracts.service import Service, variables_set
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager
from astuner.plugins.user_code import close_name
from astuner.rollout.parts import build
from astuner.support.processes import home_folder

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.contracts.parts import EnvironmentsPart

START_TIMEOUT = 1800.0
"""Seconds a service may take until it answers; one that ends is noticed at once."""
KEPT_LOGS = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check(manager: PluginManager, names: Sequence[str]) -> None:
    """Whether everything that was asked for is there, before anything is loaded.

    :raises UnknownName: it is neither a service nor an environment; says what brings it.
    :raises MissingDependency: it cannot be imported, or served, here.
    """
    for name in names:
        kind, found = _find(manager, name)
        if kind == "environment":
            _server_of_environments(manager, name)
        elif found is not None:
            registry.check_installed(kind, name, found.provider)


@contextlib.contextmanager
def run_services(
    config: Config, names: Sequence[str], run_dir: Path | None = None, *, dry_run: bool = False
) -> Iterator[tuple[str, ...]]:
    """Run services until the block ends; SIGTERM counts as Ctrl-C meanwhile.

    Their variables (`Service.environ`) hold in this process for as long.

    :param run_dir: where the run writes, if that is not ``config.run_dir``.
    :returns: a line about each, for the person.
    :raises RunError: one of them does not answer.
    """
    with contextlib.ExitStack() as stack:
        lines = []
        context = BuildContext(config=config, folder=run_dir)
        if names:
            stack.enter_context(handled([signal.SIGTERM], _end))
        for what, service in _made(context, names):
            if dry_run and not service.is_planned_with:
                continue
            service.run_dir = context.run_dir
            log = log_file(what)
            stack.enter_context(run_service(service, what, config.astuner.env_service.url, log))
            stack.enter_context(variables_set(service.environ()))
            lines.append(f"{what} answers at {service.address()}; what it says is in {log}")
        yield tuple(lines)


def _find(manager: PluginManager, name: str) -> tuple[str, registry.Offer | None]:
    """The kind of what ``--with NAME`` means, and the offer; None for an environment that is code of the person's."""
    if registry.is_code(name):
        return "environment", None
    try:
        return "service", registry.find_offer(manager, "service", name)
    except UnknownName:
        if registry.hint_for("service", name):
            raise  # it says what to install
        try:
            return "environment", registry.find_offer(manager, "environment", name)
        except UnknownName:
            if registry.hint_for("environment", name):
                raise  # it says what to install
    known = sorted({offered for kind in ("service", "environment") for _, offered, _ in manager.offers(kind)})
    hint = close_name(name, known) or f"; installed: {', '.join(known) or 'none'}"
    raise UnknownName(f"no service or environment is called {name!r}{hint}")


def _made(context: BuildContext, names: Sequence[str]) -> list[tuple[str, Service]]:
    """The services in order, the environments' one where the first of them stands."""
    config, manager = context.config, context.plugins
    found = [(name, *_find(manager, name)) for name in dict.fromkeys(names)]
    environments = [offer.full_name if offer else name for name, kind, offer in found if kind == "environment"]
    made: dict[str, Service] = {}
    for name, _, offer in found:
        if offer is not None and offer.kind == "service":
            made[name] = build("service", offer.full_name, config.section("service", name), context)
        elif (what := f"the environment service ({', '.join(environments)})") not in made:
            made[what] = _server_of_environments(manager, name).service(config, environments)
    return list(made.items())


def _server_of_environments(manager: PluginManager, name: str) -> EnvironmentsPart:
    """:param name: one of them, for the message.

    :raises MissingDependency: nothing that is installed serves environments.
    """
    part: type[EnvironmentsPart] = registry.find_part(manager, "environments", wanted_by=f"--with {name}")
    return part()


@contextlib.contextmanager
def run_service(service: Service, what: str, url: str, log: Path) -> Iterator[None]:
    """Run one service until the block ends: it answers when the block begins, and is stopped whatever happens.

    No Ctrl-C, SIGTERM or SIGHUP comes between its start and our knowing of it, nor into its end.

    :param what: what messages call it.
    :param url: where it has to listen; empty: where it likes.
    :param log: a file for what it says.
    :raises RunError: it did not answer within `START_TIMEOUT`.
    """
    try:
        with _undisturbed():
            service.start(url=url, log=log)
        deadline = time.monotonic() + START_TIMEOUT
        while not service.is_ready():
            if time.monotonic() > deadline:
                raise RunError(f"{what} did not answer within {START_TIMEOUT:g} s; see {log}")
            time.sleep(0.1)
        yield
    finally:
        with _undisturbed():
            service.stop()


def log_file(what: str) -> Path:
    """A new file below `astuner.support.processes.astuner_home`; the oldest go.

    :raises RunError: it cannot be written.
    """
    folder = home_folder("logs")
    for old in sorted(folder.glob("*.log"))[:-KEPT_LOGS]:  # their names begin with the time
        old.unlink(missing_ok=True)
    stem = re.sub(r"[^A-Za-z0-9]+", "-", what).strip("-")[:60]
    handle, path = tempfile.mkstemp(prefix=f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-", suffix=".log", dir=folder)
    os.close(handle)
    return Path(path)


def _end(number: int, frame: FrameType | None) -> None:
    """For SIGTERM (in the main thread): what was started is stopped."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP wait until the block, which is short, is done."""
    came: list[int] = []
    try:
        with handled(_SIGNALS, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])
