"""The ``local:`` section of an experiment file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from astuner.contracts.section import Section

if TYPE_CHECKING:
    from astuner import Config


class WarmStart(Section):
    """Steps that learn from conversations in a file before the first episode is trained on."""

    file: str = Field(min_length=1)
    """A JSON Lines file, relative to the experiment file's folder: `messages` and `tools`, or exact tokens."""
    steps: int = Field(ge=1)
    """The first so many of `trainer_common.total_steps` are these."""
    conversations: int = Field(8, ge=1)
    """How many of them a step learns from."""
    lr: float = Field(2e-5, ge=0)
    """Learning rate of these steps, constant; the rest of `trainer_common.optim` holds."""


class LocalSettings(Section):
    """What only the embedded backbone understands."""

    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; None takes all cores, but 1 for models below 20 million parameters (more get in each
    other's way)."""
    kv_token_budget: int | None = Field(None, ge=1)
    """Most tokens of KV cache the engine keeps; None sizes it by `max_num_seqs` and the context."""
    prefix_sharing: Literal["auto", "always", "never"] = "auto"
    """Whether the trainer computes shared prefixes of a batch once; `auto` does where it pays."""
    warm_start: WarmStart | None = None
    """Supervised steps before GRPO's; None for a run that needs none."""

    @classmethod
    def of(cls, config: Config) -> LocalSettings:
        """Those of an experiment, which may have no such section."""
        settings = config.backbone_section("local")
        return settings if isinstance(settings, LocalSettings) else cls()
