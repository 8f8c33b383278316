"""A YAML file that people edit, against its schema, every mistake with its line.

Plain data only: no aliases, which can make a small file enormous, no tags, no key twice.  Nothing is interpolated: a
criterion may hold ``${…}``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from astuner.config.places import did_you_mean
from astuner.contracts.errors import ConfigError

MAX_BYTES = 1 << 20
_DEEPEST = 20

Model = TypeVar("Model", bound=BaseModel)
Loc = tuple[Any, ...]


def read_yaml(path: Path, model: type[Model], hint: str) -> Model:
    """The file as an instance of ``model``.

    :param hint: what to type for a file that is not there, or is empty.
    :raises ConfigError: everything that is wrong with it, each with its file and line.
    """
    node = _compose(path, hint)
    lines: dict[Loc, int] = {}
    problems: list[tuple[int, str]] = []
    data = _data(node, (), lines, problems)
    try:
        found = model.model_validate(data)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        inside = {error["loc"][:n] for error in errors for n in range(len(error["loc"]))}
        problems += [_explained(error, model, lines) for error in errors if error["loc"] not in inside]
    else:
        if not problems:
            return found
    raise ConfigError([f"{path}:{line}: {text}" for line, text in sorted(problems)])


def _compose(path: Path, hint: str) -> yaml.MappingNode:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}; {hint}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: is longer than {MAX_BYTES >> 20} MiB; {hint}")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}:{raw[: e.start].count(10) + 1}: is not UTF-8; save the file as UTF-8") from None
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                at = event.start_mark.line + 1 if event.start_mark else 1
                raise ConfigError(f"{path}:{at}: aliases (*{event.anchor}) are not read")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: not YAML: {e.problem or e.context}") from None
    except yaml.YAMLError as e:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(e).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None
    if node is None:
        raise ConfigError(f"{path}: the file is empty; {hint}")
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}:{node.start_mark.line + 1}: expected `key: value` lines; {hint}")
    return node


def _data(node: yaml.Node, loc: Loc, lines: dict[Loc, int], problems: list[tuple[int, str]]) -> Any:
    """The node as plain data; lines and problems are added to."""
    line = node.start_mark.line + 1
    lines.setdefault(loc, line)
    if len(loc) > _DEEPEST:
        problems.append((line, "it is nested too deeply"))
        return None
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key, value in node.value:
            name, here = str(key.value), (*loc, str(key.value))
            if name in found:
                problems.append((key.start_mark.line + 1, f"{name} is set twice (first in line {lines[here]})"))
                continue
            lines[here] = key.start_mark.line + 1
            found[name] = _data(value, here, lines, problems)
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_data(item, (*loc, index), lines, problems) for index, item in enumerate(node.value)]
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as e:
        problems.append((line, f"{'.'.join(map(str, loc))}: {' '.join(str(e).split())[:200]}"))
        return None


def _explained(error: Any, model: type[BaseModel], lines: dict[Loc, int]) -> tuple[int, str]:
    loc = error["loc"]
    line = next((lines[loc[:n]] for n in range(len(loc), -1, -1) if loc[:n] in lines), 1)
    key = ".".join(map(str, loc))
    if error["type"] == "extra_forbidden":
        known = _keys_beside(loc, model)
        hint = did_you_mean(str(loc[-1]), known, f"; known here: {', '.join(known)}" if known else "")
        return line, f"unknown key {key}{hint}"
    if error["type"] == "missing":
        return line, f"{key} is required"
    if error["type"] == "value_error":
        return line, f"{key + ': ' if key else ''}{error['ctx']['error']}"
    got = repr(error["input"])
    return line, f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {got if len(got) < 80 else got[:77] + '…'}"


def _keys_beside(loc: Loc, model: type[BaseModel]) -> list[str]:
    """The keys that the section of an unknown one has; none where it cannot be told."""
    at: Any = model
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        field = at.model_fields.get(part) if at is not None else None
        at = next(iter(_models_in(field.annotation)), None) if field is not None else None
    return list(at.model_fields) if at is not None else []


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for part in getattr(annotation, "__args__", ()) for m in _models_in(part)]
