"""The turns of one episode: kept as they come, and cut into training sequences.

`EpisodeRecorder` keeps them as a forest of exact token prefixes: a turn's parent is the turn it continues.  Invariant:
if a turn says it continues another, its prompt begins with that turn's prompt + response, token for token, and both are
by the same agent.  It is checked when the turn is added, so that everything behind the recorder may rely on it.

`build_samples` makes one `Sample` of each root-to-leaf path.  Invariants (property-tested):

* a sample's ``input_ids`` are exactly the leaf's prompt + response, that is, what the engine saw;
* over all samples of an episode, every token that a trained agent generated has ``loss_mask`` 1 exactly once (in the
  first sample that holds it), unless its paths were left out by ``max_samples``, which is counted; a token of any other
  agent is in no sample;
* no other choice of as many paths, with the longest one of each agent among them, trains more tokens;
* ``logprobs`` stand at the positions of the tokens they belong to.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from astuner.contracts.types import Episode, ExternalTurn, Sample, Turn


class EpisodeRecorder:
    """Append-only record of one episode. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[int, Turn] = {}
        self._external: list[ExternalTurn] = []
        self._next = 0

    def reserve(self) -> int:
        """The index of the next turn. A reserved index that is never added leaves a gap, which is harmless."""
        with self._lock:
            self._next += 1
            return self._next - 1

    def add(self, turn: Turn) -> None:
        """Keep ``turn``.

        :raises ValueError: its index is taken, or it does not exactly continue what it says it continues.
        """
        with self._lock:
            if turn.index in self._turns:
                raise ValueError(f"turn {turn.index} is recorded twice")
            if turn.continues is not None:
                self._check_continuation(turn, turn.continues)
            self._turns[turn.index] = turn

    def _check_continuation(self, turn: Turn, continued: int) -> None:
        parent = self._turns.get(continued)
        if parent is None or parent.agent != turn.agent:
            raise ValueError(f"turn {turn.index} of {turn.agent!r} continues turn {continued}, which is not its own")
        prompt, start = turn.generation.prompt_ids, parent.generation
        known = [*start.prompt_ids, *start.response_ids]
        if (prompt if type(prompt) is list else list(prompt))[: len(known)] != known:
            raise ValueError(
                f"turn {turn.index} does not begin with the tokens of turn {continued}, which it continues"
            )

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far, in the order they were answered."""
        with self._lock:
            return tuple(self._turns[i] for i in sorted(self._turns))

    def leave_out(self, index: int) -> None:
        """Never train this turn: its reply reached nobody."""
        with self._lock:
            turn = self._turns.get(index)
            if turn is not None and turn.trained:
                self._turns[index] = replace(turn, trained=False, lost=True)

    def add_external(self, turn: ExternalTurn) -> None:
        """Keep what a model outside of the run said."""
        with self._lock:
            self._external.append(turn)

    @property
    def external(self) -> tuple[ExternalTurn, ...]:
        """What models outside of the run said so far."""
        with self._lock:
            return tuple(self._external)


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """The samples of one episode, and what had to be left out."""

    samples: tuple[Sample, ...]
    generated_tokens: int
    """By all agents."""
    untrained_tokens: int = 0
    """Those of agents that do not train, or that have no reward (another one ended the episode)."""
    dropped_paths: int
    """Paths left out by ``max_samples``."""
    dropped_tokens: int = 0
    """Tokens that are trained nowhere because of that."""


def build_samples(episode: Episode, *, max_samples: int = 30) -> SampleSet:
    """Cut ``episode`` into samples; empty when it is not scored.

    With more than ``max_samples`` paths, the one of each agent that trains the most tokens is kept first, then those
    that add the most tokens to the ones kept (earlier ones on a tie).
    """
    if episode.reward is None:
        return SampleSet(samples=(), generated_tokens=0, dropped_paths=0)
    counted = [t for t in episode.turns if t.trained and episode.reward_of(t.agent, t.role) is not None]
    spoken = {t.index: t for t in counted if t.generation.response_ids}
    inner = {t.continues for t in spoken.values()}
    leaves = [t for t in spoken.values() if t.index not in inner]
    kept = leaves if len(leaves) <= max_samples else _best(leaves, spoken, max_samples)
    claimed: set[int] = set()
    samples = [_sample(episode, list(upwards(leaf, spoken))[::-1], claimed) for leaf in kept]
    generated, trainable = _tokens(episode.turns), _tokens(counted)
    return SampleSet(
        samples=tuple(s for s in samples if s.trained_tokens),
        generated_tokens=generated,
        untrained_tokens=generated - trainable,
        dropped_paths=len(leaves) - len(kept),
        dropped_tokens=trainable - sum(s.trained_tokens for s in samples),
    )


def _tokens(turns: Sequence[Turn]) -> int:
    return sum(len(t.generation.response_ids) for t in turns)


def upwards(leaf: Turn, spoken: Mapping[int, Turn]) -> Iterator[Turn]:
    """The path that ends with ``leaf``, from there to its root."""
    turn: Turn | None = leaf
    while turn is not None:
        yield turn
        turn = None if turn.continues is None else spoken.get(turn.continues)


def _best(leaves: Sequence[Turn], spoken: Mapping[int, Turn], n: int) -> list[Turn]:
    """The leaves of the ``n`` paths to keep, in the order given.

    A path adds the turns that no longer path holds.  Picking the path that adds the most again and again would
    find the same numbers, but here every turn is looked at once.
    """
    whole: dict[int, int] = {}  # index of a turn -> the tokens that were generated from its root up to it
    for turn in spoken.values():  # a turn comes after the one that it continues
        above = 0 if turn.continues is None else whole.get(turn.continues, 0)
        whole[turn.index] = above + len(turn.generation.response_ids)
    claimed: set[int] = set()
    agents: set[str] = set()
    ranks: list[tuple[bool, int, int]] = []
    for i in sorted(range(len(leaves)), key=lambda i: -whole[leaves[i].index]):
        leaf, added = leaves[i], 0
        for turn in upwards(leaf, spoken):
            if turn.index in claimed:
                break
            claimed.add(turn.index)
            added += len(turn.generation.response_ids)
        ranks.append((leaf.agent in agents, -added, i))
        agents.add(leaf.agent)
    return [leaves[i] for i in sorted(i for *_, i in sorted(ranks)[:n])]


def _sample(episode: Episode, path: Sequence[Turn], claimed: set[int]) -> Sample:
    last = path[-1]
    leaf = last.generation
    reward = episode.reward_of(last.agent, last.role)
    assert reward is not None  # the caller looked
    input_ids = [*leaf.prompt_ids, *leaf.response_ids]
    loss_mask = [0] * len(input_ids)
    logprobs = [0.0] * len(input_ids)
    for turn in path:
        start, n = len(turn.generation.prompt_ids), len(turn.generation.response_ids)
        logprobs[start : start + n] = turn.generation.logprobs
        if turn.index not in claimed:
            loss_mask[start : start + n] = [1] * n
            claimed.add(turn.index)
    return Sample(
        episode_id=episode.workflow_task.episode_id,
        group_id=episode.workflow_task.group_id,
        agent=last.agent,
        role=last.role,
        policy=last.policy,
        input_ids=input_ids,
        loss_mask=loss_mask,
        logprobs=logprobs,
        policy_version=min(t.generation.policy_version for t in path),
        reward=reward,
    )
