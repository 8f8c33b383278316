"""Rubrics as a file that people read and edit.

What grades (criteria, weights, scale) and what is known about it (where it was learned, how well it agreed) stand in
one YAML file.  Invariant: `RubricFile.digest` names what grades and nothing else, so an agreement that was measured
before somebody edited a criterion is seen not to be about this file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, StringConstraints, model_validator

from astuner.contracts.section import Section
from astuner_rubrics.known import PRINT
from astuner_rubrics.labels import Mode, digest
from astuner_rubrics.strict_yaml import read_yaml

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


class MeasuredAgreement(Section):
    """How often the rubrics agreed with labels."""

    share: float
    low: float
    """The lower end of a 95 % interval."""
    high: float
    n: int
    """Examples."""
    chance: float
    """What the best guess without looking would reach."""


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
    agreement: MeasuredAgreement
    """With the labels of the held-out examples."""
    agreement_in_training: MeasuredAgreement
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
    return read_yaml(path, RubricFile, "`astuner judge learn` writes one")


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
