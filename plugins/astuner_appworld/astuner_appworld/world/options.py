"""What ``astuner.env_service.params`` may say about AppWorld, checked.

This runs in AppWorld's own interpreter, so it is plain Python.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from astuner_appworld.world.actions import CODE_FORMATS
from astuner_appworld.world.session import Limits

REQUIRE_VARIABLE = "ASTUNER_APPWORLD_CONFINEMENT"
"""``require`` refuses to run model-written code where the kernel cannot confine it; ``auto`` does what it can."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One instance's parameters and their defaults."""

    max_interactions: int = 50
    """Steps until the episode is truncated; a message without code counts."""
    timeout: int = 60
    """Seconds that one piece of code may run."""
    max_api_calls: int = 1000
    """API calls of one piece of code."""
    max_output: int = 20_000
    """Characters of output that the agent sees of one step; the middle of a longer one is left out."""
    code_format: str = "first_block"
    """``first_block``, ``all_blocks`` or ``raw``, see `actions.code_of`."""
    check_code: bool = True
    """Refuse code that names what no solution needs (`guard`); the processes are separated with and without it."""
    seed: int = 100
    """Of Python's random numbers, in the apps and in the shell; 100 is AppWorld's own."""

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Options:
        """:raises ValueError: an unknown name or a value out of range."""
        known = {field.name: field for field in fields(cls)}
        for name, value in params.items():
            if name not in known:
                raise ValueError(f"AppWorld has no parameter {name!r}; there are {', '.join(known)}")
            if name == "code_format":
                if value not in CODE_FORMATS:
                    raise ValueError(f"code_format is one of {', '.join(CODE_FORMATS)}, not {value!r}")
            elif name == "check_code":
                if not isinstance(value, bool):
                    raise ValueError(f"check_code is true or false, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int) or value < (0 if name == "seed" else 1):
                raise ValueError(f"{name} must be a positive whole number, not {value!r}")
        options = cls(**params)
        if options.timeout > MAX_TIMEOUT:
            raise ValueError(f"timeout must be at most {MAX_TIMEOUT}, or the service kills the instance first")
        return options

    @property
    def limits(self) -> Limits:
        return Limits(
            timeout=self.timeout,
            api_timeout=30.0,
            keep_timeout=30.0,
            start_timeout=50.0,
            shell_timeout=40.0,
            evaluate_timeout=50.0,
            max_api_calls=self.max_api_calls,
            seed=self.seed,
            check_code=self.check_code,
            require=os.environ.get(REQUIRE_VARIABLE, "auto") == "require",
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


MAX_TIMEOUT = 120
"""The service ends a step after 240 seconds, and `Limits.longest_step` must fit in."""
