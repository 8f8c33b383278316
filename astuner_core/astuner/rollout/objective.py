"""The loss and the advantage estimator of an experiment: from names to functions, and what these must return.

Both are a stranger's, so what they raise or return wrongly is said with its place in their file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from astuner.contracts.errors import PluginError
from astuner.contracts.objective import AdvantageEstimator, Compared, Loss, LossInput, TokenLoss
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins
from astuner.plugins.user_code import place, written_at

if TYPE_CHECKING:
    from astuner.config import Config

_ESTIMATOR = "advantage estimator"
T = TypeVar("T")


def loss_of(config: Config) -> Loss:
    """The loss of an experiment; raises as `find_loss`."""
    name = config.astuner.trainer_common.algorithm.loss
    found: Loss = _function("loss", name, config.resolve("loss", name))
    return found


def estimator_of(config: Config) -> AdvantageEstimator:
    """The advantage estimator of an experiment; raises as `find_estimator`."""
    name = config.astuner.trainer_common.algorithm.adv_estimator
    found: AdvantageEstimator = _function(_ESTIMATOR, name, config.resolve(_ESTIMATOR, name))
    return found


@lru_cache(maxsize=64)
def find_loss(name: str, base_dir: Path | None = None) -> Loss:
    """What `algorithm.loss` names, for a process of a trainer that has no `Config`; found once.

    :param base_dir: the experiment file's folder, where the user's own code is looked for first.
    :raises PluginError: it names nothing, cannot be imported, or is no function.
    """
    found: Loss = _function("loss", name, registry.resolve(load_plugins(), "loss", name, base_dir=base_dir))
    return found


def find_estimator(name: str, base_dir: Path | None = None) -> AdvantageEstimator:
    """What `algorithm.adv_estimator` names; as `find_loss`."""
    resolved = registry.resolve(load_plugins(), _ESTIMATOR, name, base_dir=base_dir)
    found: AdvantageEstimator = _function(_ESTIMATOR, name, resolved)
    return found


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
    wanted = tuple(given.logprobs.shape)
    for part, tensor in parts.items():
        if tensor is not None and (shape := _shape(tensor)) != wanted:
            what = f"{type(tensor).__name__}" if shape is None else f"a tensor of shape {list(shape)}"
            raise PluginError(
                f"the loss {name!r} ({written_at(loss)}) returned {f'as {part} ' if part else ''}{what}; it must be a "
                f"tensor of shape {list(wanted)}, a value for each token (do not average: weights are applied later)"
            )
    return term


def advantages(name: str, estimator: AdvantageEstimator, compared: Compared) -> list[float]:
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


def _shape(tensor: Any) -> tuple[int, ...] | None:
    return tuple(tensor.shape) if hasattr(tensor, "shape") else None


def _ask(kind: str, name: str, function: Callable[..., T], *given: Any) -> T:
    try:
        return function(*given)
    except Exception as e:  # a stranger's function may raise anything
        raise PluginError(f"the {kind} {name!r} raised {type(e).__name__}: {e}{place(e, caller=__file__)}") from e


def _function(kind: str, name: str, found: Any) -> Any:
    if not callable(found) or isinstance(found, type):
        raise PluginError(f"the {kind} {name!r} is {found!r}; it must be a function")
    return found
