"""Trinity itself, on a CPU: these tests run in `.venv-trinity` (``make test-trinity``), where no others are run.

Trinity and verl read their environment when they are imported, and on a CPU some of their modules are changed as they
are: so the variables are set here, and the hooks are put in place, before any test module is imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

CPU_ENV: Mapping[str, str] = {
    "TRINITY_PLATFORM": "cpu",
    "VERL_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models: more threads only get in each other's way
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do with workers that have no GPU; it warns otherwise
    "RAY_worker_niceness": "0",  # Ray's workers are nice (15), and starve beside anything else on a small machine
    "TOKENIZERS_PARALLELISM": "false",  # processes are forked beside tokenizers
}
os.environ.update(CPU_ENV)

from astuner_trinity_cpu import hooks  # noqa: E402  (torch reads its threads when it is imported)

hooks.setup()

NOT_OURS = (
    "ignore:Ray state API is no longer experimental:DeprecationWarning",
)  # verl imports it from its older place


def pytest_configure(config: pytest.Config) -> None:
    for line in NOT_OURS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def cpu_env() -> Mapping[str, str]:
    """The variables with which a process runs Trinity on this machine's CPU."""
    return CPU_ENV


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of `tiny-calculator`: a Qwen2 with a ChatML template and tool calls, that ships with astuner-local."""
    from astuner_local.plugin import locate_model

    folder = locate_model("tiny-calculator")
    assert folder is not None
    return Path(folder)
