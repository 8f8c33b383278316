"""``${…}`` in values: OmegaConf's interpolation, over what was written and the schema's defaults.

Every interpolation is tried, so one that fails does not hide the next; each failure names its own line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from astuner.config.fields import section_of
from astuner.config.implied import imply
from astuner.contracts.places import Key, Report, Tree, dotted
from astuner.contracts.secrets import is_removed
from astuner.plugins.loader import PluginManager


def interpolate(tree: Tree, root: str, report: Report, model: type[BaseModel], manager: PluginManager) -> None:
    """Replace the interpolations below ``root`` by their values, in place.

    :param model: of ``astuner``, for the defaults.
    Values left open (``???``) and secrets that were removed from a written-out config are reported too.
    """
    below: DictConfig | None = None
    for key, value in list(tree.leaves()):
        if key[0] != root:
            continue
        if value == "???":
            report.problem(tree.place(key), f"{dotted(key)} is required; replace the ???")
            tree.remove(key)
        elif is_removed(value):
            report.problem(tree.place(key), f"{dotted(key)} was left out of this file; give it: {dotted(key)}=VALUE")
        elif _has_expression(value):
            below = below if below is not None else _everything(tree, model, report.older.roots, manager)
            if isinstance(value, str):
                tree.expressions[key] = value
            _resolve(below, key, tree, report)


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """The schema's defaults as plain data, without keys that have none."""
    found: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        if (section := section_of(info)) is not None:
            found[name] = defaults(section)
        elif (value := info.get_default(call_default_factory=True, validated_data={})) is not PydanticUndefined:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _everything(
    tree: Tree, model: type[BaseModel], older_roots: Sequence[str], manager: PluginManager
) -> DictConfig:
    whole = Tree({"astuner": defaults(model)}).merged(tree)
    imply(whole, Report(""), manager)
    aliases = {old: "${astuner}" for old in older_roots if old not in whole.data}  # `${astune.model.path}`
    return OmegaConf.create({**whole.data, **aliases})


def _resolve(below: DictConfig, key: Key, tree: Tree, report: Report) -> None:
    try:
        value = OmegaConf.select(below, "".join(f"[{part}]" for part in key), throw_on_missing=True)
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as e:
        reason = " ".join(str(e).split()).partition(" full_key:")[0] or "it refers to itself"
        reason = reason.rpartition("raised while resolving interpolation: ")[2].strip('"')
        report.problem(tree.place(key), f"{dotted(key)}: {reason[0].lower()}{reason[1:]}")
        tree.remove(key)
    else:
        tree.put(key, value)
        place = tree.place(key)
        if place is not None:
            tree.places.update({leaf: place for leaf, _ in tree.leaves(key)})


def _has_expression(value: Any) -> bool:
    if isinstance(value, list):
        return any(_has_expression(item) for item in value)
    if isinstance(value, dict):
        return any(_has_expression(item) for item in value.values())
    return isinstance(value, str) and "${" in value
