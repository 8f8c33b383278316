"""HTML of runs and episodes: what it contains, and that texts of models and agents stay texts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import astuner
from astuner.contracts.display import RunView
from astuner.contracts.events import Progressed
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_report.notebook import MOST_MESSAGES, to_html
from tests.table import table

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>\u202e"
ROWS = [
    {"step": 0, "val/success": 0.25, "val/success_ci_low": 0.1, "val/success_ci_high": 0.4},
    {"step": 1, "reward/mean": 0.125},
    {"step": 2, "reward/mean": 0.5},
]


def episode(text: str = "hi", replies: int = 1) -> Episode:
    generation = Generation(
        prompt_ids=[1], response_ids=[2], logprobs=[0.0], finish_reason=FinishReason.STOP, policy_version=0
    )
    call = {"id": "c", "function": {"name": text, "arguments": text}}
    message = {"role": "assistant", "content": text, "tool_calls": [call], "reasoning_content": text}
    turns = [
        Turn(index=n, agent=text, generation=generation, continues=None, request=[{"role": text, "content": [text]}])
        for n in range(replies)
    ]
    return Episode(
        workflow_task=WorkflowTask(task=Task(task_id=text), episode_id=text, group_id="g"),
        turns=[replace(turn, message=message) for turn in turns],
        output=WorkflowOutput(response=text),
        verdict=JudgeOutput(reward=0.75, rewards={text: 0.75}, metrics={text: 1.0}),
        reward_source="judge",
        stop_reason=StopReason.COMPLETED,
        error=text,
    )


@table("name", ["episode", "run"])
def test_texts_of_models_and_tasks_are_escaped(name: str) -> None:
    run = RunView(name=HOSTILE, status=HOSTILE, facts={HOSTILE: HOSTILE}, rows=[{"step": 1, HOSTILE: 1.0}])
    html = to_html(episode(HOSTILE) if name == "episode" else run)
    assert "&lt;script&gt;" in html
    assert "<script" not in html
    assert "<img" not in html
    assert "\u202e" not in html


def test_an_episode_shows_messages_reward_and_metrics_of_the_judge() -> None:
    html = to_html(episode())
    for text in ("0.75", "no success; set by the judge", "judge/hi", "hi (reply 0)", "completed", "arguments"):
        assert text in html
    long = to_html(episode(replies=MOST_MESSAGES))
    assert f"{MOST_MESSAGES} more messages" in long
    assert len(long) < 100_000
    failed = replace(episode(), verdict=None, output=None, stop_reason=StopReason.WORKFLOW_FAILED)
    assert "workflow_failed" in to_html(failed)


def test_a_run_shows_bar_remaining_time_curve_and_first_and_last_metrics() -> None:
    at = Progressed(step=3, total_steps=12, done=10, total=64, what="rollout", remaining=240.0, elapsed=81.2)
    html = to_html(RunView(name="mine", status="running", progress=at, rows=ROWS))
    assert '<progress max="12" value="2"></progress>' in html
    assert "step 3/12 · rollout 10/64 · 81.2 s elapsed · 4.0 min left" in html
    assert html.count("<svg") == 1
    assert '<th scope="row">reward/mean</th><td>0.125</td><td>0.5</td>' in html
    unknown = to_html(RunView(name="mine", status="running", progress=replace(at, remaining=None, total=0)))
    assert " left" not in unknown
    assert "<svg" not in unknown
    assert to_html(RunView(rows=ROWS)).count("<table") == 0


def test_a_result_has_a_short_repr_html_a_frame_a_plot_and_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def solve(task: dict[str, Any], model: Any) -> Any:
        reply = await model.chat([{"role": "user", "content": task["question"]}])
        return reply.message["content"]

    rows = [{"question": f"Tom has {n} boxes with 3 pens."} for n in range(2, 6)]
    settings = {
        "astuner.trainer_common.total_steps": 2,
        "astuner.data.train_batch_size": 2,
        "astuner.rollout": {"num_repeat": 3, "max_model_len": 256, "max_response_length_in_one_turn": 20},
    }
    with pytest.warns(UserWarning, match="only this process can resume"):
        result = astuner.tune(
            solve,
            judge=lambda task, response: sum(map(ord, response)) % 7 / 7,
            tasks=rows,
            validation=rows[:2],
            model="tiny-calculator",
            settings=settings,
        )
    assert repr(result) == f"solve: {result.verdict['text']}"
    html = result._repr_html_()
    assert html is not None
    for text in ("Success before", "Best checkpoint", "step-000002", "val/success", "<svg", "Run folder"):
        assert text in html
    plot = result.plot()._repr_html_()
    assert plot is not None
    assert "<svg" in plot
    assert "<table" not in plot
    (newest,) = result.episodes("split=train", limit=1)
    assert len(repr(newest)) < 100
    shown = newest._repr_html_()
    assert shown is not None
    assert f"advantage of default 0</th><td>{newest.credit[0].advantage:+.4g}" in shown
    assert len(result.episodes(limit=-1)) == 16  # 2 steps of 2 x 3, and 2 validations of 2
    pytest.importorskip("pandas")
    frame = result.to_pandas()
    assert [*frame.index] == [0, 1, 2]
    assert math.isnan(frame.loc[0, "reward/mean"])
    assert frame.loc[2, "reward/mean"] == pytest.approx(result.metrics["reward/mean"])
    assert frame.loc[2, "val/success"] == result.metrics["val/success"]
