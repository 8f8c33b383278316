"""Parse the YAML file and the ``key=value`` overrides into a `Tree`.

OmegaConf's loader provides values and places, so ``1e-6`` is a number as in OmegaConf. A file that is too large, too
deeply nested or not a mapping raises `ConfigError` with the line.
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
"""Limits on the bytes of a file, its keys and values (after expanding aliases), and its nesting depth."""
_TOO_MUCH = f"more than {MAX_NODES:,} keys and values, or more than {MAX_DEPTH} nested sections"
_UNUSABLE = (yaml.YAMLError, OmegaConfBaseException, RecursionError)
_MERGE = "tag:yaml.org,2002:merge"


def read_file(path: Path, report: Report) -> Tree:
    """Parse an experiment file.

    Duplicate keys are reported to ``report``.

    :raises ConfigError: The file cannot be read, is not UTF-8, is not YAML, is empty, or is not a mapping.
    """
    source = report.source
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{source}: file is larger than {MAX_BYTES:,} bytes; pass an experiment file")
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{source}: no such file{_yaml_files_beside(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{source}: is a folder; pass a file{_yaml_files_beside(path / 'x')}") from None
    except OSError as e:
        raise ConfigError(f"{source}: cannot be read: {e.strerror}; check the file and its permissions") from None
    except UnicodeDecodeError as e:
        line = e.object[: e.start].count(b"\n") + 1
        raise ConfigError(f"{source}:{line}:1: byte {e.start} is not UTF-8; save the file as UTF-8") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"{source}: file is empty; create an experiment with `astuner new experiment NAME`")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{source}:{node.start_mark.line + 1}:1: expected `astuner:` with keys below it")
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
    """OmegaConf's YAML loader with limits and a place for every error. It reads ``12:30:45`` as a string."""

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
            str(value).encode()  # raises for lone surrogates and for numbers with thousands of digits
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as e:  # also from !!tags
            problem = f"{str(node.value)[:40]!r} cannot be read: {e}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None
        return value


def _not_yaml(error: yaml.MarkedYAMLError, source: str) -> str:
    """Return the place of a YAML error and a message for readers who do not know YAML's grammar."""
    problem, context = error.problem or "", error.context or ""
    mark, hint = error.problem_mark or error.context_mark, ""
    if "\\t" in problem:
        hint = "; indent with spaces, not tabs"
    elif "quoted scalar" in context:  # YAML reports it at the end of the file
        mark, hint = error.context_mark or mark, "; close the quote that starts here"
    elif "simple key" in context:  # YAML reports it on the next line
        mark, hint = error.context_mark or mark, "; write `key: value` with a space after the colon"
    elif "mapping values" in problem or "block mapping" in problem:
        hint = "; indent all keys of a section equally, and quote values that contain `: `"
    elif "or '}'" in problem or "or ']'" in problem:  # YAML may report it on the next line
        hint = "; close the bracket opened on this line or the line above, and quote values that contain any of {}[],"
    place = Place(source, mark.line + 1, mark.column + 1) if mark else Place(source)
    return f"{place}: not YAML: {problem or context}{hint}"


def read_overrides(overrides: Sequence[str], roots: Sequence[str], report: Report) -> Tree:
    """Parse ``key=value`` overrides. Values are YAML; the last value of a key wins.

    :param roots: Root sections that an override may start with.
    """
    tree, place = Tree(), Place(COMMAND_LINE)
    for text in overrides:
        key, sep, value = text.partition("=")
        parts = tuple(key.strip().split("."))
        if not sep or not all(parts) or len(parts) > MAX_DEPTH:
            report.problem(place, f"{text!r} is not an override; write KEY=VALUE, e.g. astuner.rollout.num_repeat=8")
        elif parts[0] not in roots:
            report.problem(place, f"{text!r} does not start with a section; {_instead(key.strip(), value, report)}")
        elif len(parts) == 1:
            report.problem(place, f"{text!r} would replace a complete root section; set one key: {key}.KEY=VALUE")
        else:
            try:
                parsed = OmegaConf.to_container(OmegaConf.create({"value": yaml.load(value, _Loader)}), resolve=False)
            except _UNUSABLE as e:
                report.problem(place, f"{text!r}: the value is not valid YAML: {' '.join(str(e).split())}")
                continue
            one = Tree()
            one.put(parts, _string_keys(parsed)["value"])
            one.places = {leaf[:n]: place for leaf, _ in one.leaves() for n in range(1, len(leaf) + 1)}
            tree = tree.merged(one)
    return tree


def _instead(key: str, value: str, report: Report) -> str:
    """Return what to write instead of a ``key`` that does not start with a section."""
    if meant := report.whole_keys(key):
        whole = value.lstrip().startswith("{")  # a mapping with all keys of a section
        below = [f"{name}.KEY=VALUE" if inner and not whole else f"{name}={value}" for name, inner in meant.items()]
        return f"write {' or '.join(below)}"
    return "keys start with `astuner.`, and this key is unknown; list all keys: astuner config explain astuner"


class _Places:
    """Collector of the places of all keys in a composed YAML document."""

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
            raise ConfigError(f"{place}: this alias refers to itself")
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
        for other in reversed(inherited):  # `<<: [*a, *b]`: a overrides b, and explicit keys override both
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
    return f"; files in {path.parent}: {', '.join(found[:5])}" if found else ""
