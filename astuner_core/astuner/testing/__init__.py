"""Does my part fit? Conformance checks and fakes for the tests of plugins and experiments.

Each ``check_*`` is plain asserts whose messages say what is expected and what to do; call them from your own tests::

    from astuner.testing import check_judge, check_plugin, workflow_task

    def test_plugin():
        check_plugin("acme")

    def test_judge():
        check_judge(MyJudge(), workflow_task(answer="4"), WorkflowOutput(metadata={"final_answer": "4"}))

They are the package astuner-testing and stand in ``__init__.pyi``; each is imported when first touched. That imports
neither torch nor transformers, and registers nothing with pytest.
"""

from __future__ import annotations

from astuner import public_names

_HOME, __getattr__ = public_names(__name__, __file__)

__all__ = sorted(_HOME)
