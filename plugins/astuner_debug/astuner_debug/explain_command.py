"""``astuner config explain KEY`` describes a key; ``astuner config schema`` prints a schema of all keys for editors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from astuner import (
    describe_field,
    field_at,
    find_optional_part,
    honoured_by,
    key_models,
    load_config,
    section_of,
    walk_fields,
)
from astuner.contracts.commands import JsonOption, command_line, write_json
from astuner.contracts.errors import ConfigError, did_you_mean
from astuner.contracts.parts import OlderSpellingsPart
from astuner.contracts.places import Key, dotted
from astuner.contracts.secrets import is_secret
from astuner.contracts.section import OpenSection

if TYPE_CHECKING:
    from astuner import Config, PluginManager


def schema(ctx: typer.Context) -> None:
    """Print a JSON schema of experiment files for editors."""
    typer.echo(json.dumps(json_schema(command_line(ctx).plugins), indent=2, ensure_ascii=False, default=str))


def explain(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="Key, such as rollout.num_repeat.", show_default=False)],
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Also show its value in FILE.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain a key: its meaning, allowed values and the backbones that support it."""
    plugins = command_line(ctx).plugins
    config = load_config(file, plugins=plugins) if file is not None else None
    info = find_key(key, plugins, config)
    if as_json:
        write_json(vars(info))
    else:
        typer.echo("\n".join(_lines(info)))


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """Description of one key."""

    key: str
    doc: str
    type: str
    """Allowed values, e.g. ``whole number ≥ 1``."""
    default: Any = None
    required: bool = False
    keys: tuple[str, ...] = ()
    """Keys of a section."""
    honoured_by: tuple[str, ...] = ()
    """Installed backbones that support the key."""
    value: Any = None
    """Value in the given experiment."""
    origin: str = ""
    """Where that value comes from; empty without an experiment."""


def find_key(key: str, manager: PluginManager, config: Config | None = None) -> KeyInfo:
    """Return the description of ``key`` and its value in ``config``.

    :param key: The full key, or an unambiguous ending of it.
    :raises ConfigError: The key does not exist, is ambiguous, or was renamed or removed.
    """
    full, older = _whole(key, manager), _older(manager)
    if now := older.renamed.get(full):
        raise ConfigError(f"{full} is now {now}; try: astuner config explain {now}")
    if full in older.gone:
        raise ConfigError(f"{full} was removed: {older.gone[full]}")
    found = _find(full, manager)
    if found is None:
        known = [info.key for info in reference(manager)]
        raise ConfigError(f"there is no key {full}{did_you_mean(full, known, '; `astuner config schema` lists all')}")
    here = {name: (value, origin) for name, value, origin in config.items()} if config is not None else {}
    value, origin = here.get(full, (None, ""))
    return replace(found, value=value, origin=origin)


def _older(manager: PluginManager) -> OlderSpellingsPart:
    found: OlderSpellingsPart = (find_optional_part(manager, "older_spellings") or OlderSpellingsPart)()
    return found


def _whole(key: str, manager: PluginManager) -> str:
    """Return the full key for a key or its ending; current keys take precedence over older ones."""
    sections = [dotted(prefix) for prefix, _ in key_models(manager)]
    roots = {name.partition(".")[0] for name in sections}
    full, older = key if key.partition(".")[0] in roots else f"astuner.{key}", _older(manager)
    for known in ([*sections, *(info.key for info in reference(manager))], [*older.renamed, *older.gone]):
        if full in known:
            return full
        ending = [name for name in dict.fromkeys(known) if name.endswith(f".{key}")]
        if len(ending) > 1:
            raise ConfigError(f"{len(ending)} keys end with {key}; use one of: {', '.join(ending)}")
        if ending:
            return ending[0]
    return full


def reference(manager: PluginManager) -> Iterator[KeyInfo]:
    """Yield every key of the core and of installed plugins, in schema order, without backbone support."""
    for prefix, model in key_models(manager):
        for key, info in walk_fields(model, prefix):
            yield _info(dotted(key), info)


def _find(full: str, manager: PluginManager) -> KeyInfo | None:
    """Return the description of the full key ``full``; a plugin's section takes precedence over its parent."""
    key = tuple(full.split("."))
    for prefix, model in reversed(key_models(manager)):
        if key[: len(prefix)] != prefix:
            continue
        doc = " ".join((model.__doc__ or "").split()) if model.__doc__ != BaseModel.__doc__ else ""
        if key == prefix:
            return KeyInfo(key=full, doc=doc, type="section", keys=tuple(model.model_fields))
        if (info := field_at(model, key[len(prefix) :])) is not None:
            found = _info(full, info)
            if prefix != ("astuner",) or found.keys:
                return found
            return replace(found, honoured_by=tuple(honoured_by(full.partition(".")[2], found.default, manager)))
        if issubclass(model, OpenSection):  # its keys are known only to the plugin that reads them
            return KeyInfo(key=full, doc=doc, type="anything")
    return None


def _info(full: str, info: FieldInfo) -> KeyInfo:
    section = section_of(info)
    default = None if section is not None else info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined or is_secret(full.rpartition(".")[2]):
        default = None
    return KeyInfo(
        key=full,
        doc=" ".join((info.description or "").split()),
        type=describe_field(info),
        default=default,
        required=info.is_required(),
        keys=tuple(section.model_fields) if section is not None else (),
    )


def json_schema(manager: PluginManager) -> dict[str, Any]:
    """Return a JSON schema of experiment files with the installed plugins' sections, for editors."""
    definitions: dict[str, Any] = {}
    root: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ASTuner experiment",
        "type": "object",
        "required": ["astuner"],
        "properties": {},
    }
    models = key_models(manager)
    for key, model in models:
        at = root
        for part in key[:-1]:
            at = _follow(at["properties"][part], definitions)
        at.setdefault("properties", {})[key[-1]] = _schema_of(model, key, definitions)
    older = _older(manager)
    for old, about in {**{old: f"now {new}" for old, new in older.renamed.items()}, **older.gone}.items():
        at = root
        for part in old.split(".")[:-1]:
            at = _follow(at["properties"].setdefault(part, {"properties": {}}), definitions)
        at["properties"].setdefault(old.rpartition(".")[2], {}).update(deprecated=True, description=about)
    astuner = _follow(root["properties"]["astuner"], definitions)
    for name, info in models[0][1].model_fields.items():
        if (section := section_of(info)) is not None and issubclass(section, OpenSection):
            at = _follow(astuner["properties"][name], definitions)
            at["additionalProperties"] = {"type": ["object", "null"]}  # sections of plugins that are not installed
    return {**root, "$defs": definitions}


def _schema_of(model: type[BaseModel], key: Key, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the model's schema; its definitions are moved under a prefix to avoid name clashes."""
    prefix = dotted(key)
    schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for name, definition in schema.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = definition
    return schema


def _follow(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the object that a property contains or refers to."""
    reference = schema.get("$ref")
    found: dict[str, Any] = definitions[reference.removeprefix("#/$defs/")] if reference else schema
    return found


def _lines(info: KeyInfo) -> list[str]:
    lines = [info.key, f"  {info.doc}" if info.doc else "", f"  {info.type}"]
    if info.keys:
        lines.append(f"  keys: {', '.join(info.keys)}")
    else:
        lines.append("  required" if info.required else f"  default: {_shown(info.default)}")
    if info.origin:
        lines.append(f"  here: {_shown(info.value)}  ({info.origin})")
    if info.honoured_by:
        lines.append(f"  supported by: {', '.join(info.honoured_by)}")
    return [line for line in lines if line]


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
