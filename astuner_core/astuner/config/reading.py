"""Text to `Tree`: the YAML file and the ``key=value`` overrides.

OmegaConf's own loader gives the values, so ``1e-6`` is a number here as it is there, and the places. What is larger
or deeper than any experiment, or cannot be read as one mapping of keys, is a `ConfigError` that names the line.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from astuner.contracts.errors import ConfigError
from astuner.contracts.places import COMMAND_LINE, Key, Place, Report, Tree

MAX_BYTES, MAX_NODES, MAX_DEPTH = 1 << 20, 10_000, 32
"""Bytes of a file, keys and values in it (aliases expanded: nested ones multiply), and sections in each other."""
_TOO_MUCH = f"more than {MAX_NODES:,} keys and values, or {MAX_DEPTH} sections in each other"
_UNUSABLE = (yaml.YAMLError, OmegaConfBaseException, RecursionError)
_MERGE = "tag:yaml.org,2002:merge"


def read_file(path: Path, report: Report) -> Tree:
    """Parse an experiment file.

    Keys that are written twice go into ``report``, with everything else the caller finds.

    :raises ConfigError: the file cannot be read, is not UTF-8, is not YAML, is empty, or is not a mapping.
    """
    source = report.source
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{source}: it is larger than {MAX_BYTES:,} bytes, and so no experiment")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file{_yaml_files_beside(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: it is a folder; name the file in it{_yaml_files_beside(path / 'x')}") from None
    except OSError as e:
        raise ConfigError(f"{source}: cannot be read: {e.strerror}") from None
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise ConfigError(f"{source}:{line}:1: byte {e.start} is not UTF-8; save the file as UTF-8") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{source}: the file is empty; `astuner new experiment NAME` writes one to start from")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{source}:{node.start_mark.line + 1}:1: expected `astuner:` and keys below it")
        places = _Places(report)
        places.walk(node, ())
        report.raise_problems()
        values = OmegaConf.to_container(OmegaConf.create(loader.construct_document(node)), resolve=False)
        return Tree(_string_keys(values), places.found)
    except yaml.MarkedYAMLError as e:
        raise ConfigError(_not_yaml(e, source)) from None
    except _UNUSABLE as e:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(e).split())}") from None


class _Loader(get_yaml_loader()):  # type: ignore[misc]
    """OmegaConf's, with limits and a place for every fault; ``12:30:45`` is a text, and no number of seconds."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or len(self.marks) > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=_TOO_MUCH, problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag.endswith((":int", ":float")) and ":" in node.value:
            node.tag = self.DEFAULT_SCALAR_TAG
        try:
            value = super().construct_object(node, deep)
            str(value).encode()  # raises at half a surrogate pair, and at a number of thousands of digits
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:  # of a !!tag's text, too
            problem = f"{str(node.value)[:40]!r} cannot be read: {e}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value


def _not_yaml(error: yaml.MarkedYAMLError, source: str) -> str:
    """What is wrong where, in words for who does not know how YAML is parsed."""
    problem, context = error.problem or "", error.context or ""
    mark, hint = error.problem_mark or error.context_mark, ""
    if "\\t" in problem:
        hint = "; indent with spaces, not tabs"
    elif "quoted scalar" in context:  # noticed where the file ends
        mark, hint = error.context_mark or mark, "; the quote that begins here is not closed"
    elif "simple key" in context:  # noticed on the next line
        mark, hint = error.context_mark or mark, "; write `key: value`, with a space behind the colon"
    elif "mapping values" in problem or "block mapping" in problem:
        hint = "; keys of one section begin in one column, and a value that holds `: ` is in quotes"
    elif "or '}'" in problem or "or ']'" in problem:  # inside of braces or brackets, perhaps noticed on the next line
        hint = "; close what the line above or this one opens, and quote a value that holds any of {}[],"
    place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
    return f"{place}: not YAML: {problem or context}{hint}"


def read_overrides(overrides: Sequence[str], roots: Sequence[str], report: Report) -> Tree:
    """Parse ``key=value`` texts; values are YAML, the last of equal keys wins.

    :param roots: the root sections an override may start with.
    """
    tree, place = Tree(), Place(COMMAND_LINE)
    for text in overrides:
        key, sep, value = text.partition("=")
        parts = tuple(key.strip().split("."))
        if not sep or not all(parts) or len(parts) > MAX_DEPTH:
            report.problem(place, f"{text!r} is not an override; write astuner.rollout.num_repeat=8")
        elif parts[0] not in roots:
            report.problem(place, f"{text!r} does not start with a section; {_instead(key.strip(), value, report)}")
        elif len(parts) == 1:
            report.problem(place, f"{text!r} would replace a whole root section; write one key, {key}.KEY=VALUE")
        else:
            try:
                parsed = OmegaConf.to_container(OmegaConf.create({"value": yaml.load(value, _Loader)}), resolve=False)
            except _UNUSABLE as e:
                report.problem(place, f"{text!r}: the value is not YAML: {' '.join(str(e).split())}")
                continue
            one = Tree()
            one.put(parts, _string_keys(parsed)["value"])
            one.places = {leaf[:n]: place for leaf, _ in one.leaves() for n in range(1, len(leaf) + 1)}
            tree = tree.merged(one)
    return tree


def _instead(key: str, value: str, report: Report) -> str:
    """What to write where ``key`` begins with no root section."""
    if meant := report.whole_keys(key):
        whole = value.lstrip().startswith("{")  # a section's keys, all at once
        below = [f"{name}.KEY=VALUE" if inner and not whole else f"{name}={value}" for name, inner in meant.items()]
        return f"write {' or '.join(below)}"
    return "keys begin with `astuner.`, and no key of this name is known; `astuner config explain astuner` lists them"


class _Places:
    """Collects the place of each key of a composed YAML document."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.found: dict[Key, Place] = {}
        self._open: set[int] = set()
        self._nodes = 0

    def walk(self, node: yaml.Node, key: Key) -> None:
        place = self._at(node)
        self._nodes += 1
        if self._nodes > MAX_NODES or len(self._open) > MAX_DEPTH:
            raise ConfigError(f"{place}: {_TOO_MUCH}, after expanding aliases")
        if id(node) in self._open:
            raise ConfigError(f"{place}: this alias contains itself")
        self._open.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, key)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                here = (*key, str(index))
                self.found[here] = self._at(item)
                self.walk(item, here)
        self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, key: Key) -> None:
        own: dict[Key, Place] = {}
        merged = [value for name, value in node.value if name.tag == _MERGE]
        inherited = [other for one in merged for other in (one.value if isinstance(one, yaml.SequenceNode) else [one])]
        for other in reversed(inherited):  # `<<: [*this, *that]`: this before that, and what stands here before both
            self.walk(other, key)
        for name, value in node.value:
            if name.tag == _MERGE:
                continue
            here, place = (*key, str(name.value)), self._at(name)
            if here in own:
                self.report.problem(place, f"{'.'.join(here)} is set twice (first at line {own[here].line})")
                continue
            own[here] = self.found[here] = place
            self.walk(value, here)

    def _at(self, node: yaml.Node) -> Place:
        return Place(self.report.source, node.start_mark.line + 1, node.start_mark.column + 1)


def _string_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _string_keys(v) for k, v in value.items()}
    return [_string_keys(v) for v in value] if isinstance(value, list) else value


def _yaml_files_beside(path: Path) -> str:
    found = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return f"; {path.parent} holds {', '.join(found[:5])}" if found else ""
