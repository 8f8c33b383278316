"""Checkpoints: complete or not there, loadable by anybody, and the run goes on where it was."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astuner import ModelSection
from astuner.config.schema import LoraSection, TrainerCommon
from astuner.contracts.errors import CheckpointError
from astuner_local.modeling import load_model
from astuner_local.trainer import checkpoint as checkpoints
from astuner_local.trainer import lora
from astuner_local.trainer.checkpoint import (
    WHOLE,
    Part,
    latest_checkpoint,
    prune,
    read_checkpoint,
    restore,
    save_checkpoint,
    saved_states,
)
from astuner_local.trainer.trainer import PolicyTrainer
from astuner_objectives.manifest import problem
from tests.table import table

from ._samples import random_samples
from ._tiny_models import tiny_model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(61)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1", chat_template="{{ messages }}")


def trainer_of(model: Any, **optim: Any) -> PolicyTrainer:
    config = TrainerCommon.model_validate({"optim": {"lr": 0.01, **optim}, "mini_batch_num": 2})
    return PolicyTrainer(model, config, temperature=1.0, device="cpu")


def whole(trainer: PolicyTrainer, tokenizer: Any) -> dict[str, Part]:
    return {WHOLE: Part(trainer, tokenizer)}


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- what is in it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["qwen2", "llama-biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_anybody_loads_it(tmp_path: Path, tokenizer: Any, shape: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = tiny_model(shape).to(dtype)
    trainer = trainer_of(model)
    trainer.update(random_samples())
    path = save_checkpoint(tmp_path / "checkpoints", step=7, parts=whole(trainer, tokenizer), state={})
    assert path.name == "step-000007"
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert loaded.dtype == dtype
    assert same(weights(loaded), weights(model))
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "lora"])
def test_the_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    def start(seed: int) -> Any:
        model = tiny_model(seed=seed).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)
        return lora.wrap(model, LoraSection(rank=2), seed=seed) if kind == "lora" else model

    model = start(0)
    trainer = trainer_of(model, optimizer="muon")
    trainer.update(random_samples(seed=1))
    state = {"position": [3, 4], "ledger": {"failed": 2}, "note": "ä"}
    path = save_checkpoint(tmp_path, step=1, parts=whole(trainer, tokenizer), state=state)
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    trainer.update(random_samples(seed=2))

    fresh = start(0 if kind == "lora" else 5)  # with LoRA, the base is loaded from where it was
    addresses = [p.data_ptr() for p in fresh.parameters()]
    resumed = trainer_of(fresh, optimizer="muon")
    checkpoint = read_checkpoint(path)
    assert (checkpoint.step, checkpoint.state) == (1, state)
    restore(checkpoint, {WHOLE: resumed})
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == drawn
    assert [p.data_ptr() for p in fresh.parameters()] == addresses
    resumed.update(random_samples(seed=2))
    assert same(weights(fresh), weights(model))
    assert same(resumed.state_dict(), trainer.state_dict())


def test_lora_is_saved_merged_and_apart(tmp_path: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = lora.wrap(tiny_model(), LoraSection(rank=2))
    trainer = trainer_of(model, lr=0.05)
    trainer.update(random_samples())
    path = save_checkpoint(tmp_path, step=1, parts=whole(trainer, tokenizer), state={})
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert type(loaded).__name__ == "Qwen2ForCausalLM"
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)
        with model.disable_adapter():
            assert not torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-2)
    assert (path / "adapter" / "adapter_model.safetensors").is_file()


@table(
    ("shape", "targets", "tied"),
    [
        ("qwen2", ["embed_tokens"], False),
        ("qwen2", ["embed_tokens", "q_proj"], False),
        ("qwen2", r"model\.embed_tokens", False),
        ("qwen3-tied", ["embed_tokens"], False),
        ("qwen2", "all-linear", True),
        ("qwen2", ["q_proj", "down_proj"], True),
        ("qwen3-tied", "all-linear", True),
        ("llama-biased", ["embed_tokens"], False),
        ("llama-biased", "all-linear", False),
        ("qwen3", ["embed_tokens", "o_proj"], False),
    ],
)
def test_config_json_ties_embedding_and_head_only_if_they_are_equal(
    shape: str, targets: Any, tied: bool, tmp_path: Path, tokenizer: Any
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = lora.wrap(tiny_model(shape), LoraSection(rank=2, target_modules=targets))
    trainer = trainer_of(model, lr=0.05)
    trainer.update(random_samples())
    folder = tmp_path / f"{shape}-{targets}"
    path = save_checkpoint(folder, step=1, parts=whole(trainer, tokenizer), state={})
    stored = load_file(path / "model.safetensors")
    assert json.loads((path / "config.json").read_text())["tie_word_embeddings"] == tied
    assert tied or "lm_head.weight" in stored
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.arange(30)[None]
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-4)


def test_nothing_is_pickled(tmp_path: Path, tokenizer: Any) -> None:
    path = save_checkpoint(tmp_path, step=1, parts=whole(trainer_of(tiny_model()), tokenizer), state={})
    assert {p.suffix for p in path.rglob("*") if p.is_file()} <= {".json", ".safetensors", ".jinja"}


@pytest.mark.slow
def test_the_checkpoint_of_another_model_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    trainer = trainer_of(tiny_model())
    path = save_checkpoint(tmp_path, step=1, parts=whole(trainer, tokenizer), state={})
    checkpoint = read_checkpoint(path)
    with pytest.raises(CheckpointError, match="of shape"):
        restore(checkpoint, {WHOLE: trainer_of(tiny_model(intermediate_size=64))})
    with pytest.raises(CheckpointError, match="lacks"):
        restore(checkpoint, {WHOLE: trainer_of(tiny_model(num_hidden_layers=3))})
    with pytest.raises(CheckpointError, match="no adapters"):
        restore(checkpoint, {WHOLE: trainer_of(lora.wrap(tiny_model(), LoraSection(rank=2)))})
    adapted = trainer_of(lora.wrap(tiny_model(), LoraSection(rank=2)))
    path = save_checkpoint(tmp_path, step=2, parts=whole(adapted, tokenizer), state={})
    with pytest.raises(CheckpointError, match="do not fit"):
        restore(read_checkpoint(path), {WHOLE: trainer_of(lora.wrap(tiny_model(), LoraSection(rank=4)))})


# --- which one is the newest ------------------------------------------------------------------------------------


def folder_with(directory: Path, name: str, step: int) -> Path:
    """A complete folder without the cost of a model."""
    with checkpoints.new_folder(directory / name) as folder:
        (folder / "resume").mkdir()
        (folder / "resume" / "state.json").write_text(json.dumps({"step": step, "state": {}}))
        (folder / "model.safetensors").write_bytes(bytes(1 << 21))
    return directory / name


def cut_off(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 5)


def change_small(folder: Path) -> None:
    (folder / "resume" / "state.json").write_text(json.dumps({"step": 3, "state": []}))


def flip_a_bit(folder: Path) -> None:
    damaged = bytearray((folder / "model.safetensors").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(damaged)


def lose_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def break_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{")


def newer_format(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


@table(
    ("damage", "says"),
    [
        (cut_off, "model.safetensors has 5 bytes"),
        (change_small, "state.json was changed or damaged"),
        (flip_a_bit, "model.safetensors was changed or damaged"),
        (lose_file, "missing"),
        (lose_manifest, "not written completely"),
        (break_manifest, "cannot be read"),
        (newer_format, "upgrade ASTuner"),
    ],
)
def test_damaged_checkpoints_are_passed_over(tmp_path: Path, damage: Any, says: str) -> None:
    whole, damaged = folder_with(tmp_path, "step-000002", 2), folder_with(tmp_path, "step-000003", 3)
    assert latest_checkpoint(tmp_path) == damaged
    damage(damaged)
    assert latest_checkpoint(tmp_path) == whole
    assert [(path, says in why) for path, why in saved_states(tmp_path)] == [(damaged, True), (whole, False)]
    with pytest.raises(CheckpointError, match=f"(?s){says}.*newest complete one is .*step-000002"):
        read_checkpoint(damaged)


def test_a_damaged_checkpoint_is_not_evaluated_or_served(tmp_path: Path) -> None:
    damaged = folder_with(tmp_path, "step-000003", 3)
    flip_a_bit(damaged)
    with pytest.raises(CheckpointError, match=r"step-000003 is damaged: model\.safetensors was changed"):
        load_model(ModelSection(path=str(damaged)))


def test_a_checkpoint_of_before_checksums_of_large_files_is_as_good_as_it_was(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "step-000002", 2)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        del entry["crc32"]
        if entry["bytes"] <= 1 << 20:
            entry["sha256"] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert latest_checkpoint(tmp_path) == folder
    change_small(folder)
    assert latest_checkpoint(tmp_path) is None


def test_the_newest_of_several_folders_comes_first_and_of_equals_that_of_the_first(tmp_path: Path) -> None:
    for name in ("a/step-000002", "b/step-000002", "a/step-000001", "b/step-000003"):
        folder_with(tmp_path, name, 0)
    found = [str(path.relative_to(tmp_path)) for path, _ in saved_states(tmp_path / "b", tmp_path / "a")]
    assert found == ["b/step-000003", "b/step-000002", "a/step-000002", "a/step-000001"]


def test_what_was_just_saved_is_not_pruned_for_a_damaged_later_one(tmp_path: Path) -> None:
    saved, later = folder_with(tmp_path, "step-000002", 2), folder_with(tmp_path, "step-000004", 4)
    flip_a_bit(later)
    prune(tmp_path, 1, step=2)
    assert latest_checkpoint(tmp_path) == saved
    assert later.exists()


def test_any_manifest_is_answered_with_what_is_the_matter(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "step-000002", 2)
    whole = (folder / "manifest.json").read_bytes()
    chance = random.Random(0)
    unnoticed = 0
    for _ in range(1000):
        text = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3, 20))):
            text[chance.randrange(len(text))] = chance.randrange(256)
        (folder / "manifest.json").write_bytes(text[: chance.choice((len(text), chance.randrange(len(text))))])
        unnoticed += not problem(folder)
    assert unnoticed < 100, "spaces, and bytes that stayed the same"
    for text in ("[]", "1", '{"format": 1, "files": []}', '{"format": Infinity, "files": {}}', "[" * 100_000):
        (folder / "manifest.json").write_text(text)
        assert "its manifest cannot be read" in problem(folder)
    (folder / "manifest.json").write_text('{"format": 1, "files": {"model.safetensors": 5}}')
    assert "no valid entry for model.safetensors" in problem(folder)


def test_steps_are_numbers_and_other_folders_are_not_checkpoints(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    assert latest_checkpoint(tmp_path) is None
    for name in ("step-000002", "step-1000000", "step-000009.tmp-1", "best", "xstep-000010"):
        folder_with(tmp_path, name, 0)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1000000"
    with pytest.raises(CheckpointError, match="the folder does not exist"):
        read_checkpoint(tmp_path / "step-000004")


def test_prune_keeps_the_newest_complete_ones_and_clears_rubbish(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        folder_with(tmp_path, f"step-{step:06d}", step)
    lose_manifest(tmp_path / "step-000005")
    dead = _dead_pid()
    for name in (f"step-000006.tmp-{dead}", f"step-000003.old-{dead}", "step-000007.tmp-1", "notes"):
        (tmp_path / name).mkdir()
    prune(tmp_path, None)
    prune(tmp_path, 2)
    # an incomplete one is left for a person to look at; process 1 is alive and may be writing
    kept = {"step-000003", "step-000004", "step-000005", "step-000007.tmp-1", "notes"}
    assert {p.name for p in tmp_path.iterdir()} == kept
    prune(tmp_path / "none", 2)
    prune(tmp_path, 1, spare=tmp_path / "step-000003")  # the best one
    assert {p.name for p in tmp_path.iterdir()} == kept


def test_a_checkpoint_killed_while_being_replaced_is_still_found(tmp_path: Path) -> None:
    aside = folder_with(tmp_path, f"step-000003.old-{_dead_pid()}", 3)
    folder_with(tmp_path, "step-000002", 2)
    assert latest_checkpoint(tmp_path) == aside
    prune(tmp_path, 5)
    assert latest_checkpoint(tmp_path) == aside
    successor = folder_with(tmp_path, "step-000003", 3)
    assert latest_checkpoint(tmp_path) == successor
    prune(tmp_path, 5)
    assert not aside.exists()


def _dead_pid() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


# --- writes that fail -------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_earlier_one_and_says_what_to_do(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(tiny_model())
    first = save_checkpoint(tmp_path, step=1, parts=whole(trainer, tokenizer), state={})

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for at in ("save_file", "_save_model"):
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, at, full)
            for step in (1, 2):  # replacing, and anew
                with pytest.raises(CheckpointError, match=r"No space left.*GiB.*max_checkpoints.*step-000001"):
                    save_checkpoint(tmp_path, step=step, parts=whole(trainer, tokenizer), state={})
        assert latest_checkpoint(tmp_path) == first
        assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_path_that_cannot_be_written(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*step-000001.*no earlier checkpoint"):
        save_checkpoint(tmp_path / "file" / "x", step=1, parts=whole(trainer_of(tiny_model()), tokenizer), state={})


def test_at_every_moment_of_saving_and_pruning_there_is_a_complete_checkpoint(tmp_path: Path) -> None:
    """Every time Python is about to open, rename, or delete a file, what a killed process would leave is looked at."""
    watching, moments, newest = False, 0, 0

    def look(event: str, _: Any) -> None:
        nonlocal watching, moments, newest
        if watching and event in ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"):
            watching = False
            found = latest_checkpoint(tmp_path)
            assert found is not None
            step = read_checkpoint(found).step
            assert step >= newest
            newest, moments, watching = step, moments + 1, True

    folder_with(tmp_path, "step-000001", 1)
    sys.addaudithook(look)  # hooks stay for the life of the process; `watching` switches this one off
    for step in (2, 3, 3, 4):
        watching = True
        folder_with(tmp_path, f"step-{step:06d}", step)
        prune(tmp_path, 1)
        watching = False
    assert newest == 4
    assert moments > 50


KILLED = """
    import os, random, signal, sys, time
    from pathlib import Path

    import torch
    torch.set_num_threads(1)
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
    from astuner.config.schema import TrainerCommon
    from astuner_local.trainer import checkpoint
    from astuner_local.trainer.trainer import PolicyTrainer

    directory = Path(sys.argv[1])
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=9000)
    model = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **sizes))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    trainer = PolicyTrainer(model, TrainerCommon(), temperature=1.0, device="cpu")

    def save(step):
        with torch.no_grad():
            model.lm_head.weight.fill_(step)
        parts = {checkpoint.WHOLE: checkpoint.Part(trainer, tokenizer)}
        checkpoint.save_checkpoint(directory, step=step, parts=parts, state={"step": step})
        checkpoint.prune(directory, 2)

    start = time.monotonic()
    save(1)
    one = time.monotonic() - start
    step, unfinished = 1, 0
    for trial in range(8):
        writer = os.fork()
        if writer == 0:
            for later in range(step + 1, step + 100):
                save(later)
            os._exit(1)
        newer = checkpoint.checkpoint_path(directory, step + 1)
        while trial % 2 and not newer.exists() and time.monotonic() - start < 300:
            time.sleep(0.01)  # on a busy machine one may take far longer than the first did
        time.sleep(random.Random(trial).uniform(0.2, 2.5) * one)
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
        unfinished += any(".tmp-" in p.name for p in directory.iterdir())
        found = checkpoint.read_checkpoint(checkpoint.latest_checkpoint(directory))
        assert found.step >= step, (found, step)
        checkpoint.restore(found, {checkpoint.WHOLE: trainer})
        assert (model.lm_head.weight == found.step).all(), found
        step = found.step
    save(step + 1)
    names = sorted(p.name for p in directory.iterdir())
    print(step, unfinished, names)
    assert not any(".tmp-" in n or ".old-" in n for n in names), names
    assert step > 1
    assert unfinished > 0
"""


@pytest.mark.slow
def test_kill_9_while_writing_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path / "checkpoints")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


FULL = """
    import resource, sys
    from pathlib import Path

    import torch
    from astuner.contracts.errors import CheckpointError
    from astuner_local.trainer import checkpoint
    from safetensors.torch import save_file

    directory = Path(sys.argv[1])

    def save(step, size):
        with checkpoint._explained(directory, directory / f"step-{step:06d}"):
            with checkpoint.new_folder(directory / f"step-{step:06d}") as folder:
                save_file({"weight": torch.zeros(size)}, folder / "model.safetensors")

    save(1, 10)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # what the system does when no more can be written
    try:
        save(2, 100_000)
    except CheckpointError as error:
        assert "step-000001" in str(error), error
    else:
        raise AssertionError("the limit was not reached")
    assert [p.name for p in directory.iterdir()] == ["step-000001"]
    assert checkpoint.latest_checkpoint(directory).name == "step-000001"
"""


@pytest.mark.slow
def test_a_file_system_that_takes_no_more_bytes(tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="limits of Unix")
    script = tmp_path / "full.py"
    script.write_text(textwrap.dedent(FULL))
    done = subprocess.run([sys.executable, str(script), str(tmp_path / "checkpoints")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
