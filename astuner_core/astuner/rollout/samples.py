"""From an episode's turns to training sequences.

The turns of one agent form a forest: a turn's parent is the turn it continues.  Each root-to-leaf path becomes
one `Sample`.  Invariants (property-tested):

* a sample's ``input_ids`` are exactly the leaf's prompt + response, that is, what the engine saw;
* over all samples of an episode, every token that a trained agent generated has ``loss_mask`` 1 exactly once (in the
  first path that holds it), unless its path was left out by ``max_samples``, which is counted; a token of any other
  agent is in no sample;
* ``logprobs`` stand at the positions of the tokens they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from astuner.types import Episode, Sample, Turn


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

    With more than ``max_samples`` paths, those that train the most tokens are kept (earlier ones on a tie).
    """
    if episode.reward is None:
        return SampleSet(samples=(), generated_tokens=0, dropped_paths=0)
    counted = [t for t in episode.turns if t.trained and episode.reward_of(t.agent, t.role) is not None]
    paths = _paths([t for t in counted if t.generation.response_ids])
    kept = sorted(range(len(paths)), key=lambda i: (-sum(len(t.generation.response_ids) for t in paths[i]), i))
    chosen = [paths[i] for i in sorted(kept[:max_samples])]
    claimed: set[int] = set()
    samples = [_sample(episode, path, claimed) for path in chosen]
    generated, trainable = _tokens(episode.turns), _tokens(counted)
    return SampleSet(
        samples=tuple(s for s in samples if s.trained_tokens),
        generated_tokens=generated,
        untrained_tokens=generated - trainable,
        dropped_paths=len(paths) - len(chosen),
        dropped_tokens=trainable - sum(s.trained_tokens for s in samples),
    )


def _tokens(turns: Sequence[Turn]) -> int:
    return sum(len(t.generation.response_ids) for t in turns)


def _paths(turns: Sequence[Turn]) -> list[list[Turn]]:
    """Root-to-leaf paths, ordered by leaf."""
    by_index = {t.index: t for t in turns}
    inner = {t.continues for t in turns}
    paths = []
    for leaf in turns:
        if leaf.index in inner:
            continue
        path = [leaf]
        while (parent := path[-1].continues) is not None and parent in by_index:
            path.append(by_index[parent])
        paths.append(path[::-1])
    return paths


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
