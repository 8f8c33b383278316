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

The loss and the estimator are a stranger's, so what they raise or return wrongly is said with its place in their file.
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
    """The loss of an experiment; raises as `find_loss`."""
    name = config.astuner.trainer_common.algorithm.loss
    return _function("loss", name, config.resolve("loss", name))


def estimator_of(config: Config) -> AdvantageEstimator:
    """The advantage estimator of an experiment; raises as `find_estimator`."""
    name = config.astuner.trainer_common.algorithm.adv_estimator
    return _function(_ESTIMATOR, name, config.resolve(_ESTIMATOR, name))


@lru_cache(maxsize=64)
def find_loss(name: str, base_dir: Path | None = None) -> Loss:
    """What `algorithm.loss` names, for a process of a trainer that has no `Config`; found once.

    :param base_dir: the experiment file's folder, where the user's own code is looked for first.
    :raises PluginError: it names nothing, cannot be imported, or is no function.
    """
    return _function("loss", name, registry.resolve(load_plugins(), "loss", name, base_dir=base_dir))


def find_estimator(name: str, base_dir: Path | None = None) -> AdvantageEstimator:
    """What `algorithm.adv_estimator` names; as `find_loss`."""
    return _function(_ESTIMATOR, name, registry.resolve(load_plugins(), _ESTIMATOR, name, base_dir=base_dir))


def token_loss(name: str, loss: Loss, given: LossInput) -> TokenLoss:
    """What ``loss`` says of ``given``.

    :raises PluginError: it raised, or returned something else than a number for each token.
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
                f"the loss {name!r} ({written_at(loss)}) returned {f'as {part} ' if part else ''}{what}; it must be a "
                f"tensor of shape {list(wanted)}, a value for each token (do not average: weights are applied later)"
            )
    return term


def estimate_advantages(name: str, estimator: AdvantageEstimator, compared: Compared) -> list[float]:
    """What ``estimator`` makes of ``compared``.

    :raises PluginError: it raised, or returned something else than a finite number for each reward.
    """
    found = [float(value) for value in _ask(_ESTIMATOR, name, lambda: list(estimator(compared)))]
    if len(found) != len(compared.rewards) or not all(map(math.isfinite, found)):
        raise PluginError(
            f"the advantage estimator {name!r} ({written_at(estimator)}) made {found} of the rewards "
            f"{list(compared.rewards)}; it must return a finite number for each"
        )
    return found


def _ask(kind: str, name: str, function: Callable[..., T], *given: Any) -> T:
    try:
        return function(*given)
    except BaseException as e:  # a stranger's function may raise anything
        let_the_person_stop(e)
        raise PluginError(f"the {kind} {name!r} raised {told(e)}{raised_at(e, caller=__file__)}") from e


def _function(kind: str, name: str, found: object) -> Callable[..., Any]:
    if not callable(found) or isinstance(found, type):
        raise PluginError(f"the {kind} {name!r} is {found!r}; it must be a function")
    return found


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Who is compared with whom, as the config says."""

    by: str = "role"
    """``role`` or ``agent``: `algorithm.adv_compare`."""
    agents_named: bool = False
    """Whether `astuner.agents` has entries."""

    @classmethod
    def of(cls, settings: AstunerSection) -> Comparison:
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
    algorithm: AlgorithmSection,
    *,
    constant_length: int,
    penalties: Penalties | None = None,
    estimator: AdvantageEstimator | None = None,
) -> list[Sample]:
    """The samples of all ``episodes`` with ``advantage`` and ``token_weight`` set, in the order given.

    :param constant_length: L, in tokens, for ``seq-mean-token-sum-norm``.
    :param penalties: KL in the reward; a team that shares its reward also shares the mean of its penalties.
    :param estimator: what `algorithm.adv_estimator` names; None: what is installed under that name.
    :raises PluginError: the estimator raised, or returned something else than a finite number for each reward.
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
    episodes: Sequence[Scored], algorithm: AlgorithmSection, penalties: Penalties, estimator: AdvantageEstimator
) -> dict[tuple[int, str], float]:
    """(index of the episode, agent) -> advantage: the estimator is asked about each set that is compared.

    What counts once in it is a team where all teams of the set share their rewards, else an agent.  A team's reward
    counted once per member would be compared with itself, and would make a large team's variance look small.  Only
    those that are compared with each other (the group, or the step) decide together, by their rewards before penalties:
    what happens in one group changes nothing in another.
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
    """The mean over ``members``."""
    return math.fsum(penalties.get((episode.episode_id, c.agent), 0.0) for c in members) / len(members)


def _weights(episodes: Sequence[Scored], mode: str, constant_length: int) -> dict[tuple[int, str], float]:
    """(index of the episode, policy) -> token weight; each policy's loss is a loss of its own."""
    found: dict[tuple[int, str], float] = {}
    for policy in dict.fromkeys(c.policy for e in episodes for c in e.each):
        indices = [i for i, e in enumerate(episodes) if any(c.policy == policy for c in e.each)]
        tokens = [sum(s.trained_tokens for s in episodes[i].samples if s.policy == policy) for i in indices]
        each = episode_token_weights(tokens, mode, constant_length=constant_length)
        found.update({(i, policy): weight for i, weight in zip(indices, each, strict=True)})
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


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
