"""Advantages and token weights, against the papers' formulas worked out with numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.config.schema import AlgorithmSection
from astuner.contracts.types import Sample
from astuner.rollout.credit import Scored, assign_credit, episode_token_weights
from astuner.rollout.credit import find_estimator as named
from tests.advantages import episode_advantages

GROUPS = ["a", "a", "a", "b", "b", "c"]
REWARDS = [1.0, 0.0, 0.5, 1.0, 1.0, 0.3]


def test_grpo_divides_by_the_unbiased_deviation_of_the_group() -> None:
    got = episode_advantages(GROUPS, REWARDS, named("grpo"))
    a = np.array(REWARDS[:3])
    assert got[:3] == pytest.approx(list((a - a.mean()) / (a.std(ddof=1) + 1e-6)))
    assert got[3:] == [0.0, 0.0, 0.0]  # equal rewards, and a group of one


def test_dr_grpo_only_centres() -> None:
    assert episode_advantages(GROUPS, REWARDS, named("dr_grpo")) == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.0, 0.0])
    assert episode_advantages(GROUPS, REWARDS, named("grpo"), norm_by_std=False) == pytest.approx(
        [0.5, -0.5, 0.0, 0.0, 0.0, 0.0]
    )


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    got = episode_advantages(GROUPS, REWARDS, named("rloo"))
    expected = [r - np.mean([o for j, o in enumerate(REWARDS[:3]) if j != i]) for i, r in enumerate(REWARDS[:3])]
    assert got[:3] == pytest.approx(expected)
    assert got[5] == 0.0


def test_reinforce_plus_plus_normalises_over_the_step() -> None:
    r = np.array(REWARDS)
    assert episode_advantages(GROUPS, REWARDS, named("reinforce_plus_plus")) == pytest.approx(
        list((r - r.mean()) / (r.std(ddof=1) + 1e-6))
    )


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8).map(lambda v: [v[0]] * len(v)))
def test_equal_rewards_give_exactly_zero(rewards: list[float]) -> None:
    for estimator in ("grpo", "dr_grpo", "rloo"):
        assert episode_advantages(["g"] * len(rewards), rewards, named(estimator)) == [0.0] * len(rewards)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=8))
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    for estimator in ("grpo", "dr_grpo", "rloo"):
        found = episode_advantages(["g"] * len(rewards), rewards, named(estimator))
        assert math.fsum(found) == pytest.approx(0, abs=1e-6)


def test_each_aggregation_is_its_formula() -> None:
    tokens = [3, 1, 6]
    assert episode_token_weights(tokens, "token-mean", constant_length=10) == [0.1] * 3
    assert episode_token_weights(tokens, "seq-mean-token-mean", constant_length=10) == pytest.approx(
        [1 / 9, 1 / 3, 1 / 18]
    )
    assert episode_token_weights(tokens, "seq-mean-token-sum", constant_length=10) == pytest.approx([1 / 3] * 3)
    assert episode_token_weights(tokens, "seq-mean-token-sum-norm", constant_length=10) == pytest.approx([1 / 30] * 3)


def _sample(episode: str, tokens: int) -> Sample:
    return Sample(
        episode_id=episode, group_id="g", agent="x", input_ids=[0] * (tokens + 1), loss_mask=[0] + [1] * tokens,
        logprobs=[0.0] * (tokens + 1), policy_version=0, reward=0.0,
    )  # fmt: skip


def test_an_episode_that_forks_weighs_no_more() -> None:
    forked = Scored(episode_id="1", group_id="g", reward=1.0, samples=(_sample("1", 2), _sample("1", 2)))
    linear = Scored(episode_id="2", group_id="g", reward=0.0, samples=(_sample("2", 4),))
    samples = assign_credit([forked, linear], AlgorithmSection(), constant_length=8)
    weight = {"1": 0.0, "2": 0.0}
    for s in samples:
        weight[s.episode_id] += s.token_weight * s.trained_tokens
    assert weight["1"] == pytest.approx(weight["2"])
    assert samples[0].advantage == samples[1].advantage == pytest.approx(-samples[2].advantage)


def test_a_penalty_lowers_the_reward_before_the_group_is_compared() -> None:
    episodes = [Scored(episode_id=str(i), group_id="g", reward=1.0, samples=(_sample(str(i), 2),)) for i in range(2)]
    a, b = assign_credit(episodes, AlgorithmSection(), constant_length=8, penalties={("1", "x"): 0.5})
    assert a.advantage > 0 > b.advantage
