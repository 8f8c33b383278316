"""What strangers' parts are checked by holds for our own."""

import importlib.metadata

import pytest

from astuner import WorkflowOutput
from astuner.testing import check_backbone, check_judge, check_plugin, fake_config, workflow_task
from tests.table import table


@pytest.mark.slow
def test_our_own_plugins_pass_the_same_checks():
    ours = {ep.name for ep in importlib.metadata.entry_points(group="astuner") if ep.dist.name.startswith("astuner-")}
    assert ours
    for name in sorted(ours):
        check_plugin(name)


@table("name", ["local", "debug"])
def test_our_own_backbones_pass_the_same_checks(name, tmp_path):
    config = fake_config(tmp_path, overrides=["astuner.model.path=tiny-calculator", f"astuner.backbone={name}"])
    check_backbone(config.resolve("backbone", name), config)


def test_our_own_judge_passes_the_same_checks(tmp_path):
    config = fake_config(tmp_path, "  task_judge:\n    judge: math_answer\n")
    judge = config.resolve("judge", "math_answer")(config.section("judge", "math_answer"))
    output = WorkflowOutput(metadata={"final_answer": "It is \\boxed{4}."})
    assert check_judge(judge, workflow_task(answer="#### 4"), output).reward == 1.0
