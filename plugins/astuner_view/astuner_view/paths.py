"""Which turns a credited sample is made of, and so what became of each token that was generated.

`astuner.rollout.samples` makes a sample of each path through the tree of turns that ends in a leaf.  A sample does not
say which leaf that was; its tokens do, as its last turn's prompt and response are the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from astuner.contracts.types import Sample, Turn
from astuner_record.episode_log.reader import Credited, LoggedEpisode


@dataclass(frozen=True, kw_only=True)
class CreditedPath:
    """A sample, and what it was credited with."""

    credit: Credited
    sample: Sample
    turns: tuple[Turn, ...]
    """From the root to the leaf."""


@dataclass(frozen=True, kw_only=True)
class TrainedTurn:
    """What became of the tokens of a turn."""

    path: CreditedPath
    """The sample in which it is trained."""
    trained: tuple[int, ...]
    """1 or 0 for each response token."""
    trainer_logprobs: tuple[float | None, ...] | None
    """For each response token; None as a whole where the trainer computed none."""


def credited_paths(logged: LoggedEpisode) -> tuple[CreditedPath, ...]:
    """The paths of an episode, in the order of its samples.

    :raises ValueError: the credit is not of these turns.
    """
    spoken = {t.index: t for t in logged.episode.turns if t.trained and t.generation.response_ids}
    inner = {t.continues for t in spoken.values()}
    leaves = [t for t in spoken.values() if t.index not in inner]
    paths = []
    for credit, sample in zip(logged.credit, logged.samples(), strict=True):
        leaf = next((t for t in leaves if t.agent == sample.agent and _is_whole(t, sample)), None)
        if leaf is None:
            raise ValueError(f"no turn ends sample {credit.sample}")
        leaves.remove(leaf)
        turns = tuple(_upwards(leaf, spoken))[::-1]
        paths.append(CreditedPath(credit=credit, sample=sample, turns=turns))
    return tuple(paths)


def trained_turns(paths: tuple[CreditedPath, ...]) -> dict[int, TrainedTurn]:
    """Index of a turn -> what became of its tokens; only of turns that have a trained one."""
    found: dict[int, TrainedTurn] = {}
    for path in paths:
        mask, logprobs = path.sample.loss_mask, path.credit.trainer_logprobs
        at = 0
        """How many trained tokens stand before the turn."""
        for turn in path.turns:
            start = len(turn.generation.prompt_ids)
            own = tuple(mask[start : start + len(turn.generation.response_ids)])
            if any(own):
                count = sum(own)
                spread = None if logprobs is None else _spread(own, iter(logprobs[at : at + count]))
                found[turn.index] = TrainedTurn(path=path, trained=own, trainer_logprobs=spread)
                at += count
    return found


def _spread(mask: tuple[int, ...], values: Iterator[float]) -> tuple[float | None, ...]:
    return tuple(next(values, None) if trained else None for trained in mask)


def _is_whole(turn: Turn, sample: Sample) -> bool:
    said = turn.generation
    if len(said.prompt_ids) + len(said.response_ids) != len(sample.input_ids):
        return False
    return [*said.prompt_ids, *said.response_ids] == list(sample.input_ids)


def _upwards(leaf: Turn, spoken: Mapping[int, Turn]) -> Iterator[Turn]:
    turn: Turn | None = leaf
    while turn is not None:
        yield turn
        turn = None if turn.continues is None else spoken.get(turn.continues)
