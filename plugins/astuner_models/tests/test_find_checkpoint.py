"""Which model ``--checkpoint`` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner import RunDir, write_jsonl
from astuner.contracts.errors import CheckpointError
from astuner.testing import fake_config
from astuner_models.serving import find_checkpoint
from astuner_ray.step_states import publish


def test_a_checkpoint_is_found_by_its_name_in_the_run_or_as_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = fake_config(tmp_path)
    made = [config.run_dir.absolute() / "checkpoints" / name for name in ("step-000050", "step-000100")]
    for folder in made:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    assert find_checkpoint(config, "base") is None
    for said, found in (("latest", made[1]), ("step-000050", made[0]), (str(made[1]), made[1])):
        assert find_checkpoint(config, said) == found
    with pytest.raises(CheckpointError, match=r"step-99 is not a model folder .*: step-000050, step-000100$"):
        find_checkpoint(config, "step-99")


def test_the_best_validated_checkpoint_is_taken_unless_told_otherwise_and_kept(tmp_path: Path) -> None:
    config = fake_config(tmp_path)
    run = RunDir(config.run_dir)
    run.start()

    def checkpoint(step: int) -> Path:
        folder = run.checkpoints / f"step-{step:06d}"
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        return folder

    made = {step: checkpoint(step) for step in (10, 20, 30, 40)}
    assert find_checkpoint(config, "best") == made[40]  # none was validated
    success = {0: 0.99, 10: 0.4, 20: 0.8, 25: 0.95, 30: 0.8}  # 0 and 25 are kept nowhere, 40 was not validated
    write_jsonl(run.metrics, [{"step": s, "val/success": v, "val/reward/mean": 0.1} for s, v in success.items()])
    assert run.best == find_checkpoint(config, "best") == made[30]  # the newest of equals
    assert find_checkpoint(config, "latest") == made[40]
    write_jsonl(run.metrics, [{"step": s, "val/success": 0.0, "val/reward/mean": r} for s, r in ((10, 0.7), (20, 0.2))])
    assert run.best == made[10]  # where nothing counts as a success, the reward decides
    write_jsonl(run.metrics, [{"step": 10, "val/success": 0.2}, {"step": 20, "val/success": None}])
    assert run.best == made[10]  # a validation that nothing could be judged in is none

    export = tmp_path / "export"
    export.mkdir()
    (export / "model.safetensors").write_bytes(b"")
    publish(export, run.checkpoints, 50, keep=1)
    assert [p.name for p in run.models] == ["step-000010", "step-000050"]


def test_where_nothing_is_trained_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoints: none$"):
        find_checkpoint(fake_config(tmp_path), "step-000050")
