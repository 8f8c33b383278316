"""Exclude requests to this machine from HTTP proxies.

On company machines, ``HTTP_PROXY`` is often set without ``NO_PROXY``. HTTP clients of agents would then send requests
for the run's own endpoint to the proxy.
"""

from __future__ import annotations

import os

_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_EXCEPTIONS = ("no_proxy", "NO_PROXY")
_LOOPBACK = ("localhost", "127.0.0.1")
"""Loopback hosts, without ``::1``: httpx before 0.24 fails on an IPv6 address in ``NO_PROXY``."""


def bypass_proxies(*hosts: str) -> None:
    """Add loopback names and ``hosts`` to ``NO_PROXY`` of this process and its children, if a proxy is set."""
    if not any(os.environ.get(spelling) for name in _PROXIES for spelling in (name, name.upper())):
        return
    merged = without_proxy(*_LOOPBACK, *hosts)
    for name in _EXCEPTIONS:
        if os.environ.get(name) != merged:
            os.environ[name] = merged


def without_proxy(*hosts: str) -> str:
    """Return the value of ``NO_PROXY`` with ``hosts`` added to the entries of both its spellings."""
    written = ",".join(os.environ.get(name, "") for name in _EXCEPTIONS).split(",")
    entries = list(dict.fromkeys(entry.strip() for entry in (*written, *hosts) if entry.strip()))
    return "*" if "*" in entries else ",".join(entries)  # clients accept "*" only as the sole entry
