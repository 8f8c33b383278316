"""Track where each key of an experiment was written.

A `Tree` is nested plain data with the place of each key. Renaming and merging keys keeps their places, so errors found
at any later stage name the line to change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from astuner.contracts.errors import ConfigError
from astuner.contracts.errors import did_you_mean as did_you_mean
from astuner.contracts.parts import OlderSpellingsPart

Key = tuple[str, ...]
"""Parts of a dotted key: ``("astuner", "rollout", "num_repeat")``."""

COMMAND_LINE = "command line"
MAX_PROBLEMS = 100
"""Maximum number of problems to collect."""


@dataclass(frozen=True)
class Place:
    """A position in a file (line and column start at 1), or a source without lines."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass
class Tree:
    """Nested plain data and the places of its keys.

    A key without a place is a default or derived, i.e. not set by the user.
    """

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    expressions: dict[Key, str] = field(default_factory=dict)
    """Key -> the interpolation it was written as, which is shown instead of a secret."""

    def has(self, key: Key) -> bool:
        return self._parent(key) is not None

    def get(self, key: Key, default: Any = None) -> Any:
        parent = self._parent(key)
        return default if parent is None else parent[key[-1]]

    def put(self, key: Key, value: Any, place: Place | None = None) -> None:
        """Set ``key``; missing or empty parent sections are created with the same place."""
        at = self.data
        for depth, part in enumerate(key[:-1], 1):
            if not isinstance(at.get(part), dict):
                at[part] = {}
            if place is not None:
                self.places.setdefault(key[:depth], place)
            at = at[part]
        at[key[-1]] = value
        if place is not None:
            self.places[key] = place

    def remove(self, key: Key) -> Any:
        """Remove ``key`` with everything below it, and return its value."""
        parent = self._parent(key)
        if parent is None:
            raise KeyError(".".join(key))
        self.places = {k: v for k, v in self.places.items() if k[: len(key)] != key}
        self.expressions = {k: v for k, v in self.expressions.items() if k[: len(key)] != key}
        return parent.pop(key[-1])

    def move(self, old: Key, new: Key) -> None:
        """Rename a key, keeping the places of everything below it."""
        n = len(old)
        places = {new + key[n:]: place for key, place in self.places.items() if key[:n] == old}
        expressions = {new + key[n:]: text for key, text in self.expressions.items() if key[:n] == old}
        self.put(new, self.remove(old), places.get(new))
        self.places.update(places)
        self.expressions.update(expressions)

    def place(self, key: Key) -> Place | None:
        """Return the place of ``key``, or of the nearest parent section that has one."""
        return next((self.places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.places), None)

    def is_written(self, key: Key) -> bool:
        return key in self.places

    def leaves(self, below: Key = ()) -> Iterator[tuple[Key, Any]]:
        """Yield every key that is not a section, with its value."""
        value = self.get(below) if below else self.data
        if isinstance(value, Mapping) and value:
            for name in value:
                yield from self.leaves((*below, name))
        elif below:
            yield below, value

    def merged(self, over: Tree) -> Tree:
        """Return this tree overridden by ``over``. Sections are merged; all other values, including lists, replaced."""
        result = Tree(deepcopy(self.data), dict(self.places), dict(self.expressions))
        for key, value in over.leaves():
            for n in range(1, len(key) + 1):
                both = isinstance(result.get(key[:n]), dict) and isinstance(over.get(key[:n]), dict)
                if result.has(key[:n]) and not both:
                    result.remove(key[:n])
            if not result.has(key):
                result.put(key, deepcopy(value))
        result.places = {**over.places, **result.places}
        return result

    def _parent(self, key: Key) -> dict[str, Any] | None:
        at: Any = self.data
        for part in key[:-1]:
            at = at.get(part) if isinstance(at, dict) else None
        return at if isinstance(at, dict) and key[-1] in at else None


@dataclass
class Report:
    """Problems and notes collected while an experiment is read."""

    source: str
    problems: list[tuple[Place, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole_keys: Callable[[str], Mapping[str, bool]] = field(default=lambda key: {}, repr=False)
    """Returns the full keys that an unknown key may refer to (`astuner.config.sections.whole_keys`)."""
    older: OlderSpellingsPart = field(default=OlderSpellingsPart(), repr=False)
    """Legacy keys to accept."""
    defaults: Collection[Key] = ()
    """Keys of a written-out config that are defaults."""
    who_adds: Callable[[str], str] = field(default=lambda key: "", repr=False)
    """Returns the hint for a key of a package that is not installed (`astuner.plugins.registry.who_adds`)."""
    hint: str = ""
    """Hint to append to messages about unknown keys."""

    def problem(self, place: Place | None, message: str) -> None:
        """Add a problem.

        :raises ConfigError: The report has `MAX_PROBLEMS` problems.
        """
        entry = (place or Place(self.source), message)
        if entry not in self.problems:
            self.problems.append(entry)
        if len(self.problems) == MAX_PROBLEMS:
            self.raise_problems()

    def note(self, message: str, place: Place | None = None) -> None:
        text = f"{place}: {message}" if place else message
        if text not in self.notes:
            self.notes.append(text)

    @property
    def wrong(self) -> set[str]:
        """Return the keys that have problems."""
        return {text.removeprefix("unknown key ").partition(" ")[0].rstrip(":;") for _, text in self.problems}

    def told(self) -> list[str]:
        """Return the messages of all problems: first of the file, in its order, then of other sources."""
        ordered = sorted(self.problems, key=lambda p: (p[0].source != self.source, p[0].line, p[0].column))
        return [f"{place}: {message}" for place, message in ordered]

    def raise_problems(self) -> None:
        """Raise all problems so far, if any.

        :raises ConfigError: There are problems.
        """
        if self.problems:
            raise ConfigError(self.told())


def dotted(key: Key) -> str:
    """Return the key as text, joined by dots."""
    return ".".join(key)
