"""Which model ``--checkpoint`` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.errors import CheckpointError
from astuner.serving import find_checkpoint
from astuner.testing import fake_config


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


def test_where_nothing_is_trained_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is none yet"):
        find_checkpoint(fake_config(tmp_path), "step-000050")
