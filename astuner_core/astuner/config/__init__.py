"""Load experiment files: YAML read by OmegaConf and checked by pydantic. All errors are reported together."""

from __future__ import annotations

from astuner.config.loaded import Config
from astuner.config.loading import load_config

__all__ = ["Config", "load_config"]
