"""What is registered as an environment, read without importing it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from astuner.contracts.hookspecs import EnvironmentProvider, Provider


def as_environment(provider: Provider) -> EnvironmentProvider:
    """A plain `Provider` has the defaults."""
    return provider if isinstance(provider, EnvironmentProvider) else EnvironmentProvider(**vars(provider))


def absent(modules: Sequence[str]) -> list[str]:
    """Those of ``modules`` that this interpreter does not have."""
    return [module for module in modules if find_spec(module.partition(".")[0]) is None]
