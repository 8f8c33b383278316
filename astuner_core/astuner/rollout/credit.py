"""Compute advantages within groups of episodes, and the weight of each trained token.

Advantages are computed per *episode* and assigned to all its samples: an episode that forks into many samples counts
once in the group's statistics. If agents have roles, each role is compared only with itself: a wolf's reward with the
wolves of other attempts, never with a villager's. `populations` is the single definition of these comparisons.
Aggregation is a weight per token. In every mode the policy loss of a step is the sum of ``token_weight * token_loss``
over all trained tokens, so a backbone only adds up. Each policy has a separate loss.

An estimator (`astuner.contracts.objective.AdvantageEstimator`) converts the rewards of one population, in one group or
in the step, to advantages. A team with a shared reward counts once. With E the scored episodes of the step in which the
policy acted for an agent with a reward, T_e the trained tokens of the policy in episode e, and L a constant length, the
weight of a token is:

===========================  =====================================
``token-mean``               1 / sum of all T_e (DAPO, Yu et al. 2025)
``seq-mean-token-mean``      1 / (E * T_e)      (GRPO)
``seq-mean-token-sum``       1 / E
``seq-mean-token-sum-norm``  1 / (E * L)        (Dr. GRPO)
===========================  =====================================

Losses and estimators are user code, so errors name the place in their file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import astuner
from astuner.config.schema import AlgorithmSection, AstunerSection
from astuner.contracts.errors import PluginError, told
from astuner.contracts.interrupt import let_the_person_stop
from astuner.contracts.objective import AdvantageEstimator, Compared, Loss, LossInput, TokenLoss, is_step_wide
from astuner.contracts.types import DEFAULT_AGENT, DEFAULT_POLICY, DEFAULT_ROLE, Episode, Sample
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins
from astuner.plugins.user_code import raised_at, written_at

if TYPE_CHECKING:
    from astuner.config import Config

_ESTIMATOR = "advantage estimator"
T = TypeVar("T")


def loss_of(config: Config) -> Loss:
    """Return the loss of an experiment; raises as `find_loss`."""
    name = config.astuner.trainer_common.algorithm.loss
    return _function("loss", name, config.resolve("loss", name))


def estimator_of(config: Config) -> AdvantageEstimator:
    """Return the advantage estimator of an experiment; raises as `find_estimator`."""
    name = config.astuner.trainer_common.algorithm.adv_estimator
    return _function(_ESTIMATOR, name, config.resolve(_ESTIMATOR, name))


@lru_cache(maxsize=64)
def find_loss(name: str, base_dir: Path | None = None) -> Loss:
    """Return the loss named by `algorithm.loss`, for trainer processes without a `Config`. The result is cached.

    :param base_dir: Folder of the experiment file, which is searched first for user code.
    :raises PluginError: The name is unknown, cannot be imported, or is not a function.
    """
    return _function("loss", name, registry.resolve(load_plugins(), "loss", name, base_dir=base_dir))


def find_estimator(name: str, base_dir: Path | None = None) -> AdvantageEstimator:
    """Return the estimator named by `algorithm.adv_estimator`; see `find_loss`."""
    return _function(_ESTIMATOR, name, registry.resolve(load_plugins(), _ESTIMATOR, name, base_dir=base_dir))


def token_loss(name: str, loss: Loss, given: LossInput) -> TokenLoss:
    """Call a loss and return its checked result.

    :raises PluginError: The loss raised, or did not return one number per token.
    """
    found = _ask("loss", name, loss, given)
    term = found if isinstance(found, TokenLoss) else TokenLoss(loss=found)
    parts = {
        "": term.loss,
        "ratio": term.ratio,
        "clipped_low": term.clipped_low,
        "clipped_high": term.clipped_high,
        **{f"metrics[{key!r}]": value for key, value in term.metrics.items()},
    }
    wanted = given.logprobs.shape
    for part, tensor in parts.items():
        if tensor is not None and (shape := getattr(tensor, "shape", None)) != wanted:
            what = type(tensor).__name__ if shape is None else f"a tensor of shape {list(shape)}"
            raise PluginError(
                f"the loss {name!r} ({written_at(loss)}) returned {f'as {part} ' if part else ''}{what}; it must "
                f"return a tensor of shape {list(wanted)}, one value per token (without averaging: weights follow)"
            )
    return term


def estimate_advantages(name: str, estimator: AdvantageEstimator, compared: Compared) -> list[float]:
    """Call an estimator and return its checked advantages.

    :raises PluginError: The estimator raised, or did not return one finite number per reward.
    """
    found = [float(value) for value in _ask(_ESTIMATOR, name, lambda: list(estimator(compared)))]
    if len(found) != len(compared.rewards) or not all(map(math.isfinite, found)):
        raise PluginError(
            f"the advantage estimator {name!r} ({written_at(estimator)}) returned {found} for the rewards "
            f"{list(compared.rewards)}; it must return one finite number per reward"
        )
    return found


def _ask(kind: str, name: str, function: Callable[..., T], *given: Any) -> T:
    try:
        return function(*given)
    except BaseException as e:  # user code may raise anything
        let_the_person_stop(e)
        raise PluginError(f"the {kind} {name!r} raised {told(e)}{raised_at(e, caller=__file__)}") from e


def _function(kind: str, name: str, found: object) -> Callable[..., Any]:
    if not callable(found) or isinstance(found, type):
        raise PluginError(f"the {kind} {name!r} is {found!r}; it must be a function")
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Which agents are compared with each other, according to the config."""

    by: str = "role"
    """``role`` or ``agent``: `algorithm.adv_compare`."""
    agents_named: bool = False
    """Whether `astuner.agents` has entries."""

    @classmethod
    def of(cls, settings: AstunerSection) -> Comparison:
        return cls(by=settings.trainer_common.algorithm.adv_compare, agents_named=bool(settings.agents))


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The reward of one agent in an episode."""

    agent: str
    role: str
    policy: str
    reward: float


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One scored episode: its group, its reward, and its samples."""

    episode_id: str
    group_id: str
    reward: float
    samples: tuple[Sample, ...]
    credits: tuple[Credit, ...] = ()
    """One entry per trained agent."""
    agents_named: bool = False
    """Whether the experiment distinguishes agents. If so, an episode without credits is compared with no other.
    Otherwise its reward belongs to its only agent, which produced no turns."""

    @classmethod
    def of(cls, episode: Episode, samples: Sequence[Sample], *, agents_named: bool = False) -> Scored:
        """Return the parts of a scored episode that `assign_credit` needs."""
        assert episode.reward is not None  # checked by the caller
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
        """The credits. An episode without any gets one, unless the experiment names agents."""
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
"""(episode ID, agent) -> penalty to subtract from its reward."""


def assign_credit(
    episodes: Sequence[Scored],
    algorithm: AlgorithmSection,
    *,
    constant_length: int,
    penalties: Penalties | None = None,
    estimator: AdvantageEstimator | None = None,
) -> list[Sample]:
    """Return the samples of all episodes with ``advantage`` and ``token_weight`` set, in the given order.

    :param constant_length: L, in tokens, for ``seq-mean-token-sum-norm``.
    :param penalties: KL penalties of the reward. A team with a shared reward shares the mean of its penalties.
    :param estimator: Advantage estimator; None for the installed one that `algorithm.adv_estimator` names.
    :raises PluginError: The estimator raised, or did not return one finite number per reward.
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
    """Return the sets of compared agents: role -> (index of the episode, credit).

    :param by: ``role``, or ``agent`` to group by agent name.
    """
    found: dict[str, list[tuple[int, Credit]]] = {}
    for i, e in enumerate(episodes):
        for c in e.each:
            found.setdefault(c.agent if by == "agent" else c.role, []).append((i, c))
    return found


def has_spread(group: Sequence[Scored], by: str) -> bool:
    """Return whether rewards differ within some population of one group, before penalties.

    Exactly in this case, an estimator that compares within groups returns a nonzero advantage.
    """
    return any(len({c.reward for _, c in entries}) > 1 for entries in populations(group, by).values())


def _advantages(
    episodes: Sequence[Scored], algorithm: AlgorithmSection, penalties: Penalties, estimator: AdvantageEstimator
) -> dict[tuple[int, str], float]:
    """Return (index of the episode, agent) -> advantage. The estimator is called for each compared set.

    If all teams of a set share their rewards, each team counts once; otherwise each agent does. Counting a team's
    reward once per member would compare it with itself and underestimate the variance of large teams. This decision
    uses only the rewards of the set (the group or the step) before penalties, so groups do not affect each other.
    """
    found: dict[tuple[int, str], float] = {}
    for entries in populations(episodes, algorithm.adv_compare).values():
        sets: dict[str, dict[int, list[Credit]]] = {}
        for i, c in entries:
            key = "" if is_step_wide(estimator) else episodes[i].group_id
            sets.setdefault(key, {}).setdefault(i, []).append(c)
        for teams in sets.values():
            shared = all(len({c.reward for c in team}) == 1 for team in teams.values())
            units = [(i, u) for i, team in teams.items() for u in ([team] if shared else [[c] for c in team])]
            compared = Compared(
                rewards=tuple(members[0].reward - _penalty(episodes[i], members, penalties) for i, members in units),
                groups=tuple(episodes[i].group_id for i, _ in units),
                norm_by_std=algorithm.norm_adv_by_std,
            )
            each = estimate_advantages(algorithm.adv_estimator, estimator, compared)
            for (i, members), value in zip(units, each, strict=True):
                found.update({(i, c.agent): value for c in members})
    return found


def _penalty(episode: Scored, members: Sequence[Credit], penalties: Penalties) -> float:
    """Return the mean penalty of the members."""
    return math.fsum(penalties.get((episode.episode_id, c.agent), 0.0) for c in members) / len(members)


def _weights(episodes: Sequence[Scored], mode: str, constant_length: int) -> dict[tuple[int, str], float]:
    """Return (index of the episode, policy) -> token weight. Each policy has a separate loss."""
    found: dict[tuple[int, str], float] = {}
    for policy in dict.fromkeys(c.policy for e in episodes for c in e.each):
        indices = [i for i, e in enumerate(episodes) if any(c.policy == policy for c in e.each)]
        tokens = [sum(s.trained_tokens for s in episodes[i].samples if s.policy == policy) for i in indices]
        each = episode_token_weights(tokens, mode, constant_length=constant_length)
        found.update({(i, policy): weight for i, weight in zip(indices, each, strict=True)})
    return found


def episode_token_weights(trained_tokens: Sequence[int], mode: str, *, constant_length: int) -> list[float]:
    """Return the weight of each trained token, one number per episode; see the module's table."""
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


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
