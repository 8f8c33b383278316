"""The installed distributions, any of which may be broken in any way without touching another.

`astuner.contracts` imports this first, for it changes `importlib.metadata` in the whole process: pydantic reads the
entry points of every distribution as the first model is made, fsspec and OpenTelemetry as they are imported,
transformers the METADATA of each, and none of them can be told to leave one out.  What others see: bytes that are no
UTF-8 are read as � instead of raising, and entry points that cannot be parsed are none.  Nothing else of the standard
library is touched, and a distribution that can be read is read as before.
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
