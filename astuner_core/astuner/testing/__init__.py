"""Conformance checks and fakes for the tests of plugins and experiments.

Each ``check_*`` function uses plain asserts; the messages describe the expected behavior and the fix. Call them from
your own tests::

    from astuner.testing import check_judge, check_plugin, workflow_task

    def test_plugin():
        check_plugin("acme")

    def test_judge():
        check_judge(MyJudge(), workflow_task(answer="4"), WorkflowOutput(metadata={"final_answer": "4"}))

The package astuner-testing provides them, and ``__init__.pyi`` lists them. Each is imported on first use, without
torch, transformers or a pytest plugin.
"""

from __future__ import annotations

from astuner import public_names

_HOME, __getattr__ = public_names(__name__, __file__)

__all__ = sorted(_HOME)
