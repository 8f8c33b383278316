"""What every confined Python process may read of the system: libraries, time zones, and harmless devices."""

from __future__ import annotations

SYSTEM = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/dev/urandom",
    "/dev/zero",
)
"""Absolute paths; not all of them exist everywhere."""
