"""What Trinity's actors ask and tell the run's own process, each with what comes with it and what comes back.

They travel by `astuner_trinity.mailbox`, and `astuner_trinity.session` answers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from astuner import Ending, Group  # noqa: F401  (as the next ones but `Found`: what is answered)
    from astuner.contracts.types import Episode
    from astuner_ray.training.before_update import Found
    from astuner_trinity.experiences import Credited
    from astuner_trinity.taskset import Drawn  # noqa: F401
    from astuner_trinity.workflow import Parts  # noqa: F401

R = TypeVar("R")


@dataclass(frozen=True)
class Request(Generic[R]):
    """Answered with an ``R``; of news that need no answer it is None."""


@dataclass(frozen=True)
class At(Request[None]):
    """``who``, the explorer or the trainer, is doing something else."""

    who: str
    doing: str


@dataclass(frozen=True)
class Failed(Request[None]):
    """Something failed that Trinity only writes into a log file."""

    what: str


# --------------------------------------------------------------------------------------------------------- the explorer


@dataclass(frozen=True)
class NextDraws(Request["Drawn"]):
    """The draws of the next step; none when all were drawn."""


@dataclass(frozen=True)
class WeightsTaken(Request[None]):
    """The rollout engines have the weights of a step."""

    version: int


@dataclass(frozen=True)
class RolledOut(Request[None]):
    """All groups of a step have ended, as Trinity sees it."""

    step: int


@dataclass(frozen=True)
class IsValidationDue(Request[bool]):
    """Whether the weights of a step are to be measured: one since the last measurement was to be."""

    version: int


@dataclass(frozen=True)
class BeginValidation(Request["Drawn"]):
    """The draws that measure the weights of a step."""

    step: int


@dataclass(frozen=True)
class Validated(Request[None]):
    """A group of a validation has ended."""

    step: int
    group: Group


@dataclass(frozen=True)
class EndValidation(Request[None]):
    """All groups of the validation have ended, as Trinity sees it."""


# ------------------------------------------------------------------------------------------- the runners, the pipeline


@dataclass(frozen=True)
class GetParts(Request["Parts"]):
    """What a runner needs to run episodes."""


@dataclass(frozen=True)
class EpisodeOver(Request[None]):
    step: int
    episode: Episode


@dataclass(frozen=True)
class GroupOver(Request["Ending"]):
    """Whether a group is trained on, or what to run in its place."""

    step: int
    group: Group


@dataclass(frozen=True)
class GetCredit(Request[dict[tuple[str, int], "Credited"]]):
    """(Episode, number of its sample) -> credit, of those samples of these groups that have a gradient."""

    step: int
    groups: Sequence[str]


# ---------------------------------------------------------------------------------------------------------- the trainer


@dataclass(frozen=True)
class TrainerLogprobs(Request[None]):
    """What the trainer computed before its first optimizer step."""

    step: int
    found: Found


@dataclass(frozen=True)
class Trained(Request[None]):
    """A step is trained; Trinity's numbers of it."""

    step: int
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class IsSaveDue(Request[bool]):
    step: int


@dataclass(frozen=True)
class Saved(Request[None]):
    step: int
    seconds: float


OF_TRAINER = (At, TrainerLogprobs, Trained, IsSaveDue, Saved)
"""What `astuner_trinity.stages.RunTrainer` asks, and its workers (`astuner_trinity.algorithm`) tell."""
