"""Walking a schema: which keys a section has, and what a field expects, in a person's words."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import AliasChoices, AliasPath, BaseModel
from pydantic.fields import FieldInfo

from astuner.contracts.places import Key

_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    type(None): "null",
    list: "list",
    dict: "section",
    Any: "anything",
}
_BOUNDS = {
    "ge": "≥ {}",
    "gt": "> {}",
    "le": "≤ {}",
    "lt": "< {}",
    "min_length": "of length ≥ {}",
    "pattern": "matching {}",
}


def spellings(model: type[BaseModel]) -> dict[str, str]:
    """Every key a section accepts -> the name of its field."""
    found: dict[str, str] = {}
    for name, info in model.model_fields.items():
        found[name] = name
        alias = info.validation_alias
        for choice in alias.choices if isinstance(alias, AliasChoices) else [alias]:
            if isinstance(choice, AliasPath):
                choice = str(choice.path[0])
            if isinstance(choice, str):
                found[choice] = name
    return found


def section_of(info: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a section, else None."""
    models = [a for a in _members(info.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return models[0] if len(models) == 1 else None


def field_at(model: type[BaseModel], key: Key) -> FieldInfo | None:
    """The field that ``key`` (below ``model``) names, or None."""
    info: FieldInfo | None = None
    at: type[BaseModel] | None = model
    entry: type[BaseModel] | None = None
    for part in key:
        if entry is not None:  # a name of the person's own, such as an agent's
            at, entry = entry, None
            continue
        if at is None or (name := spellings(at).get(part)) is None:
            return None
        info = at.model_fields[name]
        at, entry = section_of(info), entry_of(info)
    return info


def entry_of(info: FieldInfo) -> type[BaseModel] | None:
    """The model of each entry of a field that is a section of named sections, else None."""
    arguments = get_args(info.annotation) if get_origin(info.annotation) is dict else ()
    found = arguments[1] if len(arguments) == 2 else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def walk(model: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every field, sections before what is in them."""
    for name, info in model.model_fields.items():
        yield (*prefix, name), info
        if (section := section_of(info)) is not None:
            yield from walk(section, (*prefix, name))


def accepts_bool(info: FieldInfo) -> bool:
    members = _members(info.annotation)
    return bool in members or Any in members or any(isinstance(v, bool) for a in members for v in get_args(a))


def accepts_none(info: FieldInfo) -> bool:
    members = _members(info.annotation)
    return type(None) in members or Any in members


def describe(info: FieldInfo) -> str:
    """``"whole number ≥ 1"``, ``"one of: stop, skip"``, ``"section"``."""
    if section_of(info) is not None:
        return "section"
    words = " or ".join(_word(member) for member in _members(info.annotation))
    bounds = [
        text.format(value)
        for rule in info.metadata
        for name, text in _BOUNDS.items()
        if (value := getattr(rule, name, None)) is not None
    ]
    return " ".join([words, ", ".join(bounds)]).strip()


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _word(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of: {', '.join(str(a) for a in arguments)}"
    if origin is list:
        return f"list of {_word(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(_word(a) for a in arguments)}"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))
