"""From a key that somebody wrote without what stands before it to the whole key; for messages only.

Invariant: the section of what is suggested exists; the last parts may be the person's own (`helper_models.NAME`), or
wrong as they were written.
"""

from __future__ import annotations

import difflib

from astuner.config.explain import explain, reference, sections
from astuner.config.places import dotted
from astuner.config.schema import with_packages
from astuner.contracts.errors import ConfigError
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager

ROOT = "astuner"
_MOST = 3


def whole_keys(key: str, manager: PluginManager) -> list[str]:
    """What ``key`` may have been meant to be, the likeliest first; empty when nothing comes near.

    A section may stand anywhere (``tracing.keep``), and so may a key of its own (``num_repeat``); else the first part
    may be misspelt (``trainer.logger``).
    """
    known = list(dict.fromkeys([*(dotted(k) for k, _ in sections(manager)), *(i.key for i in reference(manager))]))
    older = registry.older_spellings(manager)
    if f"{ROOT}.{key}" in {*known, *older.renamed, *older.gone}:
        return [f"{ROOT}.{key}"]
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        begins, rest = ".".join(parts[:n]), "".join(f".{part}" for part in parts[n:])
        found = sorted((name for name in known if name.endswith(f".{begins}")), key=lambda name: name.count("."))
        if f"{ROOT}.{begins}" in found:
            found = [f"{ROOT}.{begins}"]
        if found:
            return [f"{name}{rest}" for name in found[:_MOST]]
    if len(parts) > 1 and (near := difflib.get_close_matches(parts[0], list(with_packages(manager).model_fields), 1)):
        return [".".join([ROOT, near[0], *parts[1:]])]
    return []


def is_section(key: str, manager: PluginManager) -> bool:
    """Whether the whole key ``key`` has keys below it."""
    try:
        return bool(explain(key, manager).keys)
    except ConfigError:
        return False
