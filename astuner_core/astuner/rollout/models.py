"""The models that an episode's agents speak with: one for each policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from astuner.types import DEFAULT_POLICY

if TYPE_CHECKING:
    from astuner.backbone import InferenceEngine
    from astuner.chat.codec import ChatCodec


@dataclass(frozen=True)
class PolicyModel:
    """An engine, and the codec of its tokenizer."""

    engine: InferenceEngine
    codec: ChatCodec


Models: TypeAlias = Mapping[str, PolicyModel]
"""Policy -> its model."""


def one_model(engine: InferenceEngine, codec: ChatCodec) -> Models:
    """The models of an experiment with one policy."""
    return {DEFAULT_POLICY: PolicyModel(engine, codec)}
