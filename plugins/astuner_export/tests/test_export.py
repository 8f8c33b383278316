"""`astuner export`: a folder that anybody loads, complete or not there, and nothing lost for it."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import astuner_local
from astuner import LoraSection
from astuner.cli import main
from astuner.contracts.errors import CheckpointError, ConfigError, MissingDependency
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_export.model import export, problem
from astuner_export.parity import BOUNDS, QUESTIONS
from astuner_export.weights import header, stored_dtype
from astuner_local.modeling import load_model
from astuner_local.trainer.lora import merged_state_dict, wrap
from astuner_models.serving import TEMPLATES
from astuner_objectives.manifest import write_manifest
from astuner_record.episode_log import EpisodeLogWriter
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
    with pytest.raises(CheckpointError, match=r"step-000002 is damaged: model.safetensors was changed or damaged"):
        export("e.yaml", to="out")
    (weights.parent / "manifest.json").unlink()  # as the message says
    assert names(export("e.yaml", to="out").models["default"]) == MODEL


def test_a_checkpoint_brings_no_file_from_elsewhere(run: Path, tmp_path: Path) -> None:
    """Somebody else's may link to a file of the person's, who then publishes the copy."""
    (tmp_path / "id_rsa").write_text("a key")
    (run / "checkpoints" / "step-000002" / "vocab.txt").symlink_to(tmp_path / "id_rsa")
    with pytest.raises(CheckpointError, match=r"vocab\.txt links to a file outside"):
        export("e.yaml", to="models/mine")
    assert not Path("models").exists()


def test_base_is_the_model_before_training_unless_it_has_a_name_only(run: Path) -> None:
    result = export("e.yaml", to="out", checkpoint="base")
    assert result.checkpoint is None
    assert names(Path("out")) == MODEL
    with pytest.raises(CheckpointError, match="nobody/nothing on the Hugging Face Hub"):
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
    with pytest.raises(CheckpointError, match="step-000009 contains no model of the trained policy 'critic'"):
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
    with pytest.raises(CheckpointError, match=r"exists.* --force"):
        export("e.yaml", to="empty")
    export("e.yaml", to="empty", force=True)
    assert same_weights(Path("empty"))
    Path("empty/notes.md").write_text("mine")
    source = run / "checkpoints" / "step-000002"
    for target, why in (
        ("empty", "contains more than a model"),
        ("e.yaml", "contains more than a model"),
        (".", "source of the export"),
        (str(source), "source of the export"),
        (str(source / "below"), "source of the export"),
        (str(run.parent / "e" / "checkpoints"), "source of the export"),
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
        (_empty, "model.safetensors is damaged: it is truncated"),
        (_shard_gone, "model-00002-of-00002.safetensors is missing"),
        (_shard_swapped, "which model.safetensors.index.json lists"),
        (_index_broken, "model.safetensors.index.json cannot be read: TypeError"),
        (_remove("tokenizer.json"), "its tokenizer is missing (tokenizer.json, "),
        (_adapters, "it contains separate adapters (base_model.model.model.layers.0"),
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
    with pytest.raises(CheckpointError, match=r"Cannot export .*step-000002: model\.safetensors is damaged"):
        export("e.yaml", to="out")
    assert not any("out" in p.name for p in Path().iterdir())


def test_a_copy_that_fails_leaves_what_was_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export("e.yaml", to="out")

    def full(source: Path, target: Path) -> None:
        if source.name == "model.safetensors":
            raise OSError(28, "No space left on device")
        Path(target).write_bytes(source.read_bytes())

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(CheckpointError, match=r"Cannot export to .*No space left on device.*disk space"):
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
    assert told["dtypes"] == {"default": "float32"}
    assert told["parity"]["default"]["difference"] <= told["parity"]["default"]["bound"] == 1e-4
    main_exits(1, "export", "e.yaml", "--to", "out3")
    assert "no checkpoint in" in capsys.readouterr().err


@table(
    ("arguments", "said"),
    [
        (("--to", "hf"), "--to hf writes a model. Add --out DIR"),
        (("--to", "gguf"), "Add --out FILE.gguf"),
        (
            ("--to", "gguff"),
            "'gguff' is not a known format (hf, gguf, parquet, jsonl, sft, tokens, dpo, labels, tasks)",
        ),
        (("--to", "onnx", "--out", "x"), "'onnx' is not a known format"),
        (
            ("--to", "hf", "--out", "x", "--dtype", "int8"),
            "'int8' is not supported. Use one of auto, float32, bfloat16, float16",
        ),
        (("--to", "hf", "--out", "x", "--where", "reward>=1"), "apply to --to"),
        (("--to", "sft", "--out", "x", "--no-check"), "--dtype and --no-check apply to --to hf|gguf"),
        (("--to", "sft"), "Add --out FILE"),
    ],
)
def test_what_cannot_be_exported_is_said(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    main_exits(2, "export", "e.yaml", *arguments)
    assert said in capsys.readouterr().err
    assert not Path("x").exists()


def test_where_nothing_can_be_written_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(1, "export", "e.yaml", "--to", "hf", "--out", "/proc/x/y")
    assert "Cannot export to /proc/x/y" in capsys.readouterr().err


def test_the_command_checks_what_it_wrote(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_exits(0, "export", "e.yaml", "--to", "hf", "--out", "out")
    assert "checked: logits differ by 0 of the largest (bound 0.0001)" in capsys.readouterr().out
    main_exits(0, "export", "e.yaml", "--to", "hf", "--out", "out2", "--no-check")
    assert "not checked (--no-check)" in capsys.readouterr().out


@table("dtype", ["bfloat16", "float16"])
def test_weights_are_stored_in_the_dtype_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("astuner:\n  model: {path: tiny-calculator}\n", encoding="utf-8")
    shutil.copytree(TINY, "saved")
    sharded(Path("saved"))
    result = export("e.yaml", to="out", dtype=dtype, checkpoint="saved")
    assert result.dtypes == {"default": dtype} == {"default": json.loads(Path("out/config.json").read_text())["dtype"]}
    assert stored_dtype(Path("out")) == dtype
    found = result.parity["default"]
    assert 0 < found.difference < found.bound == BOUNDS[dtype]
    assert found.agreement > 0.9
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        one["data_offsets"][1] - one["data_offsets"][0] for name in ("1", "2")
        for one in header(Path(f"out/model-0000{name}-of-00002.safetensors")).values()
    )  # fmt: skip


def test_numbers_that_a_dtype_does_not_hold_are_refused(run: Path) -> None:
    _scale(run / "checkpoints" / "step-000002", 1e6)
    with pytest.raises(CheckpointError, match=r"too large for float16.*--dtype bfloat16 or float32"):
        export("e.yaml", to="out", dtype="float16", check=False)
    assert not any("out" in p.name for p in Path().iterdir())


def _scale(folder: Path, factor: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = {name: tensor * factor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "manifest.json").unlink(missing_ok=True)


def adapted(folder: Path, dtype: str, *, merge: bool = True) -> None:
    """Make a checkpoint one of a run with adapters, as the local backbone writes it.

    :param merge: False: the weights are the base's, a defect.
    """
    import torch

    from astuner import ModelSection

    loaded = load_model(ModelSection(path=str(TINY), dtype=dtype))
    model = wrap(loaded.model, LoraSection(rank=4, alpha=8), seed=1)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    base = {
        n.replace(".base_layer.", "."): t for n, t in model.get_base_model().state_dict().items() if "lora_" not in n
    }
    model.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    model.get_base_model().save_pretrained(str(folder), state_dict=merged_state_dict(model) if merge else base)
    (folder / "manifest.json").unlink()


@table(("dtype", "difference"), [("float32", 1e-5), ("bfloat16", 2**-6)])
def test_merged_adapters_say_what_the_trainers_say_beside_their_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, difference: float
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.yaml").write_text("astuner:\n  model: {path: tiny-calculator}\n", encoding="utf-8")
    checkpoint(Path("saved"))
    adapted(Path("saved"), dtype)
    found = export("e.yaml", to="out", checkpoint="saved").parity["default"]
    assert 0 < found.difference < difference
    unmerged = Path("unmerged")
    checkpoint(unmerged)
    adapted(unmerged, dtype, merge=False)
    with pytest.raises(CheckpointError, match=r"differs from the trainer's model and was removed: logits d"):
        export("e.yaml", to="out2", checkpoint=str(unmerged))
    assert not any("out2" in p.name for p in Path().iterdir())
    assert export("e.yaml", to="out2", checkpoint=str(unmerged), check=False).parity == {}


def test_what_does_not_say_the_same_leaves_what_was_there(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export("e.yaml", to="out")
    _scale(run / "checkpoints" / "step-000002", float("nan"))
    with pytest.raises(
        CheckpointError, match=r"logits differ by nan .* Choose another --checkpoint, or skip the check"
    ):
        export("e.yaml", to="out", force=True)
    assert same_weights(Path("out"))
    assert [p.name for p in Path().iterdir() if "out" in p.name] == ["out"]


def test_prompts_are_of_the_runs_newest_episodes(run: Path) -> None:
    assert export("e.yaml", to="out").parity["default"].prompts == len(QUESTIONS)
    log = EpisodeLogWriter(run / "episodes")
    for number in range(6):
        said = Generation(
            prompt_ids=range(3, 30 + number),
            response_ids=range(40, 300),
            logprobs=[-1.0] * 260,
            finish_reason=FinishReason.STOP,
            policy_version=1,
        )
        asked = WorkflowTask(
            task=Task(task_id="t"), episode_id=f"g-{number}", group_id="g", split=Split.TRAIN, attempt=number
        )
        log.episode(
            1,
            Episode(
                workflow_task=asked,
                turns=(Turn(index=0, agent="default", generation=said, continues=None),),
                output=WorkflowOutput(),
                verdict=None,
                reward_source="",
                stop_reason=StopReason.COMPLETED,
                seconds=1.0,
            ),
        )
    log.close()
    found = export("e.yaml", to="out", force=True).parity["default"]
    assert (found.prompts, found.tokens) == (4, 4 * 128)
    assert found.source == "from the run's latest episodes"


@table(
    ("module", "to_type"),
    [("transformers", "pip install 'astuner-export[check]', or skip the check with --no-check")],
)
def test_without_what_checks_it_the_way_out_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, module: str, to_type: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependency, match=f"{module}.*") as raised:
        export("e.yaml", to="out")
    assert to_type in str(raised.value)
    assert names(export("e.yaml", to="out", check=False).models["default"]) == MODEL


def test_what_a_killed_export_left_is_removed_and_what_it_was_replacing_comes_back(run: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    export("e.yaml", to="out")
    Path("out").rename(f".out.{gone.pid}.old")  # killed between the two renames
    (Path(f".out.{gone.pid}.tmp") / "half").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="exists"):
        export("e.yaml", to="out")
    export("e.yaml", to="out", force=True)
    assert [p.name for p in Path().iterdir() if "out" in p.name] == ["out"]


@table("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import time\nfrom pathlib import Path\nfrom astuner_record.replacing import replacing\n"
        "with replacing(Path('out')) as folder:\n    folder.mkdir()\n    print('writing', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=-1, stderr=-1) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writing\n"
        child.send_signal(number)
        assert child.wait() != 0
    assert list(tmp_path.iterdir()) == []


def main_exits(code: int, *arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    assert (ended.value.code or 0) == code


def test_a_config_that_ties_what_differs_is_refused(run: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = run / "checkpoints" / "step-000002"
    stored = load_file(folder / "model.safetensors")
    assert problem(folder) == ""
    for scale, is_refused in ((1.0, False), (1.5, True)):
        head = stored["model.embed_tokens.weight"] * scale
        save_file({**stored, "lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
        assert ("tie_word_embeddings" in problem(folder)) == is_refused
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": False}))
    assert problem(folder) == ""
