"""What would come from the Hugging Face hub, and whether it can be had, before anything waits for it.

The hub's own client tries every file six times and sleeps in between, so a machine without a network would learn that
it has none after half a minute. One look at the address tells at once; what was downloaded before opens from the cache.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from astuner import AgentRegistry, is_code, load_plugins
from astuner.contracts.errors import PluginError, RunError, did_you_mean
from astuner.contracts.parts import DownloadsPart

if TYPE_CHECKING:
    from astuner import Config, PluginManager
    from astuner.contracts.backbone import Capabilities

PATIENCE = 3.0
"""Seconds that the hub has to take a connection, finding its address included."""

PACKAGES = {"tiny-calculator": "astuner-local", "smollm2-135m": "astuner-smollm2"}
"""Models of ours -> the packages that bring them, which may not be installed."""


class Downloads(DownloadsPart):
    """The part ``downloads``."""

    def require(self, config: Config, capabilities: Capabilities) -> None:
        problems = []
        if "model" in capabilities.honours:
            for policy in AgentRegistry.of(config.astuner).policies:
                own = policy in config.astuner.policies and config.astuner.policies[policy].path
                key = f"astuner.policies.{policy}.path" if own else "astuner.model.path"
                reason = why_no_model(config.locate_model(policy=policy), key, config.plugins)
                problems.append((key, reason))
        reader = config.astuner.task_reader.type
        if reader and not is_code(reader):
            section = config.section("task reader", reader)
            with contextlib.suppress(PluginError):  # which is said where the reader is made
                key, reason = config.resolve("task reader", reader).missing(section, config.base_dir)
                problems.append((f"astuner.task_reader.{reader}.{key}", reason))
        said = [f"{config.origins.get(key, config.path)}: {reason}" for key, reason in problems if reason]
        if said:
            raise RunError("\n".join(dict.fromkeys(said)))


def is_folder_name(path: str) -> bool:
    """Whether a person meant a folder: a hub name is ``name`` or ``owner/name`` and never begins like a path."""
    return path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or Path(path).exists()


def require_model(path: str) -> None:
    """Make sure that a model is here, or that the hub can be asked for it.

    :raises RunError: as `Downloads.require`.
    """
    if reason := why_no_model(path):
        raise RunError(reason)


def why_no_model(path: str, key: str = "astuner.model.path", plugins: PluginManager | None = None) -> str:
    """Why a model cannot be had, and which are here; empty for one that is here, or that the hub can be asked for.

    :param path: a folder (which whoever reads it looks into), or a name on the hub.
    :param key: where that was written.
    """
    if is_folder_name(path):
        return ""
    if path in PACKAGES:  # whose plugin would have located it
        return f"{key} is {path}, a model of the package {PACKAGES[path]}; type: pip install {PACKAGES[path]}"
    found = hub_downloads("model")
    if not (reason := hub_problem(path, found)):
        return ""
    shipped = [name for names in (plugins or load_plugins()).hook.list_models() for name in names]
    here = [*sorted(shipped), *found]
    return (
        f"{key} is {path}, which is not on this machine, and {reason}{did_you_mean(path, here)}. Models without the "
        f"hub: {', '.join(here) or 'none'}. Write one of them or a folder that holds config.json, *.safetensors and "
        "the tokenizer, or set HF_ENDPOINT to a mirror of the hub"
    )


def hub_problem(name: str, downloaded: Sequence[str]) -> str:
    """Why ``name`` cannot be had; empty where it can, from the hub or, if that does not answer, from the cache.

    :param downloaded: the names that are in the cache.
    """
    reason = _unreachable()
    if reason and name in downloaded:
        _go_offline()
        return ""
    return reason


def hub_downloads(kind: str) -> list[str]:
    """Names of what earlier downloads left in the hub's cache; none where its client is not installed.

    :param kind: ``model`` or ``dataset``.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        return []
    folders = Path(constants.HF_HUB_CACHE).glob(f"{kind}s--*/snapshots")
    return sorted({folder.parent.name.partition("--")[2].replace("--", "/") for folder in folders})


def _unreachable() -> str:
    """Why the hub cannot be asked; empty if it can."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return ""  # whoever loads it needs more than this, and says what to install
    if constants.HF_HUB_OFFLINE:
        return f"{constants.ENDPOINT} may not be asked for it (HF_HUB_OFFLINE is set)"
    return _connect(constants.ENDPOINT)


@functools.cache
def _connect(endpoint: str) -> str:
    """Why nobody takes a connection at an address, or at the proxy before it; empty if somebody does."""
    url = urlsplit(endpoint)
    proxy = getproxies().get(url.scheme)
    if proxy and not proxy_bypass(url.hostname or ""):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}", scheme="http")
    outcome = [f"no answer within {PATIENCE:g} s"]

    def look() -> None:
        try:
            socket.create_connection((url.hostname, url.port or {"https": 443}.get(url.scheme, 80)), PATIENCE).close()
            outcome[0] = ""
        except OSError as e:
            outcome[0] = e.strerror or str(e)

    # In a thread of its own: a name server that is silent is waited for much longer, and cannot be given a limit.
    looking = threading.Thread(target=look, name="astuner-hub", daemon=True)
    looking.start()
    looking.join(PATIENCE)
    return outcome[0] and f"{endpoint} cannot be reached ({outcome[0]})"


def _go_offline() -> None:
    """Keep the hub's clients, here and in processes that are started, from trying what is known to fail."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
