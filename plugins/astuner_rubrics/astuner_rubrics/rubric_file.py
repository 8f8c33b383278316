"""Rubric files, which people can read and edit.

A YAML file of plain data contains the grading rules (criteria, weights, scale) and their provenance (training examples,
agreement). Aliases, which can make a small file enormous, tags, duplicate keys and interpolation are rejected; every
error names its line. Invariant: `RubricFile.digest` covers only the grading rules, so edited rules are recognized and
the recorded agreement is not attributed to them.
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
_HINT = "`astuner judge learn` creates a rubric file"

Loc = tuple[Any, ...]


VERSION = 1

_HEAD = """\
# Rubrics of a judge: `astuner.task_judge: {{judge: rubrics, rubrics: {{file: {name}, helper_model: NAME}}}}`
# You can edit criteria, tips and weights. Measure how well the edited file agrees with labels:
#   astuner judge check {name} --labels FILE.jsonl --base-url URL --model NAME
"""


class Rubric(Section):
    """A criterion."""

    criterion: str = Field(min_length=1, max_length=2000)
    """Description of a good answer, as a sentence that can be applied with only the question and the answer."""
    tips: tuple[str, ...] = ()
    """Points to look at."""
    weight: float = Field(1.0, gt=0)
    """Weight relative to other criteria: a verdict is the weighted mean of the grades."""
    samples: tuple[str, ...] = ()
    """Examples that it was learned from."""

    @property
    def text(self) -> str:
        """Return the criterion and its tips as a judge reads them."""
        return "\n".join([self.criterion, *(f"- {tip}" for tip in self.tips)])


class Learned(Section):
    """Provenance of the rubrics."""

    date: str
    model: str
    """Helper model that proposed and graded."""
    file: str
    """File of the examples."""
    sha256: str
    """Hash of its content."""
    prompts: dict[str, str]
    """Versions of the prompts."""
    train: int
    """Number of training examples."""
    held_out: tuple[str, ...] = ()
    """Examples that were not used for learning."""
    agreement: Agreement
    """Agreement with the labels of the held-out examples."""
    agreement_in_training: Agreement
    digest: str
    """Digest of the measured rubrics. A different digest means that the file was edited."""
    warnings: tuple[str, ...] = ()
    prints: tuple[Annotated[str, StringConstraints(pattern=rf"^{PRINT.pattern}$")], ...] = ()
    """Hashes of the training examples, without texts. `astuner judge check` uses them to recognize labels."""


class RubricFile(Section):
    """A complete rubric file."""

    version: int = Field(VERSION, ge=1, le=VERSION)
    mode: Mode
    """What is judged: one answer (`pointwise`), two (`pairwise`) or several (`listwise`) in comparison."""
    scale: tuple[float, float]
    """Worst and best grade."""
    tie: float = Field(0.0, ge=0)
    """Answers with weighted means this close tie and get the same reward; only for compared answers."""
    votes: int = Field(1, ge=1, le=25)
    """Number of requests per verdict, each with the answers in a different order. Each grade is the median, so an odd
    number is most robust."""
    rubrics: tuple[Rubric, ...] = Field(min_length=1, max_length=100)
    learned: Learned | None = None

    @model_validator(mode="after")
    def _scale_has_length(self) -> RubricFile:
        if self.scale[0] >= self.scale[1]:
            raise ValueError(f"scale: the worst grade {self.scale[0]:g} must be below the best {self.scale[1]:g}")
        return self

    @property
    def digest(self) -> str:
        """Return twelve hex digits that identify the grading rules."""
        kept = self.model_dump(mode="json", include={"mode", "scale", "tie", "votes"})
        return digest([kept, [[r.text, r.weight] for r in self.rubrics]])[:12]

    @property
    def is_edited(self) -> bool:
        """Return whether the grading rules changed since their agreement was measured."""
        return self.learned is not None and self.learned.digest != self.digest

    def scaled(self, grade: float) -> float:
        """Return a grade as a reward: 0 for the worst, 1 for the best."""
        low, high = self.scale
        return min(1.0, max(0.0, (grade - low) / (high - low)))


def load_rubrics(path: Path) -> RubricFile:
    """Read a rubric file.

    :raises ConfigError: The file is invalid; lists all errors with file and line.
    """
    lines: dict[Loc, int] = {(): 1}
    problems: list[tuple[int, str]] = []
    try:
        text = _text(path)
        alias = next((e for e in yaml.parse(text, Loader=yaml.SafeLoader) if isinstance(e, yaml.AliasEvent)), None)
        if alias is not None:
            raise ConfigError(f"{path}:{_line(alias.start_mark)}: aliases (*{alias.anchor}) are not supported")
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
        raise ConfigError(f"{path}: the nesting is too deep") from None
    try:
        found = RubricFile.model_validate(data)
    except ValidationError as e:
        errors = e.errors(include_url=False)
        # A list with invalid entries is also reported as too short.
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
        raise ConfigError(f"{path}: cannot read the file: {e.strerror}; {_HINT}") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: the file is larger than {MAX_BYTES >> 20} MiB; {_HINT}")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ConfigError(f"{path}:{raw[: e.start].count(10) + 1}: is not UTF-8; save the file as UTF-8") from None


def _line(mark: Any) -> int:
    return int(mark.line) + 1


def _note_lines(node: yaml.Node, loc: Loc, lines: dict[Loc, int], problems: list[tuple[int, str]]) -> None:
    """Record the line of every location, and report duplicate keys as problems."""
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
        hint = did_you_mean(str(loc[-1]), known, f"; known keys: {', '.join(known)}")
        return line, f"unknown key {key}{hint}"
    if error["type"] == "missing":
        return line, f"{key} is required"
    if error["type"] == "value_error":
        return line, f"{key + ': ' if key else ''}{error['ctx']['error']}"
    got = repr(error["input"])
    return line, f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {got if len(got) < 80 else got[:77] + '…'}"


def save_rubrics(path: Path, rubrics: RubricFile) -> None:
    """Write a rubric file. An existing file is replaced only when the new one is complete."""
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
    """Write short lists on one line."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flow = all(isinstance(x, (int, float)) for x in data) or all(isinstance(x, str) and len(x) < 30 for x in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _list)
