"""What every key means: for ``astuner config explain``, for editors (JSON schema) and for the docs."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from astuner.config.capabilities import honoured_by
from astuner.config.fields import describe, field_at, section_of, walk
from astuner.config.loaded import Config
from astuner.config.reading import read_text
from astuner.config.schema import OpenSection, with_packages
from astuner.config.sections import HOMES
from astuner.contracts.errors import ConfigError, PluginError
from astuner.contracts.places import Key, Place, Report, did_you_mean, dotted
from astuner.contracts.secrets import is_secret
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager


@dataclass(frozen=True, kw_only=True)
class KeyInfo:
    """One key, for a person."""

    key: str
    doc: str
    type: str
    """What may be written, e.g. ``whole number ≥ 1``."""
    default: Any = None
    required: bool = False
    keys: tuple[str, ...] = ()
    """Of a section: the keys in it."""
    honoured_by: tuple[str, ...] = ()
    """Installed backbones."""
    value: Any = None
    """Its value in the experiment that was asked about."""
    origin: str = ""
    """Where that value comes from; empty without an experiment."""


def explain(key: str, manager: PluginManager, config: Config | None = None) -> KeyInfo:
    """What ``key`` means, and its value in ``config``.

    :param key: the whole key, or its last parts as far as no other key has the same.
    :raises ConfigError: there is no such key, or there are several; an older one says what it is now.
    """
    models = dict(sections(manager))
    full = _whole(key, models, manager)
    older = registry.older_spellings(manager)
    if now := older.renamed.get(full):
        raise ConfigError(f"{full} is now {now}; try: astuner config explain {now}")
    if full in older.gone:
        raise ConfigError(f"{full} is not a key any more: {older.gone[full]}")
    found = _model_info(full, models, manager) or _field_info(full, models, manager) or _free_info(full, models)
    if found is None:
        known = [info.key for info in reference(manager)]
        raise ConfigError(f"there is no key {full}{did_you_mean(full, known, '; `astuner config schema` lists all')}")
    if config is None:
        return found
    settings = {name: (value, origin) for name, value, origin in config.items()}
    value, origin = settings.get(full, (None, ""))
    return KeyInfo(**{**vars(found), "value": value, "origin": origin})


def _whole(key: str, models: dict[Key, type[BaseModel]], manager: PluginManager) -> str:
    """The whole key that ``key`` is, or is the end of; today's keys before older ones."""
    full = key if key.partition(".")[0] in ("astuner", *(k[0] for k in models)) else f"astuner.{key}"
    today = list(dict.fromkeys([*map(dotted, models), *(info.key for info in reference(manager))]))
    older = registry.older_spellings(manager)
    for known in (today, [*older.renamed, *older.gone]):
        if full in known or full == "astuner":
            return full
        ending = [name for name in known if name.endswith(f".{key}")]
        if len(ending) > 1:
            raise ConfigError(f"{len(ending)} keys end in {key}; write one of them: {', '.join(ending)}")
        if ending:
            return ending[0]
    return full


def whole_keys(key: str, manager: PluginManager) -> list[str]:
    """What ``key`` may have been meant to be, the likeliest first; empty when nothing comes near.

    A section may stand anywhere (``tracing.keep``), and so may a key of its own (``num_repeat``); else the first part
    may be misspelt (``trainer.logger``).
    """
    known = list(dict.fromkeys([*(dotted(k) for k, _ in sections(manager)), *(i.key for i in reference(manager))]))
    older = registry.older_spellings(manager)
    if f"astuner.{key}" in {*known, *older.renamed, *older.gone}:
        return [f"astuner.{key}"]
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        begins, rest = ".".join(parts[:n]), "".join(f".{part}" for part in parts[n:])
        found = sorted((name for name in known if name.endswith(f".{begins}")), key=lambda name: name.count("."))
        if f"astuner.{begins}" in found:
            found = [f"astuner.{begins}"]
        if found:
            return [f"{name}{rest}" for name in found[:3]]
    if len(parts) > 1 and (near := difflib.get_close_matches(parts[0], list(with_packages(manager).model_fields), 1)):
        return [".".join(["astuner", near[0], *parts[1:]])]
    return []


def is_section(key: str, manager: PluginManager) -> bool:
    """Whether the whole key ``key`` has keys below it."""
    try:
        return bool(explain(key, manager).keys)
    except ConfigError:
        return False


def reference(manager: PluginManager) -> Iterator[KeyInfo]:
    """Every key of the core and of the installed plugins, in the schema's order; without asking backbones."""
    models: list[tuple[Key, type[BaseModel]]] = [(("astuner",), with_packages(manager)), *sections(manager)]
    for prefix, model in models:
        for key, info in walk(model, prefix):
            yield _info(dotted(key), info)


def sections(manager: PluginManager) -> Iterator[tuple[Key, type[BaseModel]]]:
    """The sections that installed plugins bring, and their models; those that cannot be imported are left out."""
    homes = {home.kind: home.section for home in HOMES} | {"backbone": ()}
    for kind, prefix in homes.items():
        for plugin, name, provider in manager.offers(kind):
            if provider.config is None:
                continue
            offer = registry.offer(manager, kind, f"{plugin.name}/{name}")
            try:
                yield (*prefix, offer.full_name), registry.import_target(provider.config)
            except PluginError:
                continue


def json_schema(manager: PluginManager) -> dict[str, Any]:
    """A JSON schema of experiment files with the installed plugins' sections, for editors."""
    definitions: dict[str, Any] = {}
    root: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "ASTuner experiment",
        "type": "object",
        "required": ["astuner"],
        "properties": {"astuner": _schema_of(with_packages(manager), ("astuner",), definitions)},
    }
    for key, model in sections(manager):
        at = root
        for part in key[:-1]:
            at = _follow(at["properties"][part], definitions)
        at.setdefault("properties", {})[key[-1]] = _schema_of(model, key, definitions)
    older = registry.older_spellings(manager)
    for old, about in {**{old: f"now {new}" for old, new in older.renamed.items()}, **older.gone}.items():
        at = root
        for part in old.split(".")[:-1]:
            at = _follow(at["properties"].setdefault(part, {"properties": {}}), definitions)
        at["properties"].setdefault(old.rpartition(".")[2], {}).update(deprecated=True, description=about)
    for home in HOMES:
        at = root
        for part in home.section:
            at = _follow(at["properties"][part], definitions)
        at["additionalProperties"] = {"type": ["object", "null"]}  # sections of plugins that are not installed here
    return {**root, "$defs": definitions}


def with_origins(config: Config) -> str:
    """The settings as YAML, with each key's origin as a comment."""
    text = yaml.safe_dump(config.as_dict(), sort_keys=False, allow_unicode=True, width=10_000)
    places = read_text(text, "", Report("")).places
    lines = text.splitlines()
    width = max(len(line) for line in lines)
    for key, _, origin in config.items():
        place: Place = places[tuple(key.split("."))]
        lines[place.line - 1] = f"{lines[place.line - 1]:<{min(width, 60)}}  # {origin}"
    return "\n".join(lines)


def _model_info(full: str, models: dict[Key, type[BaseModel]], manager: PluginManager) -> KeyInfo | None:
    model = with_packages(manager) if full == "astuner" else models.get(tuple(full.split(".")))
    if model is None:
        return None
    doc = " ".join((model.__doc__ or "").split()) if model.__doc__ != BaseModel.__doc__ else ""
    return KeyInfo(key=full, doc=doc, type="section", keys=tuple(model.model_fields))


def _field_info(full: str, models: dict[Key, type[BaseModel]], manager: PluginManager) -> KeyInfo | None:
    key = tuple(full.split("."))
    candidates: list[tuple[Key, type[BaseModel]]] = [(("astuner",), with_packages(manager)), *models.items()]
    for prefix, model in candidates:
        if key[: len(prefix)] == prefix and (info := field_at(model, key[len(prefix) :])) is not None:
            found = _info(full, info)
            if prefix != ("astuner",) or found.keys:
                return found
            backbones = honoured_by(full.partition(".")[2], found.default, manager)
            return KeyInfo(**{**vars(found), "honoured_by": tuple(backbones)})
    return None


def _free_info(full: str, models: dict[Key, type[BaseModel]]) -> KeyInfo | None:
    """A key of a plugin's open section: what it means is known to whoever the plugin hands it to."""
    for prefix, model in models.items():
        if issubclass(model, OpenSection) and full.startswith(f"{dotted(prefix)}."):
            return KeyInfo(key=full, doc=" ".join((model.__doc__ or "").split()), type="anything")
    return None


def _info(full: str, info: FieldInfo) -> KeyInfo:
    section = section_of(info)
    default = None if section is not None else info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined or is_secret(full.rpartition(".")[2]):
        default = None
    return KeyInfo(
        key=full,
        doc=" ".join((info.description or "").split()),
        type=describe(info),
        default=default,
        required=info.is_required(),
        keys=tuple(section.model_fields) if section is not None else (),
    )


def _schema_of(model: type[BaseModel], key: Key, definitions: dict[str, Any]) -> dict[str, Any]:
    """The model's schema, its definitions moved to where those of other models cannot clash with them."""
    prefix = dotted(key)
    schema = model.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for name, definition in schema.pop("$defs", {}).items():
        definitions[f"{prefix}.{name}"] = definition
    return schema


def _follow(schema: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """The object behind a property that may be a reference."""
    reference = schema.get("$ref")
    found: dict[str, Any] = definitions[reference.removeprefix("#/$defs/")] if reference else schema
    return found
