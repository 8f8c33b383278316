"""Advantages over the episodes of a group, and the weight of each trained token.

Advantages are computed over *episodes*, then given to all samples of the episode: an episode that forks into many
samples counts once in the group's statistics.  Where agents have roles, each role is compared with itself only: a
wolf's reward with those of the wolves in the other attempts, never with a villager's; `populations` is the one
definition of who is compared with whom.  Aggregation is a weight per token: whatever the mode, the policy loss of a
step is the sum over all trained tokens of ``token_weight * token_loss``, so a backbone only adds up; each policy's
loss is a sum of its own.

How the rewards of one population in one group, or in the step (a team that shares its reward counts once), become
advantages is an estimator's (`astuner.contracts.objective.AdvantageEstimator`).  With E the scored episodes of the
step in which the policy spoke for an agent with a reward, T_e the trained tokens of the policy in episode e, and L a
constant length, a token weighs:

===========================  =====================================
``token-mean``               1 / sum of all T_e (DAPO, Yu et al. 2025)
``seq-mean-token-mean``      1 / (E * T_e)      (GRPO)
``seq-mean-token-sum``       1 / E
``seq-mean-token-sum-norm``  1 / (E * L)        (Dr. GRPO)
===========================  =====================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from astuner.config.schema import Algorithm, Astuner
from astuner.contracts.objective import AdvantageEstimator, Compared, is_step_wide
from astuner.contracts.types import DEFAULT_AGENT, DEFAULT_POLICY, DEFAULT_ROLE, Episode, Sample
from astuner.rollout.objective import advantages, find_estimator


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Who is compared with whom, as the config says."""

    by: str = "role"
    """``role`` or ``agent``: `algorithm.adv_compare`."""
    agents_named: bool = False
    """Whether `astuner.agents` has entries."""

    @classmethod
    def of(cls, settings: Astuner) -> Comparison:
        return cls(by=settings.trainer_common.algorithm.adv_compare, agents_named=bool(settings.agents))


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What one agent of an episode gets."""

    agent: str
    role: str
    policy: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One scored episode: its group, its reward, and the samples it was cut into."""

    episode_id: str
    group_id: str
    reward: float
    samples: tuple[Sample, ...]
    credits: tuple[Credit, ...] = ()
    """One for each agent that trained."""
    agents_named: bool = False
    """Whether the experiment tells agents apart. Then an episode without credits has nobody to be compared with;
    otherwise its reward is that of the one agent there is, which said nothing."""

    @classmethod
    def of(cls, episode: Episode, samples: Sequence[Sample], *, agents_named: bool = False) -> Scored:
        """What `assign_credit` needs of a scored episode."""
        assert episode.reward is not None  # the caller looked
        spoke = {t.agent: t for t in episode.turns if t.trained}
        credits = [
            Credit(agent=t.agent, role=t.role, policy=t.policy, reward=reward)
            for t in spoke.values()
            if (reward := episode.reward_of(t.agent, t.role)) is not None
        ]
        task = episode.workflow_task
        return cls(
            episode_id=task.episode_id,
            group_id=task.group_id,
            reward=episode.reward,
            samples=tuple(samples),
            credits=tuple(credits),
            agents_named=agents_named,
        )

    @property
    def each(self) -> tuple[Credit, ...]:
        """The credits; one for the episode as a whole when it has none and the experiment names no agents."""
        if self.credits or self.agents_named:
            return self.credits
        first = self.samples[0] if self.samples else None
        return (
            Credit(
                agent=first.agent if first else DEFAULT_AGENT,
                role=first.role if first else DEFAULT_ROLE,
                policy=first.policy if first else DEFAULT_POLICY,
                reward=self.reward,
            ),
        )


Penalties = Mapping[tuple[str, str], float]
"""(episode id, agent) -> what to subtract from its reward."""


def assign_credit(
    episodes: Sequence[Scored],
    algorithm: Algorithm,
    *,
    constant_length: int,
    penalties: Penalties | None = None,
    estimator: AdvantageEstimator | None = None,
) -> list[Sample]:
    """The samples of all ``episodes`` with ``advantage`` and ``token_weight`` set, in the order given.

    :param constant_length: L, in tokens, for ``seq-mean-token-sum-norm``.
    :param penalties: KL in the reward; a team that shares its reward also shares the mean of its penalties.
    :param estimator: what `algorithm.adv_estimator` names; None: what is installed under that name.
    :raises PluginError: as `episode_advantages`.
    """
    estimator = estimator or find_estimator(algorithm.adv_estimator)
    found = _advantages(episodes, algorithm, penalties or {}, estimator)
    weights = _weights(episodes, algorithm.loss_agg_mode, constant_length)
    return [
        replace(s, advantage=found[i, s.agent], token_weight=weights[i, s.policy])
        for i, e in enumerate(episodes)
        for s in e.samples
    ]


def populations(episodes: Sequence[Scored], by: str) -> dict[str, list[tuple[int, Credit]]]:
    """Who is compared with whom: role -> (index of the episode, credit) of everybody in it.

    :param by: ``role``, or ``agent`` for the agents' own names as keys.
    """
    found: dict[str, list[tuple[int, Credit]]] = {}
    for i, e in enumerate(episodes):
        for c in e.each:
            found.setdefault(c.agent if by == "agent" else c.role, []).append((i, c))
    return found


def has_spread(group: Sequence[Scored], by: str) -> bool:
    """Whether some population of one group has different rewards, before penalties.

    Exactly then, an estimator that compares within groups finds an advantage other than 0.
    """
    return any(len({c.reward for _, c in entries}) > 1 for entries in populations(group, by).values())


def _advantages(
    episodes: Sequence[Scored], algorithm: Algorithm, penalties: Penalties, estimator: AdvantageEstimator
) -> dict[tuple[int, str], float]:
    """(index of the episode, agent) -> advantage."""
    found: dict[tuple[int, str], float] = {}
    for entries in populations(episodes, algorithm.adv_compare).values():
        units = _units(episodes, entries, penalties, step_wide=is_step_wide(estimator))
        each = episode_advantages(
            [episodes[u.episode].group_id for u in units],
            [u.reward for u in units],
            estimator,
            norm_by_std=algorithm.norm_adv_by_std,
            name=algorithm.adv_estimator,
        )
        found.update({(u.episode, agent): value for u, value in zip(units, each, strict=True) for agent in u.agents})
    return found


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """What counts once in a comparison: an agent, or all agents of one role in one episode."""

    episode: int
    agents: Sequence[str]
    reward: float
    """Less the mean penalty of the agents."""


def _units(
    episodes: Sequence[Scored], entries: Sequence[tuple[int, Credit]], penalties: Penalties, *, step_wide: bool
) -> list[_Unit]:
    """The units of one population: teams where all teams that are compared share their rewards, else agents.

    A team's reward counted once per member would be compared with itself, and would make a large team's variance
    look small.  Only those that are compared with each other (the group, or the step if ``step_wide``) decide
    together, by their rewards before penalties: what happens in one group changes nothing in another.
    """
    compared: dict[str, dict[int, list[Credit]]] = {}
    for i, c in entries:
        compared.setdefault("" if step_wide else episodes[i].group_id, {}).setdefault(i, []).append(c)
    units = []
    for teams in compared.values():
        shared = all(len({c.reward for c in team}) == 1 for team in teams.values())
        for i, team in teams.items():
            for members in [team] if shared else [[c] for c in team]:
                own = [penalties.get((episodes[i].episode_id, c.agent), 0.0) for c in members]
                reward = members[0].reward - math.fsum(own) / len(own)
                units.append(_Unit(episode=i, agents=[c.agent for c in members], reward=reward))
    return units


def _weights(episodes: Sequence[Scored], mode: str, constant_length: int) -> dict[tuple[int, str], float]:
    """(index of the episode, policy) -> token weight; each policy's loss is a loss of its own."""
    found: dict[tuple[int, str], float] = {}
    for policy in dict.fromkeys(c.policy for e in episodes for c in e.each):
        indices = [i for i, e in enumerate(episodes) if any(c.policy == policy for c in e.each)]
        tokens = [sum(s.trained_tokens for s in episodes[i].samples if s.policy == policy) for i in indices]
        each = episode_token_weights(tokens, mode, constant_length=constant_length)
        found.update({(i, policy): weight for i, weight in zip(indices, each, strict=True)})
    return found


def episode_advantages(
    group_ids: Sequence[str],
    rewards: Sequence[float],
    estimator: AdvantageEstimator,
    *,
    norm_by_std: bool = True,
    name: str = "",
) -> list[float]:
    """One advantage per episode, in the order given: ``estimator`` asked about each set that is compared.

    :param name: of the estimator, for messages.
    :raises PluginError: it raised, or returned something else than a finite number for each reward.
    """
    sets: dict[str, list[int]] = {}
    for i, group in enumerate(group_ids):
        sets.setdefault("" if is_step_wide(estimator) else group, []).append(i)
    found = [0.0] * len(rewards)
    for places in sets.values():
        compared = Compared(
            rewards=tuple(rewards[i] for i in places),
            groups=tuple(group_ids[i] for i in places),
            norm_by_std=norm_by_std,
        )
        for i, value in zip(places, advantages(name, estimator, compared), strict=True):
            found[i] = value
    return found


def episode_token_weights(trained_tokens: Sequence[int], mode: str, *, constant_length: int) -> list[float]:
    """What each trained token of an episode weighs, one number per episode; see the module's table."""
    n = len(trained_tokens)
    if mode == "token-mean":
        total = sum(trained_tokens)
        return [1.0 / total if total else 0.0] * n
    if mode == "seq-mean-token-mean":
        return [1.0 / (n * t) if t else 0.0 for t in trained_tokens]
    if mode == "seq-mean-token-sum":
        return [1.0 / n] * n
    if mode == "seq-mean-token-sum-norm":
        return [1.0 / (n * constant_length)] * n
    raise ValueError(f"unknown aggregation {mode!r}")
