"""Weights that come from a trainer, for a model that generates: checked first, so that a wrong set changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def load_weights(model: torch.nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights`` into ``model``, in the model's own precision; tensors tied to others may be left out.

    :raises ValueError: a tensor is missing, has no place in the model or has another shape; nothing is changed then.
    """
    wanted = dict(model.state_dict())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    if wrong := sorted((set(wanted) - set(weights) - tied) | (set(weights) - set(wanted))):
        which = "is missing" if wrong[0] in wanted else "has no place in the model"
        raise ValueError(f"the trainer's weights are not the server's: {wrong[0]} {which}")
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(f"the trainer's {name} is {tuple(tensor.shape)}, the server's {tuple(wanted[name].shape)}")
    for name, tensor in weights.items():
        wanted[name].copy_(tensor)


def end_tokens(*given: int | list[int] | None) -> frozenset[int]:
    """The end tokens of tokenizer and model, each of them none, one or several."""
    return frozenset(end for ends in given if ends is not None for end in (ends if isinstance(ends, list) else [ends]))
