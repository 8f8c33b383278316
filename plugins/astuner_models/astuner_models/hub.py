"""Check that downloads from the Hugging Face Hub are possible, before anything waits for them.

The hub's client tries every file six times with pauses, so a machine without a network would fail only after half a
minute. One connection attempt fails immediately. Earlier downloads are opened from the cache.
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
"""Seconds for a connection to the hub, including name resolution."""

PACKAGES = {"tiny-calculator": "astuner-local", "smollm2-135m": "astuner-smollm2"}
"""First-party models -> packages that contain them, which may not be installed."""


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
            with contextlib.suppress(PluginError):  # reported when the reader is built
                key, reason = config.resolve("task reader", reader).missing(section, config.base_dir)
                problems.append((f"astuner.task_reader.{reader}.{key}", reason))
        said = [f"{config.origins.get(key, config.path)}: {reason}" for key, reason in problems if reason]
        if said:
            raise RunError("\n".join(dict.fromkeys(said)))


def is_folder_name(path: str) -> bool:
    """Return whether a path is meant as a folder: hub names are ``name`` or ``owner/name``, never like a path."""
    return path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or Path(path).exists()


def require_model(path: str) -> None:
    """Check that a model is on this machine, or can be downloaded from the hub.

    :raises RunError: As `Downloads.require`.
    """
    if reason := why_no_model(path):
        raise RunError(reason)


def why_no_model(path: str, key: str = "astuner.model.path", plugins: PluginManager | None = None) -> str:
    """Return why a model is not available and which models are, or an empty string if it is available.

    :param path: Folder (whose contents are not checked), or name on the hub.
    :param key: Config key of the path.
    """
    if is_folder_name(path):
        return ""
    if path in PACKAGES:  # an installed package would have located it
        return f"{key} is {path}, a model of the package {PACKAGES[path]}. Install it: pip install {PACKAGES[path]}"
    found = hub_downloads("model")
    if not (reason := hub_problem(path, found)):
        return ""
    shipped = [name for names in (plugins or load_plugins()).hook.list_models() for name in names]
    here = [*sorted(shipped), *found]
    return (
        f"{key} is {path}, which is not on this machine, and {reason}{did_you_mean(path, here)}. Use a local model "
        f"({', '.join(here) or 'none found'}) or a folder with config.json, *.safetensors and the tokenizer, or set "
        "HF_ENDPOINT to a mirror of the hub"
    )


def hub_problem(name: str, downloaded: Sequence[str]) -> str:
    """Return why ``name`` is not available, or an empty string if the hub or, without a connection, the cache has it.

    :param downloaded: Names in the cache.
    """
    reason = _unreachable()
    if reason and name in downloaded:
        _go_offline()
        return ""
    return reason


def hub_downloads(kind: str) -> list[str]:
    """Return the names in the hub's cache; none if the hub's client is not installed.

    :param kind: ``model`` or ``dataset``.
    """
    try:
        from huggingface_hub import constants
    except ImportError:
        return []
    folders = Path(constants.HF_HUB_CACHE).glob(f"{kind}s--*/snapshots")
    return sorted({folder.parent.name.partition("--")[2].replace("--", "/") for folder in folders})


def _unreachable() -> str:
    """Return why the hub is unreachable, or an empty string."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return ""  # loading needs further packages, and its error names what to install
    if constants.HF_HUB_OFFLINE:
        return f"{constants.ENDPOINT} may not be used (HF_HUB_OFFLINE is set)"
    return _connect(constants.ENDPOINT)


@functools.cache
def _connect(endpoint: str) -> str:
    """Return why an address, or the proxy in front of it, accepts no connection, or an empty string if it does."""
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

    # In a thread, because name resolution may take much longer and has no timeout.
    looking = threading.Thread(target=look, name="astuner-hub", daemon=True)
    looking.start()
    looking.join(PATIENCE)
    return outcome[0] and f"{endpoint} cannot be reached ({outcome[0]})"


def _go_offline() -> None:
    """Set the hub's clients offline in this process and its children, to avoid requests that would fail."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    for module in ("huggingface_hub.constants", "datasets.config"):
        if module in sys.modules:
            sys.modules[module].HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
