"""One section against its schema, every mistake at once, each at its place.

Unknown keys are found here rather than by pydantic, so that they are errors with a suggestion in every section, also
where a plugin's model would ignore them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from astuner.config.fields import accepts_bool, accepts_none, describe, entry_of, field_at, section_of, spellings
from astuner.contracts.places import Key, Report, Tree, did_you_mean, dotted
from astuner.contracts.secrets import is_secret, without_user

Model = TypeVar("Model", bound=BaseModel)
_FEW = 2
"""Keys elsewhere that are suggested; of a name that is everywhere none is likelier than what is known here."""

_SHOULD: dict[str, str] = {
    "int_parsing": "should be a whole number",
    "int_type": "should be a whole number",
    "int_from_float": "should be a whole number",
    "float_parsing": "should be a number",
    "float_type": "should be a number",
    "finite_number": "should be a finite number",
    "bool_parsing": "should be true or false",
    "bool_type": "should be true or false",
    "string_type": "should be text in quotes",
    "string_too_short": "should not be empty",
    "string_pattern_mismatch": "should match {pattern}",
    "list_type": "should be a list",
    "too_long": "should have at most {max_length} entries",
    "too_short": "should have at least {min_length} entries",
    "tuple_type": "should be a list",
    "dict_type": "should be a section (keys below it)",
    "model_type": "should be a section (keys below it)",
    "model_attributes_type": "should be a section (keys below it)",
    "greater_than_equal": "should be at least {ge}",
    "greater_than": "should be more than {gt}",
    "less_than_equal": "should be at most {le}",
    "less_than": "should be less than {lt}",
    "literal_error": "should be {expected}",
}


def check(
    model: type[Model], tree: Tree, prefix: Key, report: Report, *, elsewhere: Collection[Key] = ()
) -> Model | None:
    """The section ``prefix`` of ``tree`` as an instance of ``model``; None when there were problems.

    :param elsewhere: keys that are checked by somebody else.
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
    """The section as if the keys that `check` refuses had not been written; None where one of them is required."""
    data = _known(model, tree.get(prefix) or {}, prefix, tree, Report(""), elsewhere)
    while True:
        try:
            return model.model_validate(data)
        except ValidationError as e:
            wrong = {_within(data, entry["loc"]) for entry in e.errors(include_url=False)}
            if () in wrong:
                return None
            for key in wrong:
                section = functools.reduce(lambda at, name: at.get(name, {}), key[:-1], data)
                section.pop(key[-1], None)


def _within(data: Any, loc: tuple[int | str, ...]) -> Key:
    """The key in ``data`` that a pydantic location is in: beyond it come list entries, and members of a union."""
    key: Key = ()
    for part in map(str, loc):
        if not isinstance(data, dict) or part not in data:
            break
        key, data = (*key, part), data[part]
    return key


def unknown_key(key: Key, known: list[str], tree: Tree, report: Report) -> None:
    """Report a key that nothing reads, with the nearest one that something does."""
    if key not in tree.places and any(default[: len(key)] == key for default in report.defaults):
        return  # of a written-out config: what is not here any more, and nobody wrote
    parent = dotted(key[:-1])
    older = [old.rpartition(".") for old in (*report.older.renamed, *report.older.gone)]
    hint = did_you_mean(key[-1], [*known, *(name for section, _, name in older if section == parent)])
    if not hint and 0 < len(elsewhere := report.whole_keys(key[-1])) <= _FEW and dotted(key) not in elsewhere:
        hint = f"; did you mean {' or '.join(elsewhere)}?"
    if said := report.who_adds(".".join(key[1:])):
        report.problem(tree.place(key), f"unknown key {dotted(key)}{said}")
        return
    hint = hint or (f"; known here: {', '.join(sorted(known))}" if known else "")
    report.problem(tree.place(key), f"unknown key {dotted(key)}{hint}{report.hint}")


def _known(
    model: type[BaseModel], data: Any, prefix: Key, tree: Tree, report: Report, elsewhere: Collection[Key]
) -> Any:
    """``data`` without unknown keys and with empty sections filled in; what was wrong goes into ``report``."""
    if not isinstance(data, dict):
        return data
    names, clean = spellings(model), {}
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
        if value is None and accepts_none(info):
            clean[name] = None
        elif section is not None and (value is None or isinstance(value, dict)):
            clean[name] = _known(section, value or {}, key, tree, report, elsewhere)  # `rollout:` alone is empty
        elif entry is not None and isinstance(value, dict):
            clean[name] = {
                mine: _known(entry, {} if below is None else below, (*key, mine), tree, report, elsewhere)
                for mine, below in value.items()
            }
        elif isinstance(value, bool) and not accepts_bool(info):
            report.problem(tree.place(key), f"{dotted(key)} should be {describe(info)}, got {value}")
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
            by_key.setdefault(key, []).append(f"is not possible: {context.get('error', entry['msg'])}")
        else:
            text = _SHOULD.get(entry["type"], entry["msg"][0].lower() + entry["msg"][1:]).format(**context)
            got[key] = tree.get((*prefix, *key), entry["input"])
            if entry["type"] == "literal_error":
                meant[key] = did_you_mean(str(got[key]), re.findall(r"'([^']*)'", text))
            by_key.setdefault(key, []).append(text)
    for key, texts in by_key.items():
        full = (*prefix, *key)
        if any(re.match(rf"{re.escape(dotted(full))}[: ]", text) for _, text in report.problems):
            continue  # refused before it came here, and so it is missing
        tail = f", got {_shown(full, got[key])}{meant.get(key, '')}" if key in got else ""
        report.problem(tree.place(full), f"{dotted(full)} {' or '.join(dict.fromkeys(texts))}{tail}")


def _key_of(loc: tuple[int | str, ...], model: type[BaseModel]) -> Key:
    """The key of a pydantic location, without the union members that pydantic adds to it."""
    key: Key = ()
    for part in loc:
        info = field_at(model, key) if key else None
        if isinstance(part, int) or not key or (info is not None and (section_of(info) or entry_of(info))):
            key = (*key, str(part))
    return key


def _required(model: type[BaseModel], key: Key) -> list[Key]:
    """A missing section asks for the keys it requires, not for itself."""
    info = field_at(model, key)
    section = section_of(info) if info is not None else None
    if section is None:
        return [key]
    return [(*key, name) for name, below in section.model_fields.items() if below.is_required()] or [key]


def _shown(key: Key, value: Any) -> str:
    if is_secret(key[-1]):
        return "something else"
    text = "a section" if isinstance(value, Mapping) else without_user(repr(value))
    return text if len(text) <= 80 else f"{text[:77]}..."
