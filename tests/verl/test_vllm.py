"""VERL with vLLM itself, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..fsdp.with_vllm import MARKS, OTHER, TRAINED, check_it_trains_is_killed_and_goes_on

pytestmark = MARKS
ROLLOUT = "verl.actor_rollout_ref.rollout"
VLLM = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.load_format=auto",
    f"{ROLLOUT}.enforce_eager=true",
    f"{ROLLOUT}.+enable_sleep_mode=false",  # a CPU has no memory to lend to the trainer
    f"{ROLLOUT}.max_num_seqs=16",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes={256 if OTHER else 16}",
)
ADAPTERS_ARE_SENT = ("verl.actor_rollout_ref.model.lora.merge=false",)  # the CPU's own server takes whole weights only


@pytest.mark.parametrize("trained", TRAINED)
def test_it_trains_on_what_vllm_made_is_killed_and_goes_on(
    trained: str, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = (*VLLM, *(ADAPTERS_ARE_SENT if "adapters" in trained else ()))
    check_it_trains_is_killed_and_goes_on("verl", trained, tmp_path, tiny_model, monkeypatch, told=told)
