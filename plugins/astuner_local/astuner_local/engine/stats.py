"""What an engine has done so far, as counters; take the difference of two readings for one step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields


@dataclass
class EngineStats:
    requests: int = 0
    """Admitted requests."""
    cancelled: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    """Prompt tokens that were computed in a prefill; the rest came from cached keys (the last of each at most)."""
    generated_tokens: int = 0
    """Of finished requests."""
    decode_steps: int = 0
    decoded_rows: int = 0
    """Tokens that decode steps computed, those of cancelled requests included."""

    @property
    def mean_batch(self) -> float:
        """Sequences per decode step; 0 when there was none."""
        return self.decoded_rows / self.decode_steps if self.decode_steps else 0.0

    @property
    def reused_share(self) -> float:
        """Share of the prompt tokens that did not have to be computed in a prefill."""
        return 1 - self.prefilled_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def copy(self) -> EngineStats:
        return EngineStats(**asdict(self))

    def __sub__(self, earlier: EngineStats) -> EngineStats:
        return EngineStats(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})
