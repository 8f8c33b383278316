"""Rubrics as a file that people read and edit.

What grades (criteria, weights, scale) and what is known about it (where it was learned, how well it agreed) stand in
one YAML file of plain data: no aliases, which can make a small file enormous, no tags, no key twice, nothing
interpolated, and every mistake is told with its line.  Invariant: `RubricFile.digest` names what grades and nothing
else, so an agreement that was measured before somebody edited a criterion is seen not to be about this file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator

from astuner.contracts.errors import ConfigError, did_you_mean
from astuner.contracts.section import Section
from astuner_rubrics.agreement import Agreement
from astuner_rubrics.labels import PRINT, Mode, digest

MAX_BYTES = 1 << 20
_HINT = "`astuner judge learn` writes one"

Loc = tuple[Any, ...]


VERSION = 1

_HEAD = """\
# Rubrics of a judge: `astuner.task_judge: {{judge: rubrics, rubrics: {{file: {name}, helper_model: NAME}}}}`
# Edit criteria, tips and weights as you like. How well the edited file agrees with labels:
#   astuner judge check {name} --labels FILE.jsonl --base-url URL --model NAME
"""


class Rubric(Section):
    """One criterion."""

    criterion: str = Field(min_length=1, max_length=2000)
    """What a good answer does, as a sentence that somebody who knows only the question and the answer can apply."""
    tips: tuple[str, ...] = ()
    """What to look at, point by point."""
    weight: float = Field(1.0, gt=0)
    """How much it counts beside the others: a verdict is the weighted mean of the criteria's grades."""
    samples: tuple[str, ...] = ()
    """The examples it was learned from."""

    @property
    def text(self) -> str:
        """As a judge reads it."""
        return "\n".join([self.criterion, *(f"- {tip}" for tip in self.tips)])


class Learned(Section):
    """Where the rubrics come from."""

    date: str
    model: str
    """The helper model that proposed and graded."""
    file: str
    """The examples' file."""
    sha256: str
    """Its content."""
    prompts: dict[str, str]
    """The versions of the prompts."""
    train: int
    """Examples that were learned from."""
    held_out: tuple[str, ...] = ()
    """Examples that learning never saw."""
    agreement: Agreement
    """With the labels of the held-out examples."""
    agreement_in_training: Agreement
    digest: str
    """What was measured; another digest now means that the file was edited."""
    warnings: tuple[str, ...] = ()
    prints: tuple[Annotated[str, StringConstraints(pattern=rf"^{PRINT.pattern}$")], ...] = ()
    """Of the examples that were learned from (hashes, no texts): by them `astuner judge check` knows labels again."""


class RubricFile(Section):
    """A whole file."""

    version: int = Field(VERSION, ge=1, le=VERSION)
    mode: Mode
    """What is judged: one answer (`pointwise`), two (`pairwise`) or several against each other (`listwise`)."""
    scale: tuple[float, float]
    """The worst and the best grade."""
    tie: float = Field(0.0, ge=0)
    """Answers whose weighted means are this close tie: they get the same reward; only where answers are compared."""
    votes: int = Field(1, ge=1, le=25)
    """How many times the model is asked for one verdict, each time with the answers in another order; each grade is
    the median, so an odd number stands errors best."""
    rubrics: tuple[Rubric, ...] = Field(min_length=1, max_length=100)
    learned: Learned | None = None

    @model_validator(mode="after")
    def _scale_has_length(self) -> RubricFile:
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale: the worst grade {self.scale[0]:g} must be below the best {self.scale[1]:g}")
        return self

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits of what grades."""
        kept = self.model_dump(mode="json", include={"mode", "scale", "tie", "votes"})
        return digest([kept, [[r.text, r.weight] for r in self.rubrics]])[:12]

    @property
    def is_edited(self) -> bool:
        """Whether it grades otherwise than when its agreement was measured."""
        return self.learned is not None and self.learned.digest != self.digest

    def scaled(self, grade: float) -> float:
        """A grade as a reward: 0 for the worst, 1 for the best."""
        low, high = self.scale
        return min(1.0, max(0.0, (grade - low) / (high - low)))


def load_rubrics(path: Path) -> RubricFile:
    """Read a rubric file.

    :raises ConfigError: everything that is wrong with it, each with its file and line.
    """
    lines: dict[Loc, int] = {(): 1}
    problems: list[tuple[int, str]] = []
    try:
        text = _text(path)
        alias = next((e for e in yaml.parse(text, Loader=yaml.SafeLoader) if isinstance(e, yaml.AliasEvent)), None)
        if alias is not None:
            raise ConfigError(f"{path}:{_line(alias.start_mark)}: aliases (*{alias.anchor}) are not read")
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise ConfigError(f"{path}: the file is empty; {_HINT}")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{_line(node.start_mark)}: expected `key: value` lines; {_HINT}")
        _note_lines(node, (), lines, problems)
        data = yaml.SafeLoader("").construct_document(node)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        raise ConfigError(f"{path}{f':{_line(mark)}' if mark else ''}: not YAML: {e.problem or e.context}") from None
    except (yaml.YAMLError, ValueError) as e:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(e).split())[:200]}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deeply") from None
    try:
        found = RubricFile.model_validate(data)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        # A list whose entries are wrong is said to be too short besides.
        around = {error["loc"][:n] for error in errors for n in range(len(error["loc"]))}
        problems += [_mistake(error, lines) for error in errors if error["loc"] not in around]
    if problems:
        raise ConfigError([f"{path}:{line}: {said}" for line, said in sorted(problems)])
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}; {_HINT}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: is longer than {MAX_BYTES >> 20} MiB; {_HINT}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}:{raw[: e.start].count(10) + 1}: is not UTF-8; save the file as UTF-8") from None


def _line(mark: Any) -> int:
    return int(mark.line) + 1


def _note_lines(node: yaml.Node, loc: Loc, lines: dict[Loc, int], problems: list[tuple[int, str]]) -> None:
    """Where everything stands; a key that is there twice is a problem."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            here, line = (*loc, key.value), _line(key.start_mark)
            if here in lines:
                problems.append((line, f"{key.value} is set twice (first in line {lines[here]})"))
            else:
                lines[here] = line
                _note_lines(value, here, lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            here = (*loc, index)
            lines[here] = _line(item.start_mark)
            _note_lines(item, here, lines, problems)


_SECTIONS: dict[str, type[BaseModel]] = {
    "rubrics": Rubric, "learned": Learned, "agreement": Agreement, "agreement_in_training": Agreement,
}  # fmt: skip


def _mistake(error: Any, lines: dict[Loc, int]) -> tuple[int, str]:
    loc = error["loc"]
    line = next(lines[loc[:n]] for n in range(len(loc), -1, -1) if loc[:n] in lines)
    key = ".".join(map(str, loc))
    if error["type"] == "extra_forbidden":
        around = [part for part in loc[:-1] if isinstance(part, str)]
        known = list((_SECTIONS[around[-1]] if around else RubricFile).model_fields)
        hint = did_you_mean(str(loc[-1]), known, f"; known here: {', '.join(known)}")
        return line, f"unknown key {key}{hint}"
    if error["type"] == "missing":
        return line, f"{key} is required"
    if error["type"] == "value_error":
        return line, f"{key + ': ' if key else ''}{error['ctx']['error']}"
    got = repr(error["input"])
    return line, f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {got if len(got) < 80 else got[:77] + '…'}"


def save_rubrics(path: Path, rubrics: RubricFile) -> None:
    """Write a rubric file; the old one is there until the new one is whole."""
    data = rubrics.model_dump(mode="json", exclude_none=True)
    for rubric in data["rubrics"]:
        for name in ("tips", "samples"):
            if not rubric[name]:
                del rubric[name]
    text = _HEAD.format(name=path.name) + yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, encoding="utf-8", errors="backslashreplace")
    beside.replace(path)


class _Dumper(yaml.SafeDumper):
    """Short lists of numbers on one line, texts of several lines as they are."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flow = all(isinstance(x, (int, float)) for x in data) or all(isinstance(x, str) and len(x) < 30 for x in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _list)
