"""The advantages of episodes in which one agent speaks, which has the episode's reward."""

from __future__ import annotations

from collections.abc import Sequence

from astuner.config.schema import AlgorithmSection
from astuner.contracts.objective import AdvantageEstimator
from astuner.contracts.types import Sample
from astuner.rollout.credit import Scored, assign_credit


def episode_advantages(
    group_ids: Sequence[str], rewards: Sequence[float], estimator: AdvantageEstimator, *, norm_by_std: bool = True
) -> list[float]:
    """One advantage per episode, in the order given."""
    episodes = []
    for n, (group, reward) in enumerate(zip(group_ids, rewards, strict=True)):
        sample = Sample(
            episode_id=str(n),
            group_id=group,
            agent="x",
            input_ids=[0, 0],
            loss_mask=[0, 1],
            logprobs=[0.0, 0.0],
            policy_version=0,
            reward=reward,
        )
        episodes.append(Scored(episode_id=str(n), group_id=group, reward=reward, samples=(sample,)))
    algorithm = AlgorithmSection(norm_adv_by_std=norm_by_std)
    return [s.advantage for s in assign_credit(episodes, algorithm, constant_length=8, estimator=estimator)]
