"""Read the entry points of installed distributions, so that a broken distribution does not affect others.

Importing this module patches `importlib.metadata` in the process: entry points that cannot be read become empty instead
of raising. The patch is necessary because pydantic (when it creates the first model), torch and fsspec read the entry
points of every distribution and cannot skip one. `astuner.contracts.section` imports this module before the first
model.
"""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints, PathDistribution

broken: dict[str, Exception] = {}
"""Folder of a distribution that could not be read -> the error."""


def _entry_points(dist: PathDistribution) -> EntryPoints:
    try:
        return super(PathDistribution, dist).entry_points
    except Exception as e:  # the file may contain anything
        broken[str(dist._path)] = e
        return EntryPoints(())


PathDistribution.entry_points = property(_entry_points)  # type: ignore[method-assign, assignment]


def readable(group: str) -> list[EntryPoint]:
    """Return the entry points of distributions with a name and version; record others in `broken`."""
    found = []
    for entry in importlib.metadata.entry_points(group=group):
        try:
            if not (entry.dist and entry.dist.name and entry.dist.version):
                raise ValueError("METADATA has no name or no version")
            found.append(entry)
        except Exception as e:  # the file may be missing or contain anything
            broken[str(getattr(entry.dist, "_path", entry.dist))] = e
    return found
