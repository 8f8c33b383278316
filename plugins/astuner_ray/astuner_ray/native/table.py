"""From ``astuner.*`` to an engine's keys: one `Row` for each key of the engine that ASTuner sets, and why.

A key that ASTuner itself acts on is *locked*: the engine's alone would make the two disagree, so a person may not write
it below the engine's section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from astuner.contracts.errors import ConfigError
from astuner_ray.native.facts import Facts

_F = TypeVar("_F", bound=Facts, contravariant=True)


class _Unset:
    """`UNSET`: the engine's own default stays."""

    def __repr__(self) -> str:
        return "the engine's default"


UNSET: Final = _Unset()


@dataclass(frozen=True, kw_only=True)
class Row(Generic[_F]):
    """One key of the engine."""

    native: str
    """Dotted; a leading ``+`` adds a key that the engine's own files do not have."""
    ours: tuple[str, ...] = ()
    """The keys below ``astuner.`` that decide it; none: it is the same in every experiment."""
    value: Callable[[_F], Any]
    """Its value, or `UNSET`."""
    says: str = ""
    """What the value is, in words or the engine's; empty: that of the one key of ours."""
    why: str = ""
    locked: bool = False


def same(ours: str, native: str, why: str = "", *, locked: bool = False, says: str = "", unless: Any = ()) -> Row[Any]:
    """The engine's key has the value of ours; left alone where ours is ``unless``."""

    def value(facts: Facts) -> Any:
        found: Any = facts.a
        for name in ours.split("."):
            found = getattr(found, name)
        return UNSET if found == unless else list(found) if isinstance(found, tuple) else found

    return Row(native=native, ours=(ours,), value=value, says=says, why=why, locked=locked)


def fixed(native: str, value: Any, why: str, *, locked: bool = True) -> Row[Any]:
    """The engine's key has one value in every experiment."""
    return Row(native=native, value=lambda facts: value, says=f"{value}", why=why, locked=locked)


def precision(facts: Facts) -> Any:
    """``model.dtype`` as VERL's FSDP spells the type of the passes."""
    return {"auto": UNSET, "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[facts.a.model.dtype]


def chat_template(facts: Facts) -> Any:
    """The text of the file that replaces the tokenizer's own template.

    :raises ConfigError: it cannot be read.
    """
    template = facts.a.model.chat_template
    if template is None:
        return UNSET
    try:
        return (facts.config.base_dir / template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"astuner.model.chat_template: cannot read {facts.config.base_dir / template}: {e}") from None


def checkpointing(facts: Facts) -> Any:
    """``activation_checkpointing`` where it is written; the engines turn it on themselves."""
    written = facts.is_written("trainer_common.activation_checkpointing")
    return facts.a.trainer_common.activation_checkpointing if written else UNSET


def why_locked(native: str, rows: Iterable[Row[Any]], sections: Mapping[str, str]) -> str:
    """Why a person may not write the engine's key ``native`` (without ``+``); empty if it is free.

    :param sections: further keys and sections that they may not write, and what instead.
    """
    for row in rows:
        if row.native.removeprefix("+") == native:
            if not row.locked:
                return ""
            keys = " and ".join(f"astuner.{key}" for key in row.ours)
            return f"write {keys} instead" if keys else row.why
    section = max((s for s in sections if native == s or native.startswith(f"{s}.")), key=len, default="")
    return sections.get(section, "")
