"""Credit where agents have roles: who is compared with whom, and what each policy's loss is a sum of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.config.schema import AlgorithmSection
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Sample,
    StopReason,
    Task,
    Turn,
    WorkflowTask,
)
from astuner.rollout.credit import Credit, Scored, assign_credit, episode_token_weights
from astuner.rollout.credit import find_estimator as named
from astuner.rollout.pool import Group
from astuner.rollout.turns import build_samples
from tests.advantages import episode_advantages
from tests.table import table

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "none")
MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
L = 16

Cast = Mapping[str, tuple[str, str, float, Sequence[int]]]
"""Agent -> its role, its policy, its reward, and the trained tokens of each of its samples."""


def sample(episode: str, group: str, agent: str, role: str, policy: str, reward: float, tokens: int) -> Sample:
    return Sample(
        episode_id=episode,
        group_id=group,
        agent=agent,
        role=role,
        policy=policy,
        input_ids=[0] * (tokens + 1),
        loss_mask=[0] + [1] * tokens,
        logprobs=[0.0] * (tokens + 1),
        policy_version=0,
        reward=reward,
    )


def scored(episode: str, cast: Cast, group: str = "g") -> Scored:
    samples = [
        sample(episode, group, agent, role, policy, reward, n)
        for agent, (role, policy, reward, tokens) in cast.items()
        for n in tokens
    ]
    credits = [Credit(agent=a, role=role, policy=p, reward=r) for a, (role, p, r, _) in cast.items()]
    mean = math.fsum(c.reward for c in credits) / len(credits)
    return Scored(episode_id=episode, group_id=group, reward=mean, samples=tuple(samples), credits=tuple(credits))


def credited(episodes: Sequence[Scored], **algorithm: Any) -> list[Sample]:
    settings = AlgorithmSection.model_validate({"loss_agg_mode": "token-mean", **algorithm})
    return assign_credit(episodes, settings, constant_length=L)


def advantages(samples: Sequence[Sample]) -> dict[tuple[str, str], float]:
    found = {(s.episode_id, s.agent): s.advantage for s in samples}
    assert all(found[s.episode_id, s.agent] == s.advantage for s in samples)  # all samples of an agent have the same
    return found


def alone(episode: str, reward: float, group: str = "g", role: str = "default") -> Scored:
    return scored(episode, {"main": (role, "default", reward, [3])}, group)


rewards = st.floats(-10, 10).map(lambda r: round(r, 3))
groups = st.lists(st.sampled_from("gh"), min_size=2, max_size=6)


# --- advantages -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.data(), groups, st.sampled_from(ESTIMATORS))
def test_each_role_is_credited_as_if_it_were_alone(data: st.DataObject, drawn: list[str], estimator: str) -> None:
    """Whatever the others got: the advantages of a role are those of a run that has no other role."""
    own = [(data.draw(rewards), data.draw(rewards)) for _ in drawn]
    both = [
        scored(f"{i}", {"w": ("wolf", "a", wolf, [2]), "v": ("villager", "b", villager, [5, 1])}, group)
        for i, (group, (wolf, villager)) in enumerate(zip(drawn, own, strict=True))
    ]
    found = advantages(credited(both, adv_estimator=estimator))
    for agent, position in (("w", 0), ("v", 1)):
        expected = episode_advantages(drawn, [r[position] for r in own], named(estimator))
        assert [found[f"{i}", agent] for i in range(len(drawn))] == expected


def test_a_zero_sum_game_has_spread_for_everybody() -> None:
    """The mean over the agents is the same in every attempt, and yet each of them learns from winning and losing."""
    games = [
        scored(str(i), {"w": ("wolf", "p", won, [2]), "v": ("villager", "p", -won, [2])})
        for i, won in enumerate([1.0, -1.0, 1.0, -1.0])
    ]
    assert {g.reward for g in games} == {0.0}
    found = advantages(credited(games))
    std = np.std([1, -1, 1, -1], ddof=1)
    for i, won in enumerate([1.0, -1.0, 1.0, -1.0]):
        assert found[str(i), "w"] == pytest.approx(won / (std + 1e-6))
        assert found[str(i), "v"] == pytest.approx(-won / (std + 1e-6))


def played(number: int, each: Mapping[str, float]) -> Episode:
    turns = [
        Turn(
            index=i,
            agent=agent,
            role=agent,
            policy="p",
            continues=None,
            generation=Generation(
                prompt_ids=[1],
                response_ids=[2, 3],
                logprobs=[-1.0, -1.0],
                finish_reason=FinishReason.STOP,
                policy_version=0,
            ),
        )
        for i, agent in enumerate(each)
    ]
    return Episode(
        workflow_task=WorkflowTask(task=Task(task_id="t"), episode_id=str(number), group_id="g"),
        turns=turns,
        output=None,
        verdict=JudgeOutput.per_agent(each),
        stop_reason=StopReason.COMPLETED,
    )


def test_the_group_of_a_zero_sum_game_is_worth_training_on_and_one_without_a_difference_is_not() -> None:
    def group(*games: Mapping[str, float]) -> Group:
        return Group(group_id="g", task=Task(task_id="t"), episodes=tuple(played(i, g) for i, g in enumerate(games)))

    assert group({"w": 1, "v": -1}, {"w": -1, "v": 1}).has_spread
    assert not group({"w": 1, "v": -1}, {"w": 1, "v": -1}).has_spread


def test_from_an_episode_to_the_credit_of_each_role() -> None:
    games = [played(0, {"w": 1, "v": 0.25}), played(1, {"w": 0, "v": 0.25})]
    found = advantages(credited([Scored.of(g, build_samples(g).samples) for g in games]))
    assert found["0", "w"] == pytest.approx(math.sqrt(0.5), rel=1e-5)
    assert found["1", "w"] == pytest.approx(-math.sqrt(0.5), rel=1e-5)
    assert found["0", "v"] == found["1", "v"] == 0.0


# --- teams ------------------------------------------------------------------------------------------------------


def team(episode: str, each: Sequence[float], group: str = "g", tokens: int = 2) -> Scored:
    return scored(episode, {f"w{n}": ("wolf", "a", r, [tokens]) for n, r in enumerate(each)}, group)


@pytest.mark.slow
@given(st.lists(rewards, min_size=2, max_size=5), st.lists(st.integers(1, 4), min_size=5, max_size=5))
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_team_that_shares_its_reward_counts_once_however_large_it_is(
    estimator: str, shared: list[float], sizes: list[int]
) -> None:
    teams = [team(str(i), [r] * size) for i, (r, size) in enumerate(zip(shared, sizes, strict=False))]
    found = advantages(credited(teams, adv_estimator=estimator))
    single = episode_advantages(["g"] * len(shared), shared, named(estimator))
    for (episode, _), advantage in found.items():
        assert advantage == single[int(episode)]


@table("estimator", ["grpo", "dr_grpo", "rloo"])
def test_a_team_that_does_not_share_is_compared_member_by_member(estimator: str) -> None:
    teams = [team("0", [1.0, 0.0]), team("1", [0.5, 0.5])]
    found = advantages(credited(teams, adv_estimator=estimator))
    expected = episode_advantages(["g"] * 4, [1.0, 0.0, 0.5, 0.5], named(estimator))
    assert [found["0", "w0"], found["0", "w1"], found["1", "w0"], found["1", "w1"]] == expected
    assert expected[0] > 0 > expected[1]


@given(st.lists(st.tuples(rewards, rewards), min_size=2, max_size=5), st.sampled_from(ESTIMATORS))
def test_by_agent_every_name_is_compared_with_itself(each: list[tuple[float, float]], estimator: str) -> None:
    found = advantages(
        credited([team(str(i), r) for i, r in enumerate(each)], adv_compare="agent", adv_estimator=estimator)
    )
    for member in range(2):
        expected = episode_advantages(["g"] * len(each), [r[member] for r in each], named(estimator))
        assert [found[str(i), f"w{member}"] for i in range(len(each))] == expected


def test_by_role_and_by_agent_differ_where_a_position_is_better_than_another() -> None:
    """The first wolf always gets 1 more than the second: by name nobody did better than usual."""
    games = [team("0", [1.0, 0.0]), team("1", [1.0, 0.0])]
    assert set(advantages(credited(games, adv_compare="agent")).values()) == {0.0}
    assert {a > 0 for a in advantages(credited(games)).values()} == {True, False}


def test_roles_of_different_groups_are_never_compared() -> None:
    games = [alone("0", 1.0, "g"), alone("1", 1.0, "g"), alone("2", 0.0, "h"), alone("3", 0.0, "h")]
    assert set(advantages(credited(games)).values()) == {0.0}


def test_a_role_that_is_absent_from_an_attempt_is_compared_over_those_it_took_part_in() -> None:
    games = [
        scored("0", {"w": ("wolf", "a", 1.0, [2]), "v": ("villager", "b", 0.3, [2])}),
        scored("1", {"w": ("wolf", "a", 0.0, [2])}),
        scored("2", {"w": ("wolf", "a", 0.5, [2]), "v": ("villager", "b", 0.7, [2])}),
    ]
    found = advantages(credited(games, adv_estimator="dr_grpo"))
    assert [found[str(i), "w"] for i in range(3)] == pytest.approx([0.5, -0.5, 0.0])
    assert [found["0", "v"], found["2", "v"]] == pytest.approx([-0.2, 0.2])


def test_a_penalty_meets_the_agent_that_earned_it_only() -> None:
    games = [scored(str(i), {"w": ("wolf", "a", 1.0, [2]), "v": ("villager", "b", 1.0, [2])}) for i in range(2)]
    samples = assign_credit(games, AlgorithmSection(), constant_length=L, penalties={("1", "v"): 0.5})
    found = advantages(samples)
    assert found["0", "w"] == found["1", "w"] == 0.0
    assert found["0", "v"] > 0 > found["1", "v"]


# --- token weights ----------------------------------------------------------------------------------------------

tokens = st.lists(st.integers(1, 6), min_size=1, max_size=3)


@pytest.mark.slow
@given(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=5))
@pytest.mark.parametrize("mode", MODES)
def test_each_policys_loss_is_the_one_of_a_run_of_its_own(
    mode: str, episodes: list[tuple[list[int], list[int]]]
) -> None:
    games = [
        scored(str(i), {"w": ("wolf", "a", 1.0, mine), "v": ("villager", "b", 0.0, theirs)})
        for i, (mine, theirs) in enumerate(episodes)
    ]
    samples = credited(games, loss_agg_mode=mode)
    for policy, position in (("a", 0), ("b", 1)):
        expected = episode_token_weights([sum(e[position]) for e in episodes], mode, constant_length=L)
        mine = [s for s in samples if s.policy == policy]
        assert [s.token_weight for s in mine] == [expected[int(s.episode_id)] for s in mine]
    if mode in ("token-mean", "seq-mean-token-mean"):
        for policy in "ab":
            total = math.fsum(s.token_weight * s.trained_tokens for s in samples if s.policy == policy)
            assert total == pytest.approx(1.0)


@table("mode", MODES)
def test_agents_with_one_policy_share_its_loss(mode: str) -> None:
    """Two roles that one policy speaks for weigh as much together as one agent that said all of it."""
    two = [
        scored("0", {"w": ("wolf", "p", 1.0, [2]), "v": ("villager", "p", 0.0, [3])}),
        scored("1", {"w": ("wolf", "p", 0.0, [1])}),
    ]
    one = [scored("0", {"x": ("x", "p", 1.0, [5])}), scored("1", {"x": ("x", "p", 0.0, [1])})]
    weight = {s.episode_id: s.token_weight for s in credited(one, loss_agg_mode=mode)}
    assert all(s.token_weight == weight[s.episode_id] for s in credited(two, loss_agg_mode=mode))


def test_episodes_in_which_a_policy_was_silent_do_not_thin_out_its_loss() -> None:
    games = [
        scored("0", {"w": ("wolf", "a", 1.0, [2]), "v": ("villager", "b", 0.0, [4])}),
        *(scored(str(i), {"w": ("wolf", "a", 0.0, [2])}) for i in (1, 2, 3)),
    ]
    (villager,) = (s for s in credited(games, loss_agg_mode="seq-mean-token-sum") if s.policy == "b")
    assert villager.token_weight == 1.0


@given(st.lists(rewards, min_size=2, max_size=6), st.sampled_from(ESTIMATORS), st.sampled_from(MODES))
def test_one_role_is_credited_as_an_experiment_without_roles(each: list[float], estimator: str, mode: str) -> None:
    named = credited([alone(str(i), r, role="wolf") for i, r in enumerate(each)], adv_estimator=estimator,
                     loss_agg_mode=mode)  # fmt: skip
    plain = [
        Scored(episode_id=e.episode_id, group_id="g", reward=r, samples=e.samples)
        for r, e in ((r, alone(str(i), r)) for i, r in enumerate(each))
    ]
    expected = credited(plain, adv_estimator=estimator, loss_agg_mode=mode)
    assert [(s.advantage, s.token_weight) for s in named] == [(s.advantage, s.token_weight) for s in expected]


@given(st.lists(st.tuples(rewards, rewards), min_size=2, max_size=6), st.sampled_from(["grpo", "dr_grpo", "rloo"]))
def test_the_advantages_of_a_role_sum_to_zero_in_a_group(each: list[tuple[float, float]], estimator: str) -> None:
    games = [
        scored(str(i), {"w": ("wolf", "a", w, [1]), "v": ("villager", "b", v, [1])}) for i, (w, v) in enumerate(each)
    ]
    samples = credited(games, adv_estimator=estimator)
    for role in ("wolf", "villager"):
        assert math.fsum(s.advantage for s in samples if s.role == role) == pytest.approx(0, abs=1e-4)
