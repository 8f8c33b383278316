"""The episode log of real runs of the local backbone: killed in the middle of a rollout, and continued."""

from __future__ import annotations

import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from astuner.contracts.errors import DataError
from astuner_record.episode_log import EpisodeLog, tokenizer_file
from astuner_record.episode_log.store import DATABASE

from .conftest import EXAMPLE
from .test_run import start, wait_for_step

Overrides = Callable[..., list[str]]
PER_STEP = 16
SLOW = f"""
import asyncio
import runpy

class Slow(runpy.run_path({str(EXAMPLE.with_name("workflow.py"))!r})["MathAgentWorkflow"]):
    async def execute(self, workflow_task, model_tuner):
        await asyncio.sleep(0.3)
        return await super().execute(workflow_task, model_tuner)
"""
"""With two at once, a rollout lasts some times as long as an episode may wait for its batch."""


def wait_for_episodes_beyond(run: Path, step: int) -> None:
    """Look at the log while it is written, until a rollout of a later step is under way."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with EpisodeLog(run) as log:
                if log.count([f"step>{step}", "split=train"]) % PER_STEP:
                    return
        except DataError:  # nothing was written yet
            pass
    pytest.fail(f"no rollout after step {step} was caught in the middle")


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_in_a_rollout_goes_on_with_a_whole_log(short: Overrides, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (tmp_path / "slow.py").write_text(SLOW)
    settings = (
        f"astuner.rollout.workflow={tmp_path / 'slow.py'}->Slow",
        "astuner.rollout.max_env_worker=2",
        "astuner.trainer_common.val_before_train=false",
        "astuner.data.max_validation_tasks=4",
    )
    process = start(short(*settings, "astuner.trainer_common.total_steps=40"))
    wait_for_step(run, 1, process)
    wait_for_episodes_beyond(run, 1)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (state,) = (run / "resume").glob("step-*")
    saved = int(state.name.removeprefix("step-"))
    with EpisodeLog(run) as log:
        assert log.problems == ()
        for step in range(1, saved + 1):
            of_step = log.list([f"step={step}", "split=train"])
            assert len(of_step) == PER_STEP, "what weights were saved of is in the log"
            assert all(log.read(found).credit for found in of_step)
    process = start(short(*settings, f"astuner.trainer_common.total_steps={saved + 2}"), "--resume")
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output

    with closing(sqlite3.connect(run / "episodes" / DATABASE)) as db:
        written = [name for (name,) in db.execute("SELECT episode_id FROM data")]
    assert len(written) == len(set(written)), "each episode once, also in the database itself"
    with EpisodeLog(run) as log:
        assert log.problems == ()
        assert log.count() == len(written)
        known = 0
        for step in range(1, saved + 3):
            of_step = [log.read(found) for found in log.list([f"step={step}", "split=train"])]
            assert len(of_step) == PER_STEP
            for one in of_step:
                assert one.credit[0].step == step
                for sample, credited in zip(one.samples(), one.credit, strict=True):
                    assert (credited.trainer_logprobs is None) == (sample.advantage == 0), "only what has a gradient"
                    if credited.trainer_logprobs is not None:
                        recorded = np.asarray(sample.logprobs)[np.flatnonzero(sample.loss_mask)]
                        np.testing.assert_allclose(credited.trainer_logprobs, recorded, atol=1e-3)
                        known += len(recorded)
        assert known, "some groups had different rewards"
        tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file(run / "episodes", "default")))
        for one in (log.read(found).episode for found in log.list(limit=20)):
            assert one.workflow_task.task.main_query in tokenizer.decode(one.turns[0].generation.prompt_ids)
            said = tokenizer.decode(one.turns[-1].generation.response_ids)
            assert str(one.turns[-1].message["content"] or "").strip() in said
