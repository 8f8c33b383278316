"""Compose an engine's configuration for one experiment from layers.

Later layers take precedence::

    the engine's defaults  <  rows of the backbone's table  <  the platform's settings  <  the user's own engine keys

No key is dropped silently: a key that the engine lacks, or that only ASTuner may set, is an error with its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Final

from astuner.contracts.errors import ConfigError
from astuner.contracts.secrets import is_secret
from astuner_ray.native.facts import Facts
from astuner_ray.native.keys import nearest, refuse, spelled
from astuner_ray.native.table import UNSET, Table

HAS_KEYS: Final = object()
"""Marks a key of the engine that is a section."""


def layered(
    facts: Facts,
    table: Table[Any],
    platform: Iterable[tuple[str, Any]],
    mine: Mapping[str, Any],
    *,
    get: Callable[[str], Any],
    put: Callable[[str, Any], str],
) -> tuple[str, ...]:
    """Apply the layers to an engine's defaults and return notes about replaced values.

    :param mine: Result of `checked`.
    :param get: Returns the current value of an engine key.
    :param put: Sets a key and returns its name without ``+``.
    """
    section, notes = facts.BACKBONE, []
    decided: dict[str, tuple[str, ...]] = {}
    for row in table.rows:
        if (value := row.value(facts)) is not UNSET:
            decided[put(row.native, value)] = row.ours
    for marked, value in platform:
        key = marked.removeprefix("?")
        name = spelled(key).replace("+", "")
        asked = [f"astuner.{ours}" for ours in decided.get(name, ()) if facts.is_written(ours)]
        if asked and key != marked:
            continue
        before, name = get(key), put(key, value)
        if asked and before != value:
            notes.append(f"{' and '.join(asked)}: this platform needs {name}: {value} instead of {before}")
        decided.setdefault(name, ())
    for key, value in mine.items():
        before, name = get(key), put(key, value)
        if name in decided and before != value:
            source = " and ".join(f"astuner.{ours}" for ours in decided[name])
            shown = "…" if is_secret(name.rpartition(".")[2]) else value
            whose = f"{before}, which came from {source}" if source else f"{before}"
            notes.append(f"{facts.place(f'{section}.{key}')}: {section}.{name}: {shown} replaces {whose}")
    return tuple(notes)


def checked(
    facts: Facts,
    table: Table[Any],
    known: Mapping[str, Any],
    *,
    engine: str,
    unlike: Callable[[str, Any], str],
    is_free: Callable[[Any], bool],
    else_: str = "",
) -> dict[str, Any]:
    """Return the engine keys that the user wrote, with their values.

    :param known: The engine's keys and sections; `HAS_KEYS` marks a section.
    :param engine: Name of the engine in messages.
    :param unlike: Returns the expected type of a known key if the given value has another type, else an empty string.
    :param is_free: Returns whether the engine accepts arbitrary keys below a section.
    :param else_: Hint for an unknown key without a similar key; may contain ``key`` with a ``+``. Set it if the engine
        accepts new keys with a ``+``.
    :raises ConfigError: All problems of all keys.
    """

    def wrong(key: str, value: Any) -> str:
        *sections, last = key.split(".")
        name = ".".join([*sections, last.removeprefix("+")]) if else_ else key
        if reason := table.why_locked(name):
            return f"is set by ASTuner: {reason}"
        if name in known:
            return unlike(name, value)
        section = name
        while section and section not in known:
            section = section.rpartition(".")[0]
        if (else_ and last.startswith("+")) or (section and is_free(known[section])):
            return ""
        return no_key(name, known, table, engine=engine, else_=else_.format(key=".".join([*sections, f"+{last}"])))

    wanted: dict[str, Any] = {}
    problems = []
    for key, value in facts.own.items():
        if value in (None, {}) and known.get(key) is HAS_KEYS:
            continue  # `trainer:` alone is empty
        wanted[key] = value
        if message := wrong(key, value):
            problems.append((facts.place(f"{facts.BACKBONE}.{key}"), f"{facts.BACKBONE}.{key} {message}"))
    refuse(problems)
    return wanted


def without_flash_attention(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``settings`` if flash-attn, which engines use by default, is not installed; otherwise an empty mapping."""
    return {} if find_spec("flash_attn") else settings


def no_key(name: str, known: Iterable[str], table: Table[Any], *, engine: str, else_: str = "") -> str:
    """Return a message about a key that the engine does not have.

    :param else_: Hint if no similar key exists.
    """
    known = list(known)
    beside = [k for k in known if k.rpartition(".")[0] == name.rpartition(".")[0]]
    near = nearest(name, beside) or nearest(name, [k for k in known if not table.why_locked(k)])
    if near and (reason := table.why_locked(near)):
        return f"is not a key of {engine}; {near} is, but it is set by ASTuner: {reason}"
    hint = f"did you mean {near}?" if near else else_
    return f"is not a key of {engine}" + (f"; {hint}" if hint else "")


def platform(
    backbone: str, *, engine_has_others: bool, on_gpus: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> Mapping[str, Any]:
    """Return engine settings required by this machine: few on GPUs, many on a CPU.

    A platform is an entry point of the group ``astuner_<backbone>.platforms``, selected by ``<BACKBONE>_PLATFORM``: a
    function without arguments that returns the settings. Keys with a leading ``?`` give way to what a user wrote.

    :param engine_has_others: Whether to leave unregistered names to the engine, as VERL supports some platforms itself
        and others through packages.
    :param on_gpus: Settings if no platform is selected.
    :raises ConfigError: No installed package provides the selected platform.
    """
    variable, group = f"{backbone.upper()}_PLATFORM", f"astuner_{backbone}.platforms"
    name = env.get(variable, "").strip().lower()
    for point in entry_points(group=group, name=name):
        found: Mapping[str, Any] = point.load()()
        return found
    if not name:
        return on_gpus
    if engine_has_others and name != "cpu":
        return {}
    brought = ", ".join(sorted({point.name for point in entry_points(group=group)})) or "none"
    instead = (
        f"from a clone of ASTuner's repository, run: pip install -e plugins/astuner_{backbone}/cpu"
        if name == "cpu"
        else f"available: {brought}; for GPUs, unset it"
    )
    raise ConfigError(f"{variable}={name}, but no installed package provides this platform; {instead}")
