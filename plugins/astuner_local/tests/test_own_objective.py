"""The loss and the estimator that the page shows, in a run."""

from __future__ import annotations

import json
from pathlib import Path

from astuner import run
from astuner.plugins.user_code import import_user_code
from astuner.testing import check_advantages, check_loss

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "math_agent" / "math_agent.yaml"
KEY = "astuner.trainer_common"


def test_the_objective_of_the_page_trains(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "backbones" / "local.md").read_text(encoding="utf-8")
    code = page.partition("<!-- own objective -->\n```python\n")[2].partition("```")[0]
    own = tmp_path / "own.py"
    own.write_text(code, encoding="utf-8")
    check_loss(import_user_code(f"{own}->soft_clip"))
    check_advantages(import_user_code(f"{own}->best_of_group"))
    run(
        EXAMPLE,
        [
            f"{KEY}.algorithm.loss={own}->soft_clip",
            f"{KEY}.algorithm.adv_estimator={own}->best_of_group",
            f"{KEY}.total_steps=1",
            f"{KEY}.val_before_train=false",
            f"{KEY}.logger=[]",
            "astuner.data.train_batch_size=2",
            "astuner.rollout.num_repeat=2",
            f"astuner.experiment_dir={tmp_path}",
            "astuner.experiment_name=run",
        ],
        backbone="local",
    )
    (row,) = [
        found
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if "nothing_learnable" in (found := json.loads(line))
    ]
    assert row["nothing_learnable"] == 0
    assert 0 < row["loss/gate"] < 0.4
    assert row["ratio/mean"] > 0
