"""In-process inference engine: continuous batching with a KV cache, exact log-probs, weights updated in place."""

from __future__ import annotations

from astuner_local.engine.engine import LocalEngine
from astuner_local.engine.scheduler import EngineStats

__all__ = ["EngineStats", "LocalEngine"]
