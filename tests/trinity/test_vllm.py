"""Trinity with vLLM itself, on a CPU, by the platform in `on_vllm`; adapters are merged, as they always are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..fsdp.with_vllm import ENVIRONMENT, MARKS, TRAINED, check_it_trains_is_killed_and_goes_on

pytestmark = MARKS
ON_VLLM = {
    **ENVIRONMENT,
    "PYTHONPATH": os.pathsep.join((ENVIRONMENT["PYTHONPATH"], str(Path(__file__).with_name("on_vllm")))),
    "TRINITY_PLATFORM": "vllm_on_cpu",
}


@pytest.mark.parametrize("trained", TRAINED)
def test_it_trains_on_what_vllm_made_is_killed_and_goes_on(
    trained: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_it_trains_is_killed_and_goes_on("trinity", trained, tmp_path, tiny_model, monkeypatch, environment=ON_VLLM)
