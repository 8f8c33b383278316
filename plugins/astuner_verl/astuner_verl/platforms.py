"""What the machine asks of VERL's configuration, beside the experiment: nothing on GPUs, much on a CPU.

A platform is an entry point of the group ``astuner_verl.platforms``, named as ``VERL_PLATFORM`` names it: a function
without arguments that gives VERL's dotted keys.  A name that nobody registers there is VERL's own matter: it knows
some platforms, and other packages bring it more.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from astuner.contracts.errors import ConfigError

GROUP = "astuner_verl.platforms"
VARIABLE = "VERL_PLATFORM"


def platform_settings(env: Mapping[str, str] = os.environ) -> Mapping[str, Any]:
    """VERL's keys that this platform needs: dotted, a leading ``+`` adds one.

    :raises ConfigError: the CPU is asked for, and the package that brings it is not installed.
    """
    name = env.get(VARIABLE, "").strip().lower()
    for point in entry_points(group=GROUP, name=name):
        settings: Mapping[str, Any] = point.load()()
        return settings
    if name == "cpu":
        raise ConfigError(
            f"{VARIABLE}=cpu, but VERL runs on a CPU only with the package astuner-verl-cpu, which is not installed; "
            "in ASTuner's repository type: pip install -e plugins/astuner_verl/cpu"
        )
    return {}
