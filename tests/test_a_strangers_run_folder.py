"""A run folder of somebody else: whoever only looks at it runs none of the code that it names, and tells none of the
variables that it asks for."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest

from astuner.chat.codec import ChatCodec
from astuner.cli import main
from astuner.contracts.types import SamplingParams
from astuner.rollout.models import one_model
from astuner.rollout.runner import EpisodeRunner
from astuner.support.json_lines import write_jsonl
from astuner_record.episode_log import EpisodeLogWriter
from astuner_testing.fakes import FakeEngine, fake_config, make_tokenizer, workflow_task
from tests.table import table

TOKENIZER = make_tokenizer()
CODE = """
from pathlib import Path
from astuner import Judge, JudgeOutput, Workflow, WorkflowOutput

Path(__file__).with_name("ran").touch()


class Mine(Workflow):
    async def execute(self, workflow_task, model_tuner):
        await model_tuner.chat([{"role": "user", "content": "Hi"}])
        return WorkflowOutput()


class MyJudge(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=1.0, is_success=True)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose settings name code beside it, and a variable."""
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "mine.py").write_text(CODE)
    keys = "  task_judge: {judge: mine.py->MyJudge}\n  rollout: {workflow: mine.py->Mine}"
    config = fake_config(
        folder,
        keys,
        [f"astuner.experiment_dir={folder}", "astuner.experiment_name=run", "astuner.project_name=PROJECT"],
    )
    models = one_model(FakeEngine(["Hello"], TOKENIZER), ChatCodec(TOKENIZER))
    played = EpisodeRunner(config).run(workflow_task(), models, SamplingParams(max_tokens=20))
    log = EpisodeLogWriter(folder / "run" / "episodes")
    log.episode(1, asyncio.run(played))
    log.close()
    settings = config.dump_yaml().replace("project_name: PROJECT", "project_name: ${oc.env:PLANTED}")
    assert "PLANTED" in settings
    (folder / "run" / "resolved.yaml").write_text(settings)
    write_jsonl(folder / "run" / "metrics.jsonl", [{"step": 1, "time": 1.0, "reward/mean": 1.0}])
    return folder / "run"


@pytest.fixture
def ran(run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says that the code was imported."""
    monkeypatch.setenv("PLANTED", "sk-planted")
    (run.parent / "ran").unlink(missing_ok=True)
    for name in [name for name in sys.modules if name.startswith("astuner_user_mine")]:
        del sys.modules[name]
    return run.parent / "ran"


def astuner(*arguments: object) -> None:
    with pytest.raises(SystemExit):
        main([*map(str, arguments)])


@table("command", ["report RUN", "diff RUN RUN", "doctor RUN", "replay RUN --list", "export RUN --to jsonl --out OUT"])
def test_nobody_waits_at_its_pipes(run: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    for name in ("metrics.jsonl", "failures.jsonl", "alarms.jsonl", "origin.json", "summary.json", "certificate.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    astuner(*command.replace("RUN", str(folder)).replace("OUT", str(tmp_path / "rows.jsonl")).split())
    assert "Traceback" not in capsys.readouterr().err


@table(
    "command",
    ["report RUN", "diff RUN RUN", "doctor RUN", "replay RUN --list", "view RUN --export OUT/page.html",
     "export RUN --to jsonl --out OUT/rows.jsonl"],
)  # fmt: skip
def test_who_looks_at_it_runs_none_of_its_code(
    run: Path, ran: Path, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    astuner(*command.replace("RUN", str(run)).replace("OUT", str(tmp_path)).split())
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert not ran.exists()
    written = [p.read_bytes() for folder in (run, tmp_path) for p in folder.rglob("*") if p.is_file()]
    assert b"sk-planted" not in b"".join(written)
    assert "sk-planted" not in said.out + said.err


def test_who_judges_it_again_does(run: Path, ran: Path) -> None:
    astuner("replay", run, "episode")
    assert ran.exists()
