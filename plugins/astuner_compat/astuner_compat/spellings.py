"""Convert older spellings in experiment files to current ones.

Every spelling in a published experiment file is accepted with one note, or rejected with its replacement. None is
ignored silently. Older names of plugins' objects are in ``plugin.toml``.
"""

from __future__ import annotations

import re
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from astuner import Offer, PluginManager, find_offer, import_target, key_spellings
from astuner.contracts.errors import AmbiguousName, ConfigError, UnknownName
from astuner.contracts.parts import OlderSpellingsPart
from astuner.contracts.places import Key, Report, Tree, did_you_mean, dotted
from astuner.contracts.secrets import is_secret

ROOT = "astuner"
OLD_ROOTS = ("astune", "ajet")


@dataclass(frozen=True)
class Retired:
    """A removed key. Values in ``harmless`` are equal to the current behavior."""

    reason: str
    harmless: Sequence[Any] = ()


_TABLES = yaml.safe_load(Path(__file__).with_name("spellings.yaml").read_text(encoding="utf-8"))
RENAMED: dict[str, str] = _TABLES["renamed"]
"""Older key -> current key."""
OLD_VALUES: dict[str, dict[Any, Any]] = _TABLES["values"]
"""Current key -> older value -> current value."""
FILES: dict[str, str] = _TABLES["files"]
"""Experiment file in the first documents -> current file."""
RETIRED = {key: Retired(**told) for key, told in _TABLES["retired"].items()}
"""Removed key or section -> reason."""

JUDGE: Key = (ROOT, "task_judge")
HELPER_MODEL = ("alien_llm_model", "alien_llm_response_length")
"""Keys of ``task_judge`` that now belong to the section of a judge with a helper model."""

_ROOT_OPTIONS = {"-h", "--help", "--version"}
_DEFAULT_LAYERS = ("_self_", "astuner_default", "astune_default", "ajet_default")


class Spellings(OlderSpellingsPart):
    """The part ``older_spellings``."""

    roots = OLD_ROOTS
    renamed = RENAMED
    gone: Mapping[str, str] = {key: retired.reason for key, retired in RETIRED.items()}

    def modernise(self, tree: Tree, backbones: Iterable[str], report: Report) -> None:
        _preamble(tree, backbones, report)
        _root(tree, report)
        for old, new in RENAMED.items():
            _rename(tree, _key(old), _key(new), report)
        for name, values in OLD_VALUES.items():
            _revalue(tree, _key(name), values, report)
        for name, retired in RETIRED.items():
            _retire(tree, _key(name), retired, report)

    def command_line(self, arguments: Sequence[str]) -> list[str]:
        """Convert ``--conf FILE --backbone X --with-ray`` to ``run FILE --backbone X --with ray``, with a note.

        :raises ConfigError: The experiment file is missing.
        """
        rest = list(arguments)
        if rest[0].startswith("--") and rest[0] not in _ROOT_OPTIONS:
            parser = ArgumentParser(add_help=False, allow_abbrev=False)
            for option in ("--conf", "--kill"):
                parser.add_argument(option, nargs="?")
            found, others = parser.parse_known_args(rest)
            if found.kill:
                return ["killer", found.kill, *(["--conf", found.conf] if found.conf else []), *others]
            if found.conf:
                rest = ["run", str(self.file_now(Path(found.conf))), *others]
            elif others and all(word.startswith("--with-") for word in others):
                rest = ["env", "serve", *(word.removeprefix("--with-") for word in others)]
            else:
                raise ConfigError(f"{rest[0]} requires an experiment file. Use: astuner run FILE {' '.join(others)}")
        if rest[0] in ("run", "eval", "chat", "serve"):
            named = [(re.fullmatch("(--with)-(.+)", text, re.DOTALL), text) for text in rest]
            rest = [word for found, text in named for word in (found.groups() if found else [text])]
        if rest != list(arguments):
            shown = [
                f"{key}=…" if is_secret((key := word.partition("=")[0]).rpartition(".")[2]) else word for word in rest
            ]
            note(f"the current command is: astuner {shlex.join(shown)}")
        return rest

    @staticmethod
    def file_now(path: Path) -> Path:
        """Return the current path of an experiment of the first documents, in a checkout.

        :raises ConfigError: The current folder is not a checkout.
        """
        now = FILES.get(path.as_posix())
        if now is None or path.exists():
            return path
        if not Path(now).exists():
            raise ConfigError(
                f"{path} was moved to {now} in a checkout of ASTuner, but this folder is not a checkout. "
                "Create an experiment with: astuner new experiment NAME"
            )
        return Path(now)

    def settle(self, tree: Tree, plugins: PluginManager, report: Report) -> None:
        try:
            judge = find_offer(plugins, "judge", str(tree.get((*JUDGE, "judge"))))
        except (UnknownName, AmbiguousName):  # user code, or reported where judges are resolved
            judge = None
        _helper_model(tree, judge, report)


def note(text: str) -> None:
    """Print a note about the current spelling."""
    print(f"note: {text}", file=sys.stderr, flush=True)


def _preamble(tree: Tree, backbones: Iterable[str], report: Report) -> None:
    if tree.has(("hydra",)):
        report.note("hydra: is ignored; defaults come from the schema", tree.place(("hydra",)))
        tree.remove(("hydra",))
    if tree.has(("defaults",)):
        layers = tree.get(("defaults",))
        known = [*_DEFAULT_LAYERS, *(f"{name}_default" for name in backbones)]
        if not isinstance(layers, list):
            report.problem(tree.place(("defaults",)), f"defaults must be a list of layers, not {layers!r}")
        else:
            for index, layer in enumerate(layers):
                if layer not in known:
                    hint = did_you_mean(str(layer), known, f"; the layers are {', '.join(known)}")
                    report.problem(tree.place(("defaults", str(index))), f"no layer is called {layer!r}{hint}")
        report.note(
            "defaults: is not needed: its layers always apply (a backbone's layer if that backbone is chosen)",
            tree.place(("defaults",)),
        )
        tree.remove(("defaults",))


def _root(tree: Tree, report: Report) -> None:
    for old in OLD_ROOTS:
        if not tree.has((old,)):
            continue
        place = tree.place((old,))
        if tree.has((ROOT,)):
            report.problem(place, f"{old}: is the older name of {ROOT}:, but both are set. Move all keys below {ROOT}:")
        else:
            report.note(f"{old}: is now {ROOT}:", place)
            tree.move((old,), (ROOT,))


def _rename(tree: Tree, old: Key, new: Key, report: Report) -> None:
    if not tree.has(old):
        return
    place = tree.place(old)
    if tree.has(new):
        other = tree.place(new)
        report.problem(
            place, f"{dotted(old)} is the older name of {dotted(new)}, which is also set ({other}). Keep one of them"
        )
        tree.remove(old)
        _remove_empty(tree, old[:-1])
        return
    report.note(f"{dotted(old)} is now {dotted(new)}", place)
    tree.move(old, new)
    _remove_empty(tree, old[:-1])


def _revalue(tree: Tree, key: Key, values: Mapping[Any, Any], report: Report) -> None:
    if tree.has(key) and not isinstance(old := tree.get(key), (dict, list)) and old in values:
        report.note(f"{dotted(key)}: {old} is now {values[old]}", tree.place(key))
        tree.put(key, values[old], tree.place(key))


def _retire(tree: Tree, key: Key, retired: Retired, report: Report) -> None:
    if not tree.has(key):
        return
    place, value = tree.place(key), tree.remove(key)
    _remove_empty(tree, key[:-1])
    if value == {}:
        return  # all its keys have moved
    if any(value == same and isinstance(value, bool) == isinstance(same, bool) for same in retired.harmless):
        report.note(f"{dotted(key)} is not needed: {retired.reason}", place)
    elif retired.harmless:
        report.problem(place, f"{dotted(key)} can no longer be {value!r}: {retired.reason}. Remove the key")
    else:
        report.problem(place, f"{dotted(key)} is not a key any more: {retired.reason}")


def _helper_model(tree: Tree, judge: Offer | None, report: Report) -> None:
    for name in HELPER_MODEL:
        key = (*JUDGE, name)
        if not tree.has(key):
            continue
        accepted: dict[str, str] = {}
        if judge is not None and judge.provider.config is not None:
            accepted = key_spellings(import_target(judge.provider.config))
        if judge is None or name not in accepted:
            which = f"the judge {judge.full_name!r}" if judge is not None else "this judge"
            report.problem(tree.place(key), f"{dotted(key)}: {which} uses no helper model. Remove the key")
            tree.remove(key)
            continue
        new = (*JUDGE, judge.full_name, accepted[name])
        report.note(f"{dotted(key)} is now {dotted(new)}", tree.place(key))
        if tree.has(new):
            report.problem(tree.place(key), f"{dotted(key)} and {dotted(new)} are the same key. Keep one of them")
            tree.remove(key)
        else:
            tree.move(key, new)


def _remove_empty(tree: Tree, section: Key) -> None:
    """Remove a section that contained only older keys, except for sections directly below ``astuner:``."""
    if len(section) > 2 and tree.get(section) == {}:
        tree.remove(section)


def _key(text: str) -> Key:
    return tuple(text.split("."))
