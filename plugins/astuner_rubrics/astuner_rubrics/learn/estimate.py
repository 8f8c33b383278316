"""What learning would take, without asking anybody."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from astuner_rubrics.grading import AT_ONCE
from astuner_rubrics.labels import Labels
from astuner_rubrics.learn.examples import objections, rule_of, split
from astuner_rubrics.learn.learning import CANDIDATES_PER_RUBRIC
from astuner_rubrics.learn.settings import Settings

_PROMPT_TOKENS = 700
"""Of instructions, about."""
_CHARACTERS_PER_TOKEN = 4


@dataclass(frozen=True)
class Estimate:
    """Requests and tokens that learning takes."""

    mode: str
    train: int
    held_out: int
    fewest_requests: int
    """If every first proposal is right, and all agree on ten criteria."""
    most_requests: int
    prompt_tokens_per_request: int
    objections: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [
            f"{self.train} {self.mode} examples to learn from, {self.held_out} held out",
            f"{self.fewest_requests:,} to {self.most_requests:,} requests, each with about "
            f"{self.prompt_tokens_per_request:,} tokens of prompt: "
            f"{self.fewest_requests * self.prompt_tokens_per_request:,} to "
            f"{self.most_requests * self.prompt_tokens_per_request:,} tokens of prompts",
        ]
        return "\n".join([*lines, *(f"it would refuse: {text}" for text in self.objections)])


def check_and_estimate(labels: Labels, settings: Settings) -> Estimate:
    """:raises NotLearned: the examples cannot teach anything."""
    rule = rule_of(labels, settings)
    parts = split(labels.samples, settings.held_out, settings.seed)
    train, held_out = len(parts.train), len(parts.held_out)
    proposed = min(train * settings.proposals, CANDIDATES_PER_RUBRIC * settings.max_rubrics)
    measuring = held_out * math.ceil(settings.max_rubrics / AT_ONCE) * settings.votes
    themes = (1 + train * settings.votes) if settings.themes else 0
    fewest = train * 2 + train * settings.votes + held_out * settings.votes + themes
    most = train * 2 * (settings.max_epochs + 1) + train * math.ceil(proposed / AT_ONCE) * settings.votes
    characters = sum(len(s.question) + sum(map(len, s.answers)) for s in labels.samples) / len(labels.samples)
    return Estimate(
        mode=labels.mode.value,
        train=train,
        held_out=held_out,
        fewest_requests=fewest,
        most_requests=most + measuring + themes,
        prompt_tokens_per_request=_PROMPT_TOKENS + round(characters / _CHARACTERS_PER_TOKEN),
        objections=tuple(objections(labels, rule, settings)),
    )
