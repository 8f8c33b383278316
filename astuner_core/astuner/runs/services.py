"""Services of a run: started before it, ready when it begins, and stopped after it in every case.

A name refers to a registered service or to an environment. Environments are served by the part ``environments``
(`astuner.contracts.parts`) and share one server. Invariant: when `run_services` exits, for whatever reason, all
processes it started have ended and its environment variables are restored.
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
"""Seconds that a service may take to become ready. A service that exits is detected immediately."""
KEPT_LOGS = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def check(manager: PluginManager, names: Sequence[str]) -> None:
    """Check that all requested services exist, before anything is loaded.

    :raises UnknownName: A name is neither a service nor an environment; the message names the package to install.
    :raises MissingDependency: It cannot be imported or served here.
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
    """Run services until the block ends. Meanwhile SIGTERM acts like Ctrl-C.

    The environment variables of the services (`Service.environ`) are set in this process during the block.

    :param run_dir: Run folder, if it differs from ``config.run_dir``.
    :returns: A line for the user about each service.
    :raises RunError: A service did not become ready.
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
            lines.append(f"{what} answers at {service.address()}; its log is {log}")
        yield tuple(lines)


def _find(manager: PluginManager, name: str) -> tuple[str, registry.Offer | None]:
    """Return the kind of the name in ``--with NAME`` and its offer, which is None for an environment in user code."""
    if registry.is_code(name):
        return "environment", None
    try:
        return "service", registry.find_offer(manager, "service", name)
    except UnknownName:
        if registry.hint_for("service", name):
            raise  # the message names the package to install
        try:
            return "environment", registry.find_offer(manager, "environment", name)
        except UnknownName:
            if registry.hint_for("environment", name):
                raise  # the message names the package to install
    known = sorted({offered for kind in ("service", "environment") for _, offered, _ in manager.offers(kind)})
    hint = close_name(name, known) or f"; installed: {', '.join(known) or 'none'}"
    raise UnknownName(f"no service or environment is called {name!r}{hint}")


def _made(context: BuildContext, names: Sequence[str]) -> list[tuple[str, Service]]:
    """Return the services in order; the service of all environments takes the place of the first one."""
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
    """Return the part that serves environments.

    :param name: One of the environments, for the message.
    :raises MissingDependency: No installed package serves environments.
    """
    part: type[EnvironmentsPart] = registry.find_part(manager, "environments", wanted_by=f"--with {name}")
    return part()


@contextlib.contextmanager
def run_service(service: Service, what: str, url: str, log: Path) -> Iterator[None]:
    """Run one service until the block ends. It is ready when the block begins and is always stopped.

    Ctrl-C, SIGTERM and SIGHUP are delayed while the service is being started or stopped.

    :param what: Name of the service in messages.
    :param url: Address to listen on; empty to let the service choose.
    :param log: Log file of the service.
    :raises RunError: The service was not ready within `START_TIMEOUT`.
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
    """Create a log file below `astuner.support.processes.astuner_home` and delete the oldest ones.

    :raises RunError: The file cannot be created.
    """
    folder = home_folder("logs")
    for old in sorted(folder.glob("*.log"))[:-KEPT_LOGS]:  # names start with the time
        old.unlink(missing_ok=True)
    stem = re.sub(r"[^A-Za-z0-9]+", "-", what).strip("-")[:60]
    handle, path = tempfile.mkstemp(prefix=f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}-", suffix=".log", dir=folder)
    os.close(handle)
    return Path(path)


def _end(number: int, frame: FrameType | None) -> None:
    """Handle SIGTERM (in the main thread) like Ctrl-C, so that services are stopped."""
    raise KeyboardInterrupt


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Delay SIGINT, SIGTERM and SIGHUP until the block, which is short, ends."""
    came: list[int] = []
    try:
        with handled(_SIGNALS, lambda number, frame: came.append(number)):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])
