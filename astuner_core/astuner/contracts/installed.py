"""The installed distributions, any of which may be broken in any way without touching another.

This changes `importlib.metadata` in the whole process, and `astuner.contracts.section` imports it: pydantic reads the
entry points of every distribution as the first model is made, torch and fsspec as they are imported, and none can be
told to leave one out.  What others see: entry points that cannot be read are none.  Those that can are read as before,
and nothing else of the standard library is touched.
"""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint, EntryPoints, PathDistribution

broken: dict[str, Exception] = {}
"""The folder of a distribution of which something could not be read -> why."""


def _entry_points(dist: PathDistribution) -> EntryPoints:
    try:
        return super(PathDistribution, dist).entry_points
    except Exception as e:  # the file may hold anything
        broken[str(dist._path)] = e
        return EntryPoints(())


PathDistribution.entry_points = property(_entry_points)  # type: ignore[method-assign, assignment]


def readable(group: str) -> list[EntryPoint]:
    """The entry points of distributions that have a name and a version; the others are `broken`."""
    found = []
    for entry in importlib.metadata.entry_points(group=group):
        try:
            if not (entry.dist and entry.dist.name and entry.dist.version):
                raise ValueError("METADATA has no name or no version")
            found.append(entry)
        except Exception as e:  # the file may not be there, or hold anything
            broken[str(getattr(entry.dist, "_path", entry.dist))] = e
    return found
