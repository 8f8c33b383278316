"""The tree of turns becomes training sequences without losing, doubling or moving a token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.contracts.types import Episode, FinishReason, Generation, JudgeOutput, StopReason, Task, Turn, WorkflowTask
from astuner.rollout.turns import EpisodeRecorder, build_samples
from tests.table import table

TASK = WorkflowTask(task=Task(task_id="t"), episode_id="e", group_id="g")


def turn(
    index: int, prompt: list[int], response: list[int], continues: int | None = None, agent: str = "a", version: int = 0
) -> Turn:
    generation = Generation(
        prompt_ids=prompt,
        response_ids=response,
        logprobs=[-float(t) for t in response],
        finish_reason=FinishReason.STOP,
        policy_version=version,
    )
    return Turn(index=index, agent=agent, generation=generation, continues=continues)


def episode(turns: list[Turn], reward: float | None = 1.0) -> Episode:
    verdict = None if reward is None else JudgeOutput(reward=reward)
    return Episode(workflow_task=TASK, turns=turns, output=None, verdict=verdict, stop_reason=StopReason.COMPLETED)


@st.composite
def forests(draw: st.DrawFn) -> list[Turn]:
    """Random episodes: every turn starts a conversation, or continues any earlier one of its agent."""
    turns: list[Turn] = []
    tokens = iter(range(1, 10_000))
    for index in range(draw(st.integers(1, 10))):
        agent = draw(st.sampled_from("ab"))
        earlier = [t for t in turns if t.agent == agent]
        parent = draw(st.sampled_from([None, *earlier])) if earlier else None
        start = [] if parent is None else [*parent.generation.prompt_ids, *parent.generation.response_ids]
        prompt = start + [next(tokens) for _ in range(draw(st.integers(0 if start else 1, 3)))]
        response = [next(tokens) for _ in range(draw(st.integers(0, 3)))]
        turns.append(turn(index, prompt, response, parent.index if parent else None, agent, draw(st.integers(0, 3))))
    return turns


@given(forests())
def test_every_generated_token_is_trained_exactly_once_where_the_engine_saw_it(turns: list[Turn]) -> None:
    recorder = EpisodeRecorder()
    for t in turns:
        assert recorder.reserve() == t.index
        recorder.add(t)
    built = build_samples(episode(list(recorder.turns)))
    trained = [
        (token, logprob)
        for s in built.samples
        for token, mask, logprob in zip(s.input_ids, s.loss_mask, s.logprobs, strict=True)
        if mask
    ]
    generated = [pair for t in turns for pair in zip(t.generation.response_ids, t.generation.logprobs, strict=True)]
    assert sorted(trained) == sorted(
        generated
    )  # tokens are unique, so equality means exactly once, with its own logprob
    assert built.generated_tokens == len(generated)
    seen = {(*t.generation.prompt_ids, *t.generation.response_ids) for t in turns}
    assert all(tuple(s.input_ids) in seen for s in built.samples)


@given(forests(), st.sets(st.sampled_from("ab")), st.sets(st.sampled_from("ab"), min_size=1), st.integers(1, 3))
def test_every_token_is_trained_or_accounted_for(
    turns: list[Turn], training: set[str], rewarded: set[str], cap: int
) -> None:
    turns = [replace(t, trained=t.agent in training, role=f"role of {t.agent}") for t in turns]
    verdict = JudgeOutput.per_agent({name: float(ord(name)) for name in rewarded})
    built = build_samples(replace(episode(turns), verdict=verdict), max_samples=cap)
    assert {s.agent for s in built.samples} <= training & rewarded
    assert all(s.reward == float(ord(s.agent)) and s.role == f"role of {s.agent}" for s in built.samples)
    trained = sum(s.trained_tokens for s in built.samples)
    assert built.generated_tokens == trained + built.untrained_tokens + built.dropped_tokens
    assert (built.dropped_tokens > 0) <= (built.dropped_paths > 0)
    left_out = [t for t in turns if t.agent not in training & rewarded]
    assert built.untrained_tokens == sum(len(t.generation.response_ids) for t in left_out)


@given(forests(), st.integers(1, 3))
def test_a_cap_keeps_the_longest_paths_and_counts_the_rest(turns: list[Turn], cap: int) -> None:
    everything, capped = build_samples(episode(turns)), build_samples(episode(turns), max_samples=cap)
    assert len(capped.samples) <= cap
    assert capped.dropped_paths == max(0, _paths(turns) - cap)
    assert sum(s.trained_tokens for s in capped.samples) <= sum(s.trained_tokens for s in everything.samples)


def _paths(turns: list[Turn]) -> int:
    return len(_leaves(turns))


def _leaves(turns: list[Turn]) -> list[Turn]:
    spoken = [t for t in turns if t.generation.response_ids]
    return [t for t in spoken if t.index not in {s.continues for s in spoken}]


def _path(leaf: Turn, turns: list[Turn]) -> frozenset[int]:
    """The turns that a sample which ends with ``leaf`` can train."""
    spoken, path = {t.index: t for t in turns if t.generation.response_ids}, set()
    turn: Turn | None = leaf
    while turn is not None:
        path.add(turn.index)
        turn = None if turn.continues is None else spoken.get(turn.continues)
    return frozenset(path)


def _worth(paths: Iterable[frozenset[int]], turns: list[Turn]) -> int:
    """The tokens that these paths train together."""
    return sum(len(turns[i].generation.response_ids) for i in frozenset().union(*paths))


@given(forests(), st.integers(1, 6))
def test_a_cap_keeps_what_picking_the_path_that_adds_most_would_keep(turns: list[Turn], cap: int) -> None:
    """Against the slow way: the longest path of each agent, then again and again the one that adds the most tokens."""
    left = {leaf.index: _path(leaf, turns) for leaf in _leaves(turns)}
    kept: dict[int, frozenset[int]] = {}
    best = {}
    for agent in "ab":
        own = [i for i in left if turns[i].agent == agent]
        best.update({i: left[i] for i in sorted(own, key=lambda i: (-_worth([left[i]], turns), i))[:1]})
    while left and len(kept) < cap:
        held = _worth(kept.values(), turns)
        among = {i: path for i, path in left.items() if i in best} or left
        pick = min(among, key=lambda i: (held - _worth([*kept.values(), among[i]], turns), i))
        kept[pick] = left.pop(pick)
    built = build_samples(episode(turns), max_samples=cap)
    ends = [[*turns[i].generation.prompt_ids, *turns[i].generation.response_ids] for i in sorted(kept)]
    assert [s.input_ids for s in built.samples] == ends
    assert sum(s.trained_tokens for s in built.samples) == _worth(kept.values(), turns)


@given(forests(), st.integers(2, 4))
def test_no_other_choice_of_paths_trains_more_tokens(turns: list[Turn], cap: int) -> None:
    paths = [_path(leaf, turns) for leaf in _leaves(turns)]
    longest = [
        max((p for p, leaf in zip(paths, _leaves(turns), strict=True) if leaf.agent == a), default=frozenset(),
            key=lambda p: _worth([p], turns))
        for a in "ab"
    ]  # fmt: skip
    needed = {p for p in longest if p}
    choices = [c for c in combinations(paths, min(cap, len(paths))) if needed <= set(c)]
    built = build_samples(episode(turns), max_samples=cap)
    assert sum(s.trained_tokens for s in built.samples) == max(_worth(c, turns) for c in choices)


def test_a_path_that_shares_a_long_start_adds_only_its_end() -> None:
    """One long turn that three short ones continue, and another agent's turn: two samples hold 150 of 152 tokens."""
    turns = [turn(0, [1], [2] * 100)]
    turns += [turn(i, [1, *[2] * 100, 3 + i], [9], continues=0) for i in (1, 2, 3)]
    turns += [turn(4, [7], [8] * 50, agent="b")]
    built = build_samples(episode(turns), max_samples=2)
    assert [(s.agent, s.trained_tokens) for s in built.samples] == [("a", 101), ("b", 50)]
    assert (built.dropped_paths, built.dropped_tokens) == (2, 2)


def test_no_agent_is_left_out_while_another_has_two_paths() -> None:
    turns = [turn(i, [1, i], [2] * (9 - i)) for i in range(4)] + [turn(4, [7], [8], agent="b")]
    assert [s.agent for s in build_samples(episode(turns), max_samples=2).samples] == ["a", "b"]
    assert [s.trained_tokens for s in build_samples(episode(turns), max_samples=1).samples] == [9]


def test_a_shared_prefix_is_trained_in_the_first_path_only() -> None:
    turns = [turn(0, [1], [2]), turn(1, [1, 2, 3], [4], 0), turn(2, [1, 2, 5], [6], 0)]
    first, second = build_samples(episode(turns)).samples
    assert (first.input_ids, first.loss_mask) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert (second.input_ids, second.loss_mask) == ([1, 2, 5, 6], [0, 0, 0, 1])
    assert second.logprobs == [0.0, -2.0, 0.0, -6.0]


def test_a_path_is_as_old_as_its_oldest_generation() -> None:
    (sample,) = build_samples(episode([turn(0, [1], [2], version=3), turn(1, [1, 2], [4], 0, version=5)])).samples
    assert sample.policy_version == 3


def test_an_episode_without_a_reward_gives_nothing_to_train_on() -> None:
    assert build_samples(episode([turn(0, [1], [2])], reward=None)).samples == ()


@table(
    ("bad", "complaint"),
    [
        (turn(1, [1, 9, 3], [4], 0), "does not start with the tokens"),
        (turn(1, [1, 2, 3], [4], 7), "of another agent"),
        (turn(1, [1, 2, 3], [4], 0, agent="b"), "of another agent"),
        (turn(0, [1], [2]), "recorded twice"),
    ],
)
def test_the_recorder_refuses_a_turn_that_does_not_continue_what_it_says(bad: Turn, complaint: str) -> None:
    recorder = EpisodeRecorder()
    recorder.add(turn(0, [1], [2]))
    with pytest.raises(ValueError, match=complaint):
        recorder.add(bad)
