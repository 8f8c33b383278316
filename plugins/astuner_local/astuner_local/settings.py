"""The ``local:`` section of an experiment file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from astuner.contracts.section import Section

if TYPE_CHECKING:
    from astuner import Config


class WarmStart(Section):
    """Initial training steps on conversations from a file, before the first episode is trained on."""

    file: str = Field(min_length=1)
    """JSON Lines file, relative to the experiment file's folder, with `messages` and `tools`, or exact tokens."""
    steps: int = Field(ge=1)
    """Number of warm-start steps; they count as the first of `trainer_common.total_steps`."""
    conversations: int = Field(8, ge=1)
    """Conversations per step."""
    lr: float = Field(2e-5, ge=0)
    """Constant learning rate of these steps; the rest of `trainer_common.optim` applies."""


class LocalSettings(Section):
    """Settings of the local backbone."""

    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; None uses all cores, but 1 for models below 20 million parameters, which more threads
    would slow down."""
    kv_token_budget: int | None = Field(None, ge=1)
    """Most tokens in the engine's KV cache; None derives it from `max_num_seqs` and the context."""
    prefix_sharing: Literal["auto", "always", "never"] = "auto"
    """Whether the trainer computes shared prefixes of a batch once; `auto` does so if it saves time."""
    warm_start: WarmStart | None = None
    """Supervised steps before reinforcement learning; None for none."""

    @classmethod
    def of(cls, config: Config) -> LocalSettings:
        """Return the settings of an experiment, or the defaults if it has no such section."""
        settings = config.backbone_section("local")
        return settings if isinstance(settings, LocalSettings) else cls()
