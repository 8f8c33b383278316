"""`astuner diff --judge`: both sides under one judge, whatever judged them then."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from astuner import RunDir
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_record.episode_log import EpisodeLogWriter
from astuner_testing.fakes import fake_config

from .test_compare import astuner

CODE = """
from pathlib import Path
from astuner import Judge, JudgeOutput
from astuner.contracts.judge import GroupJudge

class Exact(Judge):
    def judge(self, workflow_task, output):
        with Path(__file__).with_name("asked").open("a") as file:
            file.write(f"{workflow_task.episode_id}\\n")
        return JudgeOutput(reward=float(output.metadata["said"] == workflow_task.task.metadata["answer"]))

class Kind(Exact):
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=1.0)

class Silent(Exact):
    def judge(self, workflow_task, output):
        if workflow_task.task.task_id == "t1":
            raise ValueError("no idea")
        return super().judge(workflow_task, output)

class Best(GroupJudge):
    def judge_group(self, attempts):
        return [JudgeOutput(reward=float(len(one.output.metadata["said"]))) for one in attempts]

class Broken(Judge):
    def judge(self, workflow_task, output):
        raise ValueError("no idea at all")
"""
Said = Mapping[str, tuple[str, float]]
"""Task -> what was said, and the reward it had."""


def answered(task: str, said: str, reward: float, stop: StopReason = StopReason.COMPLETED) -> Episode:
    made = Generation(
        prompt_ids=[1], response_ids=[2, 3], logprobs=[-0.5] * 2, finish_reason=FinishReason.STOP, policy_version=0
    )
    asked = Task(task_id=task, main_query=f"What is {task}?", metadata={"answer": "4"})
    return Episode(
        workflow_task=WorkflowTask(task=asked, episode_id=f"v-{task}-0", group_id=f"v-{task}", split=Split.VALIDATION),
        turns=(Turn(index=0, agent="default", generation=made, continues=None),),
        output=WorkflowOutput(metadata={"said": said}),
        verdict=JudgeOutput(reward=reward),
        reward_source="limit" if stop.is_limit else "judge",
        stop_reason=stop,
    )


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)

    def made(name: str, judge: str, *episodes: Episode, settings: str = "") -> Path:
        text = f"  task_judge: {{judge: mine.py->{judge}}}\n" + settings
        places = [
            f"astuner.experiment_dir={tmp_path}",
            f"astuner.experiment_name={name}",
            "astuner.rollout.max_retries=0",
        ]
        run = RunDir(tmp_path / name)
        run.episodes.mkdir(parents=True)
        run.resolved.write_text(fake_config(tmp_path, text, places).dump_yaml())
        log = EpisodeLogWriter(run.episodes)
        for episode in episodes:
            log.episode(10, episode)
        log.close()
        return run.path

    return made


def two(make: Callable[..., Path]) -> tuple[Path, Path]:
    """The same answers, which an exact judge gave 2 of 3 and a kind one all; but for t2, which b has right."""
    a = make("a", "Exact", *(answered(f"t{i}", s, float(s == "4")) for i, s in enumerate(("4", "4", "5"))))
    b = make("b", "Kind", *(answered(f"t{i}", s, 1.0) for i, s in enumerate(("4", "5", "4"))))
    return a, b


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_both_sides_get_one_judges_verdicts(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(make)
    assert astuner("diff", a, b, "--json") == 0
    then = said(capsys)
    assert then["yardsticks"]
    assert then["judged"] is None
    assert (then["measures"]["success"]["b"], then["measures"]["success"]["p_value"]) == (1.0, None)
    assert astuner("diff", a, b, "--judge", "mine.py->Exact", "--json") == 0
    captured = capsys.readouterr()
    now = json.loads(captured.out)
    assert now["judged"]["judged"] == 6
    assert now["judged"]["name"].endswith("mine.py->Exact")
    assert now["yardsticks"] == []
    assert [one["key"] for one in now["settings"]] == ["astuner.task_judge.judge"]  # what they were trained with
    assert (now["measures"]["success"]["a"], now["measures"]["success"]["b"]) == (pytest.approx(2 / 3),) * 2
    assert (now["measures"]["success"]["p_value"], now["measures"]["success"]["comparable"]) == (1.0, True)
    assert ([f["task_id"] for f in now["won"]], [f["task_id"] for f in now["lost"]]) == (["t2"], ["t1"])
    assert "b: 3 of 3 episodes judged" in captured.err
    assert sorted(Path("asked").read_text().split()) == sorted([f"v-t{i}-0" for i in range(3)] * 2)
    assert astuner("diff", a, b, "--json") == 0
    assert said(capsys) == then  # nothing was kept
    assert astuner("diff", a, b, "--judge", "mine.py->Exact") == 0
    assert capsys.readouterr().out.startswith("BOTH SIDES JUDGED AGAIN by ")


def test_who_has_no_verdict_is_left_out_and_said(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(make)
    assert astuner("diff", a, b, "--judge", "mine.py->Silent", "--json") == 0
    found = said(capsys)
    assert (found["tasks"]["paired"], found["judged"]["judged"]) == (2, 4)
    assert found["tasks"]["unscored"] == {"t1": "judge_failed in a, judge_failed in b"}
    assert list(found["judged"]["not_judged"].values()) == [2]
    assert astuner("diff", a, b, "--judge", "mine.py->Silent") == 0
    assert "2 not judged: the judge Silent raised ValueError: no idea" in capsys.readouterr().out


def test_what_a_rule_gave_stays_whoever_judges(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    rule = "  rollout: {truncated_reward: -1.0}\n"
    cut = answered("t1", "4", -1.0, StopReason.TRUNCATED)
    a = make("a", "Exact", answered("t0", "4", 1.0), cut, settings=rule)
    b = make("b", "Exact", answered("t0", "5", 0.0), answered("t1", "4", 1.0), settings=rule)
    assert astuner("diff", a, b, "--judge", "mine.py->Kind", "--json") == 0
    found = said(capsys)
    assert (found["judged"]["judged"], found["judged"]["by_rule"]) == (3, 1)
    assert (found["measures"]["reward"]["a"], found["measures"]["reward"]["b"]) == (0.0, 1.0)


def test_a_judge_that_compares_attempts_is_asked(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make("a", "Exact", answered("t0", "4", 1.0)), make("b", "Exact", answered("t0", "four", 0.0))
    assert astuner("diff", a, b, "--judge", "mine.py->Best", "--json") == 0
    assert said(capsys)["measures"]["reward"]["difference"] == 3.0


def test_settings_of_the_judge_need_one(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = two(make)
    assert astuner("diff", a, b, "astuner.task_judge.judge_timeout=5") == 2
    assert "Add --judge NAME" in capsys.readouterr().err
    assert astuner("diff", a, b, "astuner.task_judge.judge_timeout=5", "--judge", "mine.py->Exact", "--json") == 0
    assert said(capsys)["judged"]["judged"] == 6
    assert astuner("diff", a, b, "--judge", "mine.py->Broken") == 1
    assert "did not score any of 3 episodes: the judge Broken raised ValueError" in capsys.readouterr().err
    assert astuner("diff", a, b, "--judge", "nothing") in (1, 2)
    assert "nothing" in capsys.readouterr().err
