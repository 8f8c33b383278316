"""``astuner run --with feedback --backbone local``, as a person types it: users talk, rate, and a model is trained."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from astuner.support import processes
from astuner_http.client import JsonClient

ROOT = Path(__file__).parents[3]
EXPERIMENT = ROOT / "examples" / "feedback" / "feedback.yaml"
STEPS, BATCH = 2, 4
PATIENCE = 240.0


def users(access: dict[str, Any], given: dict[str, float]) -> None:
    """Ask twice in each conversation, and rate it.

    :param given: first question -> rating, filled in.
    """
    rating = JsonClient(access["feedback_url"].removesuffix("/feedback"), api_key=access["api_key"], timeout=60.0)
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=access["base_url"], api_key=access["api_key"], max_retries=20, http_client=http
    ) as client:
        for number in range(STEPS * BATCH):
            question = f"Each of {number} bags holds 8 stars. How many?"
            messages: list[Any] = [{"role": "user", "content": question}]
            for _ in range(2):
                completion = client.chat.completions.create(model="any", messages=messages)
                messages += [completion.choices[0].message.model_dump(exclude_none=True)]
                messages += [{"role": "user", "content": "Sure?"}]
            given[question] = float(number % 2)
            rating.post("/feedback", {"msg_ids": [completion.id], "reward": given[question]})


def test_ratings_of_users_train_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTUNER_HOME", str(tmp_path / "home"))
    settings = [
        f"astuner.trainer_common.total_steps={STEPS}",
        f"astuner.data.train_batch_size={BATCH}",
        f"astuner.experiment_dir={tmp_path / 'runs'}",
    ]
    command = [sys.executable, "-m", "astuner", "run", str(EXPERIMENT), "--with", "feedback", "--backbone", "local"]
    log = tmp_path / "run.log"
    given: dict[str, float] = {}
    with log.open("wb") as out:
        run = subprocess.Popen(
            [*command, *settings], cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
        try:
            folder, deadline = tmp_path / "home" / "feedback", time.monotonic() + PATIENCE
            while not (files := list(folder.glob("*.json"))):
                assert run.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
            access = json.loads(files[0].read_text())
            talking = threading.Thread(target=users, args=(access, given), daemon=True)
            talking.start()
            assert run.wait(PATIENCE) == 0, log.read_text()
            talking.join(PATIENCE)
        finally:
            run.kill()
            run.wait()
    said = log.read_text()
    assert access["api_key"] not in said
    assert str(files[0]) in said
    assert not list(folder.iterdir())
    assert processes.recorded_processes() == []
    assert re.search(r"Trained tokens .*\(100 %\)", said), said
    (episodes,) = tmp_path.glob("runs/*/episodes")
    rows = [json.loads(line) for file in sorted(episodes.glob("step_*")) for line in file.read_text().splitlines()]
    asked = {row["turns"][0]["new_messages"][-1]["content"]: row["reward"] for row in rows}
    assert len(given) == STEPS * BATCH
    assert asked == given
    for row in rows:
        assert [turn["continues"] for turn in row["turns"]] == [None, 0]
    assert {turn["policy_version"] for row in rows for turn in row["turns"]} == {0, 1}
