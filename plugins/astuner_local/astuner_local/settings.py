"""The ``local:`` section of an experiment file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from astuner.contracts.section import Section

if TYPE_CHECKING:
    from astuner import Config


class LocalSettings(Section):
    """What only the embedded backbone understands."""

    threads: int | None = Field(None, ge=1)
    """CPU threads of torch; None takes all cores, but 1 for models below 20 million parameters (more get in each
    other's way)."""
    kv_token_budget: int | None = Field(None, ge=1)
    """Most tokens of KV cache the engine keeps; None sizes it by `max_num_seqs` and the context."""
    prefix_sharing: Literal["auto", "always", "never"] = "auto"
    """Whether the trainer computes shared prefixes of a batch once; `auto` does where it pays."""

    @classmethod
    def of(cls, config: Config) -> LocalSettings:
        """Those of an experiment, which may have no such section."""
        settings = config.backbone_section("local")
        return settings if isinstance(settings, LocalSettings) else cls()
