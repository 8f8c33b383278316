"""Check a section against its schema and report all errors with their places.

This module reports unknown keys itself, with a suggestion, instead of leaving them to pydantic. So they are errors even
if a plugin's model would ignore them. `describe_field` describes the expected value of a field.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AliasChoices, AliasPath, BaseModel, ValidationError
from pydantic.fields import FieldInfo

import astuner
from astuner.contracts.places import Key, Report, Tree, did_you_mean, dotted
from astuner.contracts.secrets import is_secret, without_user

_WORDS = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "true or false",
    type(None): "null",
    list: "list",
    dict: "section",
    Any: "anything",
}
_BOUNDS = {
    "ge": "≥ {:,}",
    "gt": "> {:,}",
    "le": "≤ {:,}",
    "lt": "< {:,}",
    "min_length": "of length ≥ {}",
}


def key_spellings(model: type[BaseModel]) -> dict[str, str]:
    """Return every key that a section accepts -> the name of its field."""
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
    """Return the model of a field that is a section, or None."""
    models = [a for a in _members(info.annotation) if isinstance(a, type) and issubclass(a, BaseModel)]
    return models[0] if len(models) == 1 else None


def field_at(model: type[BaseModel], key: Key) -> FieldInfo | None:
    """Return the field for ``key`` (below ``model``), or None."""
    info: FieldInfo | None = None
    at: type[BaseModel] | None = model
    entry: type[BaseModel] | None = None
    for part in key:
        if entry is not None:  # a user-defined name, such as an agent's
            at, entry = entry, None
            continue
        if at is None or (name := key_spellings(at).get(part)) is None:
            return None
        info = at.model_fields[name]
        at, entry = section_of(info), entry_of(info)
    return info


def entry_of(info: FieldInfo) -> type[BaseModel] | None:
    """Return the model of the entries if the field maps names to sections, or None."""
    arguments = get_args(info.annotation) if get_origin(info.annotation) is dict else ()
    found = arguments[1] if len(arguments) == 2 else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def walk_fields(model: type[BaseModel], prefix: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Yield every field with its key; a section comes before its fields."""
    for name, info in model.model_fields.items():
        yield (*prefix, name), info
        if (section := section_of(info)) is not None:
            yield from walk_fields(section, (*prefix, name))


def accepts_bool(info: FieldInfo) -> bool:
    """Return whether true and false are valid values of the field."""
    members = _members(info.annotation)
    return bool in members or Any in members or any(isinstance(v, bool) for a in members for v in get_args(a))


def describe_field(info: FieldInfo) -> str:
    """Return a description such as ``"integer ≥ 1"``, ``"one of: stop, skip"`` or ``"section"``."""
    if section_of(info) is not None:
        return "section"
    words = _bounded(" or ".join(_word(member) for member in _members(info.annotation)), info.metadata)
    return f"{words} such as {_examples(info)}" if info.examples else words


def _examples(info: FieldInfo) -> str:
    """Return the examples of a field, which describe its pattern to users."""
    return " or ".join(map(str, info.examples or ()))


def _bounded(words: str, rules: Iterable[Any]) -> str:
    rules = [inner for rule in rules for inner in (rule.metadata if isinstance(rule, FieldInfo) else [rule])]
    bounds = [
        text.format(value)
        for rule in rules
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
    if origin is Annotated:
        return _bounded(_word(arguments[0]), arguments[1:])
    if origin is list:
        return f"list of {_word(arguments[0])}"
    if origin is tuple:
        return f"list of {len(arguments)}: {', '.join(_word(a) for a in arguments)}"
    return _WORDS.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


Model = TypeVar("Model", bound=BaseModel)
_FEW = 2
"""Maximum number of keys in other sections to suggest. If more match, the known keys of this section help more."""

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tables.yaml").read_text(encoding="utf-8"))
"""Contents of ``tables.yaml``: properties of keys, messages for pydantic's errors, and names of other tools."""
MEANT = {name: target for target, names in TABLES["meant"].items() for name in names}
"""Name of another tool -> ASTuner's key or keys, or advice."""
_OF_PLUGINS = ("task_reader", "task_judge", "services", "helper_models")
"""Sections whose subsections have keys with other meanings, so that only names with a section apply."""


def check_section(
    model: type[Model], tree: Tree, prefix: Key, report: Report, *, elsewhere: Collection[Key] = ()
) -> Model | None:
    """Return the section ``prefix`` of ``tree`` as an instance of ``model``, or None if it has errors.

    :param elsewhere: Keys to skip, because other code checks them.
    """
    before = len(report.problems)
    data = _known(model, tree.get(prefix) or {}, prefix, tree, report, elsewhere)
    try:
        result = model.model_validate(data)
    except ValidationError as e:
        _explain(e, model, tree, prefix, report)
        return None
    return result if len(report.problems) == before else None


def what_is_right(model: type[Model], tree: Tree, prefix: Key, *, elsewhere: Collection[Key] = ()) -> Model | None:
    """Return the section without the keys that `check_section` rejects, or None if one of them is required."""
    data = Tree(_known(model, tree.get(prefix) or {}, prefix, tree, Report(""), elsewhere))
    while True:
        try:
            return model.model_validate(data.data)
        except ValidationError as e:
            places = [tuple(map(str, entry["loc"])) for entry in e.errors(include_url=False)]
            # An error inside a list or in a member of a union invalidates the complete value.
            wrong = {next((at[:n] for n in range(len(at), 0, -1) if data.has(at[:n])), ()) for at in places}
            if () in wrong:
                return None
            for key in wrong:
                if data.has(key):
                    data.remove(key)


def unknown_key(key: Key, known: list[str], tree: Tree, report: Report) -> None:
    """Report an unknown key, with the most similar known key."""
    if key not in tree.places and any(default[: len(key)] == key for default in report.defaults):
        return  # a default in a written-out config that no longer exists
    parent = dotted(key[:-1])
    older = [old.rpartition(".") for old in (*report.older.renamed, *report.older.gone)]
    hint = _other_tools(key) or did_you_mean(
        key[-1], [*known, *(name for section, _, name in older if section == parent)]
    )
    of_others = _is_of_plugin(key) and keys_of_other_tools(key[-1:])
    elsewhere = {} if hint or of_others else report.whole_keys(key[-1])
    if 0 < len(elsewhere) <= _FEW and dotted(key) not in elsewhere:
        hint = f"; did you mean {' or '.join(elsewhere)}?"
    hint = hint or (f"; known keys: {', '.join(sorted(known))}" if known else "")
    said = report.who_adds(".".join(key[1:])) or f"{hint}{report.hint}"
    report.problem(tree.place(key), f"unknown key {dotted(key)}{said}")


def _other_tools(key: Key) -> str:
    """Return the end of a message if the key's name is one that other tools use, or an empty string."""
    if keys := keys_of_other_tools(key):
        return f"; did you mean {' and '.join(keys)}?"
    advice = MEANT.get(key[-1].lower(), "")
    return f"; {advice}" if " " in advice and not _is_of_plugin(key) else ""


def keys_of_other_tools(key: Key) -> list[str]:
    """Return ASTuner's full keys for a key with a name of other tools; empty if the name is unknown."""
    names = [part.lower().replace("-", "_") for part in key]
    target = MEANT.get(".".join(names[-2:])) or ("" if _is_of_plugin(key) else MEANT.get(names[-1], ""))
    keys = [f"astuner.{name}" for name in target.split(" and ")]
    return [] if not target or " " in "".join(keys) else keys


def _is_of_plugin(key: Key) -> bool:
    return len(key) > 3 and key[1] in _OF_PLUGINS


def _other_value(value: Any, allowed: Callable[[str], object]) -> str:
    """Return the end of a message if other tools use the value for an allowed one, or an empty string."""
    given = str(value).strip().lower()
    meant = (name for name, others in TABLES["meant_values"].items() if given in others and allowed(name))
    return next((f"; did you mean {name}?" for name in meant), "")


def _known(
    model: type[BaseModel], data: Any, prefix: Key, tree: Tree, report: Report, elsewhere: Collection[Key]
) -> Any:
    """Return ``data`` without unknown keys and with empty sections filled in; report errors to ``report``."""
    if not isinstance(data, dict):
        return data
    names, clean = key_spellings(model), {}
    for name, value in data.items():
        key = (*prefix, name)
        if key in elsewhere:
            continue
        if name not in names:
            if model.model_config.get("extra") == "allow":
                clean[name] = value
            else:
                unknown_key(key, list(model.model_fields), tree, report)
            continue
        info = model.model_fields[names[name]]
        section, entry = section_of(info), entry_of(info)
        if value is None and any(member in (type(None), Any) for member in _members(info.annotation)):
            clean[name] = None
        elif section is not None and (value is None or isinstance(value, dict)):
            clean[name] = _known(section, value or {}, key, tree, report, elsewhere)  # `rollout:` alone is empty
        elif entry is not None and isinstance(value, dict):
            clean[name] = {
                mine: _known(entry, {} if below is None else below, (*key, mine), tree, report, elsewhere)
                for mine, below in value.items()
            }
        elif isinstance(value, bool) and not accepts_bool(info):
            report.problem(tree.place(key), f"{dotted(key)} should be {describe_field(info)}, got {value}")
        else:
            clean[name] = value
    return clean


def _explain(error: ValidationError, model: type[BaseModel], tree: Tree, prefix: Key, report: Report) -> None:
    by_key: dict[Key, list[str]] = {}
    got: dict[Key, Any] = {}
    meant: dict[Key, str] = {}
    for entry in error.errors(include_url=False):
        key = _key_of(entry["loc"], model)
        context = {k: f"{v:g}" if isinstance(v, float) else v for k, v in (entry.get("ctx") or {}).items()}
        if entry["type"] == "missing":
            for name in _required(model, key):
                by_key.setdefault(name, []).append("is required")
        elif entry["type"] == "value_error":
            by_key.setdefault(key, []).append(f"is not valid: {context.get('error', entry['msg'])}")
        else:
            text = TABLES["should"].get(entry["type"], entry["msg"][0].lower() + entry["msg"][1:]).format(**context)
            got[key] = tree.get((*prefix, *key), entry["input"])
            info = field_at(model, key)
            pattern = re.compile(pattern_of(info)) if info is not None and info.examples else re.compile("")
            if entry["type"] == "literal_error":
                options = re.findall(r"'([^']*)'", text)
                meant[key] = _other_value(got[key], options.__contains__) or did_you_mean(str(got[key]), options)
            elif info is not None and pattern.pattern:
                text = f"should be {_examples(info)}"
                meant[key] = _other_value(got[key], pattern.search)
            by_key.setdefault(key, []).append(text)
    for key, texts in by_key.items():
        full = (*prefix, *key)
        if any(re.match(rf"{re.escape(dotted(full))}[: ]", text) for _, text in report.problems):
            continue  # reported earlier and removed, so it only appears to be missing
        tail = f", got {_shown(full, got[key])}{meant.get(key, '')}" if key in got else ""
        report.problem(tree.place(full), f"{dotted(full)} {' or '.join(dict.fromkeys(texts))}{tail}")


def pattern_of(info: FieldInfo) -> str:
    """Return the regular expression of a field, or an empty string. Messages show the field's examples instead."""
    return next((str(found) for rule in info.metadata if (found := getattr(rule, "pattern", None))), "")


def _key_of(loc: tuple[int | str, ...], model: type[BaseModel]) -> Key:
    """Return the key of a pydantic location, without the union members that pydantic adds to it."""
    key: Key = ()
    for part in loc:
        info = field_at(model, key) if key else None
        if isinstance(part, int) or not key or (info is not None and (section_of(info) or entry_of(info))):
            key = (*key, str(part))
    return key


def _required(model: type[BaseModel], key: Key) -> list[Key]:
    """Return the required keys of a missing section, or ``key`` itself if it is not a section."""
    info = field_at(model, key)
    section = section_of(info) if info is not None else None
    if section is None:
        return [key]
    return [(*key, name) for name, below in section.model_fields.items() if below.is_required()] or [key]


def _shown(key: Key, value: Any) -> str:
    if is_secret(key[-1]):
        return "a different value"
    text = "a section" if isinstance(value, Mapping) else without_user(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
