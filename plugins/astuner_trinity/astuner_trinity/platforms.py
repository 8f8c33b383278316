"""What the machine asks of Trinity's configuration and of its processes: nothing on GPUs, much on a CPU.

A platform is an entry point of the group ``astuner_trinity.platforms``, named as ``TRINITY_PLATFORM`` names it: a
function without arguments that gives the fields of a `Platform` as a mapping.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from astuner.contracts.errors import ConfigError

GROUP = "astuner_trinity.platforms"
VARIABLE = "TRINITY_PLATFORM"


@dataclass(frozen=True, kw_only=True)
class Platform:
    """A machine that Trinity itself does not know."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """Trinity's dotted keys that it needs."""
    worker_setup: str = ""
    """``module.function`` that every process calls before it imports Trinity (Ray's ``worker_process_setup_hook``)."""
    logical_gpus: int | None = None
    """How many GPUs Ray is told of where there are none."""


GPUS = Platform()
"""Trinity's own."""


def platform(env: Mapping[str, str] = os.environ) -> Platform:
    """The platform that the environment names; `GPUS` where it names none.

    :raises ConfigError: nobody brings the one that it names.
    """
    name = env.get(VARIABLE, "").strip().lower()
    if not name:
        return GPUS
    for point in entry_points(group=GROUP, name=name):
        return Platform(**point.load()())
    brought = ", ".join(sorted({point.name for point in entry_points(group=GROUP)})) or "none"
    instead = (
        "in ASTuner's repository type: pip install -e plugins/astuner_trinity/cpu"
        if name == "cpu"
        else f"there are: {brought}; for GPUs unset it"
    )
    raise ConfigError(f"{VARIABLE}={name}, and no package that is installed here brings that platform; {instead}")
