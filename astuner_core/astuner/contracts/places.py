"""Where every key of an experiment was written.

A `Tree` is nested plain data plus the place of each key in it, and the two move together: renaming or merging keys
keeps their places, so an error found at any later stage still names the line that a person has to change.
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
"""A dotted key, split: ``("astuner", "rollout", "num_repeat")``."""

COMMAND_LINE = "command line"
MAX_PROBLEMS = 100
"""With so many, no more are looked for."""


@dataclass(frozen=True)
class Place:
    """A position in a file (line and column count from 1), or a source without lines."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass
class Tree:
    """Nested plain data, and where its keys were written.

    A key without a place was not written by a person: a default, or something derived.
    """

    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    expressions: dict[Key, str] = field(default_factory=dict)
    """The interpolations that values were written as; secrets are shown as these."""

    def has(self, key: Key) -> bool:
        return self._parent(key) is not None

    def get(self, key: Key, default: Any = None) -> Any:
        parent = self._parent(key)
        return default if parent is None else parent[key[-1]]

    def put(self, key: Key, value: Any, place: Place | None = None) -> None:
        """Set ``key``; sections on the way that are missing (or empty) are made, at the same place."""
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
        """Take ``key`` out, with everything below it; its value."""
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
        """Where ``key`` was written, or the nearest section around it that was."""
        return next((self.places[key[:n]] for n in range(len(key), 0, -1) if key[:n] in self.places), None)

    def is_written(self, key: Key) -> bool:
        return key in self.places

    def leaves(self, below: Key = ()) -> Iterator[tuple[Key, Any]]:
        """Every key that holds no further section, with its value."""
        value = self.get(below) if below else self.data
        if isinstance(value, Mapping) and value:
            for name in value:
                yield from self.leaves((*below, name))
        elif below:
            yield below, value

    def merged(self, over: Tree) -> Tree:
        """This tree with ``over`` on top; sections merge, everything else (lists too) is replaced."""
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
    """What was found wrong, and what is worth knowing, while one experiment is read."""

    source: str
    problems: list[tuple[Place, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole_keys: Callable[[str], Mapping[str, bool]] = field(default=lambda key: {}, repr=False)
    """What a key that is unknown where it stands may have been meant to be (`astuner.config.sections.whole_keys`)."""
    older: OlderSpellingsPart = field(default=OlderSpellingsPart(), repr=False)
    """The older keys that are read."""
    defaults: Collection[Key] = ()
    """Keys of a written-out config that nobody wrote."""
    who_adds: Callable[[str], str] = field(default=lambda key: "", repr=False)
    """What is said of a key of a package that is not here (`astuner.plugins.registry.who_adds`)."""
    hint: str = ""
    """What is said of every key that nothing reads, besides what is close."""

    def problem(self, place: Place | None, message: str) -> None:
        """:raises ConfigError: there are `MAX_PROBLEMS` of them."""
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
        """The keys that the problems are about."""
        return {text.removeprefix("unknown key ").partition(" ")[0].rstrip(":;") for _, text in self.problems}

    def told(self) -> list[str]:
        """Every problem so far: the file's in its order, then those of other sources."""
        ordered = sorted(self.problems, key=lambda p: (p[0].source != self.source, p[0].line, p[0].column))
        return [f"{place}: {message}" for place, message in ordered]

    def raise_problems(self) -> None:
        """:raises ConfigError: every problem so far."""
        if self.problems:
            raise ConfigError(self.told())


def dotted(key: Key) -> str:
    return ".".join(key)
