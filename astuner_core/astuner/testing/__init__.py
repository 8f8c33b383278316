"""Does my part fit? Conformance checks and fakes for the tests of plugins and experiments.

Each ``check_*`` is plain asserts whose messages say what is expected and what to do; call them from your own tests::

    from astuner.testing import check_judge, check_plugin, workflow_task

    def test_plugin():
        check_plugin("acme")

    def test_judge():
        check_judge(MyJudge(), workflow_task(answer="4"), WorkflowOutput(metadata={"final_answer": "4"}))

Importing this module imports neither torch nor transformers, and it registers nothing with pytest.
"""

from __future__ import annotations

from astuner.testing.backbones import check_backbone
from astuner.testing.environments import check_environment
from astuner.testing.fakes import FakeBackbone, FakeEngine, fake_config, make_tokenizer, workflow_task
from astuner.testing.judges import check_judge
from astuner.testing.metrics import check_metrics
from astuner.testing.objectives import check_advantages, check_loss
from astuner.testing.output_checks import check_output_check
from astuner.testing.plugins import check_plugin
from astuner.testing.scripted import ScriptedModel
from astuner.testing.task_readers import check_task_reader
from astuner.testing.workflows import check_workflow

__all__ = [
    "FakeBackbone",
    "FakeEngine",
    "ScriptedModel",
    "check_advantages",
    "check_backbone",
    "check_environment",
    "check_judge",
    "check_loss",
    "check_metrics",
    "check_output_check",
    "check_plugin",
    "check_task_reader",
    "check_workflow",
    "fake_config",
    "make_tokenizer",
    "workflow_task",
]
