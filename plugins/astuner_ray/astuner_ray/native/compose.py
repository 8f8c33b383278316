"""An engine's configuration for one experiment, layer upon layer:

    the engine's defaults  <  its table's rows  <  what the platform needs  <  what the person wrote in its own words

Nothing is dropped: a key that the engine does not have, or that ASTuner must set itself, is an error with its place.
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
"""In place of what is known of a section that has keys."""


def layered(
    facts: Facts,
    table: Table[Any],
    platform: Iterable[tuple[str, Any]],
    mine: Mapping[str, Any],
    *,
    get: Callable[[str], Any],
    put: Callable[[str, Any], str],
) -> tuple[str, ...]:
    """Put the layers over an engine's defaults; what a person should know of what replaced what.

    :param mine: as `checked` gives it.
    :param get: the engine's key -> its value so far.
    :param put: sets a key; its name without ``+``.
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
    """The engine's keys that the person wrote -> their values.

    :param known: what is known of the engine's keys and sections, `HAS_KEYS` of one that has keys.
    :param engine: what messages call it.
    :param unlike: of which kind the value of a known key is to be, if this one is of another; else nothing.
    :param is_free: whether the engine leaves what stands below such a section to the person.
    :param else_: what to say of a key that is unknown and near no other one; may name the ``key`` with a ``+``.  Given
        where a key can be added with a ``+``.
    :raises ConfigError: all that is wrong with any of them.
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
    """``settings`` where flash-attn is not installed, which engines take for granted; nothing where it is."""
    return {} if find_spec("flash_attn") else settings


def no_key(name: str, known: Iterable[str], table: Table[Any], *, engine: str, else_: str = "") -> str:
    """What to say of a key that the engine does not have.

    :param else_: what to say where no other key is near.
    """
    known = list(known)
    beside = [k for k in known if k.rpartition(".")[0] == name.rpartition(".")[0]]
    near = nearest(name, beside) or nearest(name, [k for k in known if not table.why_locked(k)])
    if near and (reason := table.why_locked(near)):
        return f"is no key of {engine}; {near} is one, and is set by ASTuner: {reason}"
    hint = f"did you mean {near}?" if near else else_
    return f"is no key of {engine}" + (f"; {hint}" if hint else "")


def platform(
    backbone: str, *, engine_has_others: bool, on_gpus: Mapping[str, Any], env: Mapping[str, str] = os.environ
) -> Mapping[str, Any]:
    """What the machine asks of an engine, beside the experiment: little on GPUs, much on a CPU.

    A platform is an entry point of the group ``astuner_<backbone>.platforms``, named as ``<BACKBONE>_PLATFORM`` names
    it: a function without arguments, whose answer this is; keys with a leading
    ``?`` give way to what a person wrote.

    :param engine_has_others: whether a name that nobody registers there is the engine's own matter, as VERL knows some
        platforms itself and other packages bring it more.
    :param on_gpus: the answer where no platform is named.
    :raises ConfigError: nobody brings the platform that is named.
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
        f"in ASTuner's repository type: pip install -e plugins/astuner_{backbone}/cpu"
        if name == "cpu"
        else f"there are: {brought}; for GPUs unset it"
    )
    raise ConfigError(f"{variable}={name}, and no package that is installed here brings that platform; {instead}")
