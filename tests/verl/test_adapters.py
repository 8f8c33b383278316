"""VERL's export of a model with adapters becomes a model that anybody loads."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from astuner_ray.checkpoints import has_adapters, merge


@pytest.mark.parametrize(("shard", "files"), [("1GB", 1), ("100KB", 8)])
def test_adapters_are_merged_and_verls_own_files_stay(tmp_path: Path, tiny_model: Path, shard: str, files: int) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from transformers import AutoModelForCausalLM
    from verl.utils.checkpoint.fsdp_checkpoint_manager import drop_tied_target_keys

    start = AutoModelForCausalLM.from_pretrained(tiny_model)
    lora = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = get_peft_model(start, lora)
    for name, weight in trained.named_parameters():
        if "lora_B" in name:  # they start at 0, and merging would show nothing
            torch.nn.init.normal_(weight, std=0.1)
    # as verl's checkpoint manager exports it
    state = get_model_state_dict(trained, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    frame = AutoModelForCausalLM.from_config(trained.config)
    drop_tied_target_keys(state, frame, trained.config)
    export, target = tmp_path / "export", tmp_path / "target"
    frame.save_pretrained(export, state_dict=state, max_shard_size=shard)
    assert has_adapters(export)
    before = {file.name: file.read_bytes() for file in export.iterdir()}
    shutil.copytree(export, target, copy_function=os.link)

    merge(export, target, scale=4 / 2)

    assert {file.name: file.read_bytes() for file in export.iterdir()} == before
    assert not has_adapters(target)
    merged, said = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(said[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), said
    assert len(list(target.glob("*.safetensors"))) == files
    ids = torch.arange(30)[None]
    with torch.no_grad():
        expected, found = trained(ids).logits, merged(ids).logits
        with trained.disable_adapter():
            assert not torch.allclose(trained(ids).logits, expected, atol=1e-2), "the adapters do nothing"
    assert torch.allclose(found, expected, atol=1e-4)
