"""VERL itself, on a CPU: these tests run in `.venv-verl` (``make test-verl``), where the main suite's are not run.

VERL reads its environment when it is imported, so the variables are set here, before any test module is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

CPU_ENV: Mapping[str, str] = {
    "VERL_PLATFORM": "cpu",
    "VERL_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models: more threads only get in each other's way
    "TQ_NUM_THREADS": "1",  # TransferQueue warns about more
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's workers are nice (15), and starve beside anything else on a small machine
    "TOKENIZERS_PARALLELISM": "false",  # processes are forked beside tokenizers
}
os.environ.update(CPU_ENV)

NOT_OURS = (
    # verl tells of every engine that is not installed here
    r"ignore:\w+ engine is not available:UserWarning:verl\.workers\.engine",
    "ignore:Ray state API is no longer experimental:DeprecationWarning",  # verl imports it from its older place
)


def pytest_configure(config: pytest.Config) -> None:
    for line in NOT_OURS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def cpu_env() -> Mapping[str, str]:
    """The variables with which a process runs VERL on this machine's CPU."""
    return CPU_ENV


@pytest.fixture(scope="session")
def tiny_model() -> Path:
    """The folder of `tiny-calculator`: a Qwen2 with a ChatML template and tool calls, that ships with astuner-local."""
    from astuner_local.plugin import locate_model

    folder = locate_model("tiny-calculator")
    assert folder is not None
    return Path(folder)
