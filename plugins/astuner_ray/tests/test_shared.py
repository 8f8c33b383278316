"""What one machine says that it lacks, without Ray; `tests/nodes` asks machines that do."""

from __future__ import annotations

from pathlib import Path

from astuner_ray.shared import _look, _sizes


def test_a_machine_says_which_of_model_and_run_folder_are_not_those_of_the_others(tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    run.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"0" * 10)
    (run / ".mark").touch()
    files = _sizes(str(model))
    assert _look(str(model), files, run / ".mark") == []
    assert _look(str(model), files, None) == []

    (model / "model.safetensors").write_bytes(b"0" * 9)
    (model / "another").touch()
    (run / ".mark").unlink()
    different, lacking = _look(str(model), files, run / ".mark")
    assert different.startswith(f"the model {model}: model.safetensors differs or is missing; copy it")
    assert lacking.startswith(f"the run folder {run}: a file just created in it is missing; every GPU writes")

    gone = tmp_path / "gone"
    (absent,) = _look(str(gone), files, None)
    assert absent.startswith(f"the model {gone}: no such folder; copy it to this path on every machine")
