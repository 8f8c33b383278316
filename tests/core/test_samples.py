"""The tree of turns becomes training sequences without losing, doubling or moving a token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.rollout.recorder import EpisodeRecorder
from astuner.rollout.samples import build_samples
from astuner.types import Episode, FinishReason, Generation, JudgeOutput, StopReason, Task, Turn, WorkflowTask

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
    spoken = [t for t in turns if t.generation.response_ids]
    return len([t for t in spoken if t.index not in {s.continues for s in spoken}])


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


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (turn(1, [1, 9, 3], [4], 0), "does not begin with the tokens"),
        (turn(1, [1, 2, 3], [4], 7), "not its own"),
        (turn(1, [1, 2, 3], [4], 0, agent="b"), "not its own"),
        (turn(0, [1], [2]), "recorded twice"),
    ],
)
def test_the_recorder_refuses_a_turn_that_does_not_continue_what_it_says(bad: Turn, complaint: str) -> None:
    recorder = EpisodeRecorder()
    recorder.add(turn(0, [1], [2]))
    with pytest.raises(ValueError, match=complaint):
        recorder.add(bad)
