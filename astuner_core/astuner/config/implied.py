"""Keys that follow from other keys.

Only keys that nobody wrote are set here, and each remembers what it follows from; what a person wrote always wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner.contracts.errors import AmbiguousName, UnknownName
from astuner.contracts.hookspecs import LossProvider
from astuner.contracts.places import Key, Place, Report, Tree
from astuner.plugins import registry
from astuner.plugins.loader import PluginManager

ALGORITHM: Key = ("astuner", "trainer_common", "algorithm")

GROUP: Key = ("astuner", "rollout", "num_repeat")
LEAST: Key = ("astuner", "rollout", "min_group_size")

SAME: tuple[tuple[Key, Key], ...] = (
    (("astuner", "trainer_common", "val_pass_n"), ("astuner", "rollout", "val_kwargs", "num_repeat")),
)
"""Two keys with one meaning."""


def imply(tree: Tree, report: Report, manager: PluginManager) -> dict[Key, Place]:
    """Set the keys of ``tree`` that follow from those written; their origins."""
    origins: dict[Key, Place] = {}
    loss = tree.get((*ALGORITHM, "loss"))
    if isinstance(loss, str):
        for name, value in by_loss(loss, manager).items():
            _set(tree, (*ALGORITHM, name), value, f"implied by algorithm.loss: {loss}", origins)
    if tree.get(GROUP) in (1, "1"):
        _set(tree, LEAST, 1, "implied by rollout.num_repeat: 1", origins)
    for first, second in SAME:
        if tree.is_written(first) and tree.is_written(second):
            if tree.get(first) != tree.get(second):
                a, b = ".".join(first), ".".join(second)
                report.problem(tree.place(second), f"{b} means the same as {a} ({tree.place(first)}); make them equal")
            continue
        for written, other in ((first, second), (second, first)):
            if tree.is_written(written):
                _set(tree, other, tree.get(written), f"same as {'.'.join(written[1:])}", origins)
    return origins


def by_loss(loss: str, manager: PluginManager) -> Mapping[str, object]:
    """The keys of ``trainer_common.algorithm`` that a loss implies; none for one that is not registered."""
    try:
        provider = registry.find(manager, "loss", loss)
    except (UnknownName, AmbiguousName):  # code of the person's own, or said by `astuner.config.sections`
        return {}
    return provider.implies if isinstance(provider, LossProvider) else {}


def _set(tree: Tree, key: Key, value: Any, why: str, origins: dict[Key, Place]) -> None:
    parent = tree.get(key[:-1], {})
    if not tree.is_written(key) and (parent is None or isinstance(parent, dict)):
        tree.put(key, value)
        origins[key] = Place(why)
