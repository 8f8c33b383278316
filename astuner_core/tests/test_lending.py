"""A command that lends a part to the run of another: it has no tasks and no books, and leaves the run folder alone."""

import pytest

from astuner.contracts.errors import ConfigError, RunError
from astuner.runs import launch
from astuner.runs.run_dir import RunDir
from astuner.testing import FakeBackbone
from tests.table import table

FILE = """
astuner:
  backbone: local
  model: {path: tiny}
  task_reader: {type: jsonl, jsonl: {training: {file_path: not_here.jsonl}}}
  rollout: {workflow: "not_here.py->Agent"}
"""


class Lender(FakeBackbone):
    lends = True

    def lend(self, folder, interrupt, note):
        assert not interrupt.requested
        note(f"lends, and writes to {folder}")
        return "the run has ended"

    def train(self, experiment):
        pytest.fail("it has no run")


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr("astuner.runs.preflight.make_backbone", lambda config: Lender(config))
    monkeypatch.setattr("astuner.runs.preflight.check_capabilities", lambda *_, **__: ("a note",))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.yaml").write_text(FILE)
    return tmp_path / "exp.yaml"


def test_it_lends_until_the_run_ends_and_never_touches_its_folder(file, capsys):
    result = launch.run(file, ["astuner.experiment_dir=runs"])
    assert result.summary() == "the run has ended"
    assert not result.run_dir.exists()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == ["a note", f"lends, and writes to {result.run_dir.resolve()}.lent"]


def test_a_run_that_is_under_way_does_not_lock_it_out_and_a_second_lender_does(file):
    folder = launch.run(file, ["astuner.experiment_dir=runs"]).run_dir
    with RunDir(folder).locked():
        launch.run(file, ["astuner.experiment_dir=runs"])
    with (
        RunDir(folder.with_name(f"{folder.name}.lent")).locked(),
        pytest.raises(RunError, match="is in use by another run"),
    ):
        launch.run(file, ["astuner.experiment_dir=runs"])


@table("resume", ["must", "never"])
def test_whether_to_go_on_is_said_where_the_run_is(file, resume):
    with pytest.raises(ConfigError, match=r"^--resume and --no-resume"):
        launch.run(file, resume=resume)
