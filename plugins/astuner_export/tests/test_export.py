"""`astuner export`: a folder that anybody loads, complete or not there, and nothing lost for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import astuner_local
from astuner.cli import main
from astuner.contracts.errors import CheckpointError, ConfigError
from astuner_export.model import export, problem
from astuner_models.serving import TEMPLATES
from astuner_objectives.manifest import write_manifest
from tests.table import table

TINY = Path(astuner_local.__file__).parent / "tiny" / "model"
MODEL = {"config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"}
AGENTS = (
    "  agents:\n    writer: {policy: writer}\n    critic: {policy: critic}\n    extra: {policy: idle, train: false}\n"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run with a checkpoint as the local backbone writes it; the experiment is in ``e.yaml``."""
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("astuner:\n  model: {path: tiny-calculator}\n", encoding="utf-8")
    folder = tmp_path / "launcher_record" / "e"
    for step in (1, 2):
        checkpoint(folder / "checkpoints" / f"step-{step:06d}")
    (folder / "checkpoints" / "step-000003.tmp-1").mkdir()
    return folder


def checkpoint(folder: Path) -> None:
    shutil.copytree(TINY, folder)
    for name in ("resume/trainer.safetensors", "resume/state.json", "adapter/adapter_model.safetensors"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    write_manifest(folder)


def sharded(folder: Path) -> None:
    """Cut the model in two, as transformers does with a large one."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    where = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(where.values()):
        save_file({n: t for n, t in tensors.items() if where[n] == shard}, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def same_weights(folder: Path) -> bool:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    models = [AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, TINY)]
    assert AutoTokenizer.from_pretrained(folder).chat_template == (TINY / "chat_template.jinja").read_text()
    return all(torch.equal(models[0][name], tensor) for name, tensor in models[1].items())


def test_the_newest_checkpoint_without_what_only_the_run_needs(run: Path) -> None:
    result = export("e.yaml", to="models/mine")
    assert result.checkpoint == run / "checkpoints" / "step-000002"
    assert result.models == {"default": Path("models/mine").resolve()}
    assert names(Path("models/mine")) == MODEL
    assert [p.name for p in Path("models").iterdir()] == ["mine"]
    assert result.bytes == sum(p.stat().st_size for p in Path("models/mine").iterdir())
    assert same_weights(Path("models/mine"))


def test_shards_are_exported_together(run: Path) -> None:
    sharded(run / "checkpoints" / "step-000001")
    write_manifest(run / "checkpoints" / "step-000001")
    export("e.yaml", to="out", checkpoint=str(run / "checkpoints" / "step-000001"))
    assert same_weights(Path("out"))


def test_a_checkpoint_in_which_a_bit_was_flipped_is_not_exported(run: Path) -> None:
    weights = run / "checkpoints" / "step-000002" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"step-000002 is damaged: model.safetensors was changed or damaged; ch"):
        export("e.yaml", to="out")
    (weights.parent / "manifest.json").unlink()  # as the message says
    assert names(export("e.yaml", to="out").models["default"]) == MODEL


def test_a_checkpoint_brings_no_file_from_elsewhere(run: Path, tmp_path: Path) -> None:
    """Somebody else's may link to a file of the person's, who then publishes the copy."""
    (tmp_path / "id_rsa").write_text("a key")
    (run / "checkpoints" / "step-000002" / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(CheckpointError, match=r"vocab\.txt is a link out of it"):
        export("e.yaml", to="models/mine")
    assert not Path("models").exists()


def test_base_is_the_model_before_training_unless_it_has_a_name_only(run: Path) -> None:
    result = export("e.yaml", to="out", checkpoint="base")
    assert result.checkpoint is None
    assert names(Path("out")) == MODEL
    with pytest.raises(CheckpointError, match="nobody/nothing of Hugging Face, and nothing has changed it"):
        export("e.yaml", ["astuner.model.path=nobody/nothing"], to="out2", checkpoint="base")


def test_each_policy_that_trains_gets_a_folder(run: Path) -> None:
    Path("e.yaml").write_text(Path("e.yaml").read_text() + AGENTS)
    saved = run / "checkpoints" / "step-000009"
    for policy in ("writer", "critic"):
        checkpoint(saved / policy)
    result = export("e.yaml", to="out")
    assert result.models == {p: Path("out").resolve() / p for p in ("writer", "critic")}
    assert {p.name: names(p) for p in Path("out").iterdir()} == {"writer": MODEL, "critic": MODEL}
    export("e.yaml", to="out", force=True)
    shutil.rmtree(saved / "critic")
    with pytest.raises(CheckpointError, match="step-000009 holds no model of the policy 'critic', which trains"):
        export("e.yaml", to="out3")
    assert not Path("out3").exists()


def test_the_template_that_was_trained_with_goes_along(run: Path) -> None:
    from transformers import AutoTokenizer

    Path("mine.jinja").write_text("{{ messages }}")
    export("e.yaml", ["astuner.model.chat_template=mine.jinja"], to="out")
    assert AutoTokenizer.from_pretrained("out").chat_template == "{{ messages }}"
    export("e.yaml", ["astuner.model.chat_template=hermes"], to="named-one")
    assert AutoTokenizer.from_pretrained("named-one").chat_template == TEMPLATES["hermes"].read_text()
    with pytest.raises(ConfigError, match=r"astuner.model.chat_template: cannot read .*yours.jinja"):
        export("e.yaml", ["astuner.model.chat_template=yours.jinja"], to="out2")
    assert sorted(p.name for p in Path().iterdir() if "out" in p.name) == ["out"]


def test_what_is_there_is_replaced_on_request_only_and_only_if_it_is_a_model(run: Path) -> None:
    Path("empty").mkdir()
    export("e.yaml", to="empty")
    Path("empty/config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"there already; .* --force"):
        export("e.yaml", to="empty")
    export("e.yaml", to="empty", force=True)
    assert same_weights(Path("empty"))
    Path("empty/notes.md").write_text("mine")
    source = run / "checkpoints" / "step-000002"
    for target, why in (
        ("empty", "holds other things than a model"),
        ("e.yaml", "holds other things than a model"),
        (".", "where the model comes from"),
        (str(source), "where the model comes from"),
        (str(source / "below"), "where the model comes from"),
        (str(run.parent / "e" / "checkpoints"), "where the model comes from"),
    ):
        with pytest.raises(CheckpointError, match=why):
            export("e.yaml", to=target, force=True)
    assert Path("empty/notes.md").read_text() == "mine"
    assert not (source / "below").exists()


def _remove(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _shard_gone(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _shard_swapped(folder: Path) -> None:
    sharded(folder)
    shutil.copyfile(folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors")


def _index_broken(folder: Path) -> None:
    sharded(folder)
    (folder / "model.safetensors.index.json").write_text("[]")


def _adapters(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.base_layer.weight": torch.ones(2, 2), f"{name}.lora_A.default.weight": torch.ones(1, 2)}
    save_file(tensors, folder / "model.safetensors")


@table(
    ("damage", "why"),
    [
        (_remove("config.json"), "config.json is missing"),
        (_remove("tokenizer_config.json"), "tokenizer_config.json is missing"),
        (_remove("model.safetensors"), "model.safetensors is missing"),
        (_cut, "model.safetensors is damaged: it has "),
        (_empty, "model.safetensors is damaged: it was cut off"),
        (_shard_gone, "model-00002-of-00002.safetensors is missing"),
        (_shard_swapped, "which model.safetensors.index.json says is there"),
        (_index_broken, "model.safetensors.index.json cannot be read: TypeError"),
        (_adapters, "it holds adapters beside their base (base_model.model.model.layers.0"),
    ],
)
def test_an_incomplete_model_is_seen(tmp_path: Path, damage: Any, why: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    assert problem(folder) == ""
    damage(folder)
    assert why in problem(folder)


def test_an_incomplete_checkpoint_is_refused_and_nothing_is_left(run: Path) -> None:
    _cut(run / "checkpoints" / "step-000002")
    (run / "checkpoints" / "step-000002" / "manifest.json").unlink()  # an engine's has none
    with pytest.raises(CheckpointError, match=r"step-000002 cannot be exported: model\.safetensors is damaged"):
        export("e.yaml", to="out")
    assert not any("out" in p.name for p in Path().iterdir())


def test_a_copy_that_fails_leaves_what_was_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export("e.yaml", to="out")

    def full(source: Path, target: Path) -> None:
        if source.name == "model.safetensors":
            raise OSError(28, "No space left on device")
        Path(target).write_bytes(source.read_bytes())

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(CheckpointError, match=r"cannot export to .*No space left on device.*free space"):
        export("e.yaml", to="out", force=True)
    assert [p.name for p in Path().iterdir() if "out" in p.name] == ["out"]
    assert same_weights(Path("out"))


def test_the_command_says_how_to_load_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(0, "export", "e.yaml", "--to", "out", "--checkpoint", "base")
    said = capsys.readouterr().out
    out = Path("out").resolve()
    assert f'AutoModelForCausalLM.from_pretrained("{out}")' in said
    assert f"vllm serve {out}" in said
    moved = run.rename(run.parent.parent / "elsewhere")
    main_exits(0, "export", "e.yaml", "astuner.seed=3", "--to", "out2", "--run-dir", "elsewhere", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["checkpoint"] == str(moved / "checkpoints" / "step-000002")
    assert told["models"] == {"default": str(Path("out2").resolve())}
    main_exits(1, "export", "e.yaml", "--to", "out3")
    assert "there is no checkpoint in" in capsys.readouterr().err


def main_exits(code: int, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert (ended.value.code or 0) == code
