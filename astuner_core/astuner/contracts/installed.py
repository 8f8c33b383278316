"""The installed distributions, any of which may be broken in any way and never touches another.

pydantic, transformers and others ask for everybody's as they are imported, and one that cannot be read would end them.
So where this module is imported, what cannot be decoded is read as �, and entry points that cannot be read are none.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints, PathDistribution

broken: dict[str, Exception] = {}
"""The folder of a distribution of which something could not be read -> why."""
_strictly = PathDistribution.read_text


def _read_text(dist: PathDistribution, filename: str) -> str | None:
    try:
        return _strictly(dist, filename)
    except UnicodeDecodeError as e:
        broken[str(dist._path)] = e
        return e.object.decode("utf-8", errors="replace")


def _entry_points(dist: PathDistribution) -> EntryPoints:
    try:
        return super(PathDistribution, dist).entry_points
    except Exception as e:  # the file may hold anything
        broken[str(dist._path)] = e
        return EntryPoints(())


PathDistribution.read_text = _read_text  # type: ignore[method-assign, assignment]
PathDistribution.entry_points = property(_entry_points)  # type: ignore[method-assign, assignment]


def readable(entry: EntryPoint) -> bool:
    """Whether what brings it says its name and version; else it is `broken`."""
    place = str(getattr(entry.dist, "_path", entry.dist))
    try:
        if not (entry.dist and entry.dist.name and entry.dist.version):
            raise ValueError("METADATA has no name or no version")
    except Exception as e:  # it may not be there, or hold anything
        broken.setdefault(place, e)
    return place not in broken
