"""Experiment files: YAML read by OmegaConf, checked by pydantic, every mistake at once with its place."""

from __future__ import annotations

from astuner.config.loaded import Config
from astuner.config.loading import load_config

__all__ = ["Config", "load_config"]
