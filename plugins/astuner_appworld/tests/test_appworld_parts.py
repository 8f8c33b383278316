"""The parts that need no AppWorld: reading actions, looking at code, rewards, options, folders."""

from __future__ import annotations

import ast
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner import Evaluation, WorkflowOutput
from astuner.contracts.errors import JudgeFailed
from astuner.testing import check_judge, workflow_task
from astuner_appworld.judge import AppWorldJudge, AppWorldJudgeConfig, rewards_of
from astuner_appworld.synthetic.__main__ import FAMILIES, PEOPLE, SPLITS, task_id
from astuner_appworld.world import roots
from astuner_appworld.world.environment import NoCode, code_of, shortened
from astuner_appworld.world.session import CODE_FORMATS, Options
from astuner_appworld.world.shell import objection
from tests.table import table

# ---------------------------------------------------------------- actions


@table(
    ("said", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("``` Python\nx = 1\n```", "x = 1\n"),
        ("thinking\n```python\nx = 1\n```\nand\n```python\ny = 2\n```", "x = 1\n"),
        ("```json\n{}\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\n\n```\n```python\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
    ],
)
def test_the_first_block_is_the_code(said, code):
    assert code_of({"role": "assistant", "content": said}) == code


@table("said", ["", "x = 1", "```json\n{}\n```", "`x = 1`", "```python```", "```python\n```", None, 7, []])
def test_without_a_block_there_is_no_code(said):
    with pytest.raises(NoCode, match="No code was found"):
        code_of({"role": "assistant", "content": said})


def test_the_other_formats():
    two = {"content": "```python\nx = 1\n```\nthen\n```py\ny = 2\n```"}
    assert code_of(two, "all_blocks") == "x = 1\n\ny = 2\n"
    assert code_of({"content": "x = 1"}, "raw") == "x = 1"
    with pytest.raises(NoCode):
        code_of({"content": "```json\n{}\n```"}, "raw")


def _call(name="execute", arguments='{"code": "x = 1"}'):
    return {"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}


def test_tool_calls_are_code():
    assert code_of({"content": "", "tool_calls": [_call()]}) == "x = 1"
    assert code_of({"content": "", "tool_calls": [_call("appworld", {"code": "y = 2"}), _call()]}) == "y = 2\nx = 1"


@table(
    ("call", "why"),
    [
        (_call("browse"), "no tool named 'browse'"),
        (_call(arguments="{"), "not JSON"),
        (_call(arguments="[" * 100_000), "not JSON"),
        (_call(arguments="[]"), "has no code"),
        (_call(arguments='{"code": 7}'), "has no code"),
        (_call(arguments='{"code": " "}'), "has no code"),
        ("nonsense", "no tool named 'None'"),
        ({"function": None}, "no tool named 'None'"),
    ],
)
def test_a_tool_call_that_makes_no_sense_is_told_so(call, why):
    with pytest.raises(NoCode, match=why):
        code_of({"content": "```python\nx = 1\n```", "tool_calls": [call]})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
)


@pytest.mark.slow
@given(st.fixed_dictionaries({"content": _JSON, "tool_calls": _JSON}), st.sampled_from(CODE_FORMATS))
def test_whatever_a_model_says_is_code_or_not(action, code_format):
    with contextlib.suppress(NoCode):
        assert code_of(action, code_format).strip()


# ------------------------------------------------------------------ guard


@table(
    "code",
    [
        "import os",
        "import os.path as p",
        "from pathlib import Path",
        "from appworld.task import Task",
        "from . import x",
        "import importlib",
        "__import__('os')",
        "f = __import__",
        "().__class__.__base__.__subclasses__()",
        "x = print.__globals__",
        "getattr(x, '__class__')",
        "getattr(x, name)",
        "setattr(x, a + b, 1)",
        "getattr(x)",
        "eval('1')",
        "exec(code)",
        "open('f')",
        "o = open",
        "requester.get('/')",
        "apis._requester",
        "'{0.__class__}'.format(x)",
        "f'{x.__class__}'",
        "globals()['x']",
        "e.__traceback__.tb_frame",
        "g.gi_frame.f_back",
        "from operator import attrgetter",
        "get_ipython().system('ls')",
        "def f():\n    class A:\n        def g(self):\n            return self.__dict__",
        "lambda: breakpoint()",
        "@eval\ndef f(): pass",
    ],
)
def test_what_no_solution_needs_is_refused(code):
    ast.parse(code)
    said = objection(code)
    assert said is not None
    assert said.startswith("This code was not run: ")


@table(
    "code",
    [
        "import json, re, math\nfrom collections import Counter\nfrom datetime import datetime, timedelta",
        "class Note:\n    def __init__(self, x):\n        self.x = x\n    def __repr__(self):\n        return 'Note'",
        "print(type(x).__name__)",
        "getattr(x, 'title', None)",
        "hasattr(x, 'title')",
        "text = 'a __ b, my_name__x and **bold**'",
        "apis.spotify.show_song(song_id=3)['title']",
        "try:\n    1 / 0\nexcept Exception as e:\n    print(e)",
        "x = (",
        "%run x",
        "",
    ],
)
def test_plain_code_is_not(code):
    assert objection(code) is None


@given(st.text())
def test_looking_at_text_never_raises(text):
    said = objection(text)
    assert said is None or said.startswith("This code was not run: ")


# ------------------------------------------------------------------ judge


def _tests(fail=0, keep=0, unlabelled=0):
    labels = ["no_op_fail"] * fail + ["no_op_pass"] * keep + [None] * unlabelled
    return [{"requirement": f"{label} {i}", "label": label} for i, label in enumerate(labels)]


def _evaluation(passes, failures):
    number = len(passes) + len(failures)
    return Evaluation(
        score=len(passes) / number,
        success=not failures,
        details={"passes": passes, "failures": failures, "num_tests": number, "task_completed": True},
    )


@pytest.mark.parametrize(
    ("passes", "failures", "expected"),
    [
        (_tests(fail=2, keep=1), [], (1.0, 1.0, 1.0)),
        (_tests(keep=1), _tests(fail=2), (0.0, 1 / 3, 0.0)),
        (_tests(fail=1, keep=1), _tests(fail=1), (0.0, 2 / 3, 1 / 2)),
        (_tests(fail=2), _tests(keep=1), (0.0, 2 / 3, 1 / 2)),
        ([], _tests(fail=2, keep=1), (0.0, 0.0, 0.0)),
        (_tests(keep=2), [], (1.0, 1.0, 1.0)),
        (_tests(unlabelled=1), _tests(unlabelled=1), (0.0, 1 / 2, 1 / 2)),
    ],
    ids=["solved", "nothing done", "half done", "solved with damage", "damage only", "nothing to do", "no labels"],
)
def test_the_reward_modes(passes, failures, expected):
    evaluation = _evaluation(passes, failures)
    for mode, reward in zip(("success", "pass_fraction", "no_op_adjusted"), expected, strict=True):
        judge = AppWorldJudge(AppWorldJudgeConfig(reward=mode))
        verdict = check_judge(judge, workflow_task(), WorkflowOutput(evaluation=evaluation))
        assert verdict.reward == pytest.approx(reward)
        assert verdict.is_success is (expected[0] == 1.0)
        assert verdict.metrics["task_completed"] == 1.0


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5))
def test_a_reward_is_a_share_and_one_means_success(done, kept, undone, broken):
    passes, failures = _tests(fail=done, keep=kept), _tests(fail=undone, keep=broken)
    if not passes and not failures:
        return
    rewards = rewards_of(_evaluation(passes, failures))
    assert all(0 <= reward <= 1 for reward in rewards.values())
    assert rewards["success"] <= min(rewards["pass_fraction"], rewards["no_op_adjusted"])
    if done == 0 and undone:
        assert rewards["no_op_adjusted"] == 0
    if failures:
        assert max(rewards.values()) < 1


@table("evaluation", [None, Evaluation(score=1.0)])
def test_without_appworlds_evaluation_there_is_no_verdict(evaluation):
    with pytest.raises(JudgeFailed, match="needs an evaluation by AppWorld"):
        AppWorldJudge().judge(workflow_task(), WorkflowOutput(evaluation=evaluation))


# ---------------------------------------------------- options, texts, folders


def test_options_are_checked():
    assert Options.of({}) == Options()
    assert Options.of({"timeout": 5, "code_format": "raw", "check_code": False, "seed": 0}).timeout == 5
    for wrong in ({"timeout": 0}, {"timeout": 121}, {"timeout": True}, {"max_output": "9"}, {"check_code": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options.of(wrong)
    with pytest.raises(ValueError, match="code_format must be one of"):
        Options.of({"code_format": "xml"})


@given(st.text(max_size=300), st.integers(1, 100))
def test_shortened_output_keeps_both_ends(text, limit):
    text = text.rstrip()
    short = shortened(text, limit)
    if len(text) <= limit:
        assert short == text
    else:
        assert f"[... {len(text) - limit} characters left out ...]" in short
        assert short.startswith(text[: limit * 2 // 3])
        assert len(short) < limit + 60


def test_a_world_sees_no_ground_truth(tmp_path):
    root = tmp_path / "root"
    task = root / "data" / "tasks" / "t_1"
    (task / "ground_truth").mkdir(parents=True)
    (task / "dbs").mkdir()
    (task / "specs.json").write_text("{}")
    for name in ("base_dbs", "api_docs", "datasets"):
        (root / "data" / name).mkdir()
    (root / "data" / "datasets" / "train.txt").write_text("t_1\n\n")
    assert roots.data_root({"APPWORLD_ROOT": str(root)}) == root
    assert roots.task_ids(root, "train") == ["t_1"]
    instance = tmp_path / "instance"
    instance.mkdir()
    own = roots.make_world_root(root, "t_1", instance)
    assert sorted(path.name for path in (own / "data" / "tasks" / "t_1").iterdir()) == ["dbs", "specs.json"]
    assert sorted(path.name for path in (own / "data").iterdir()) == ["api_docs", "base_dbs", "tasks"]
    evaluation = roots.make_evaluation_root(root, instance)
    assert (evaluation / "data" / "tasks" / "t_1" / "ground_truth").is_dir()
    with pytest.raises(ValueError, match=r"'\.\./t_1'"):
        roots.task_folder(root, "../t_1")
    with pytest.raises(roots.NoData, match="memory"):
        roots.make_world_root(root, "t_1", tmp_path / "my_memory")


def test_a_root_that_cannot_be_is_said(tmp_path):
    with pytest.raises(roots.NoData, match="APPWORLD_ROOT is not set"):
        roots.data_root({})
    with pytest.raises(roots.NoData, match="has no AppWorld data"):
        roots.data_root({"APPWORLD_ROOT": str(tmp_path)})


def test_the_synthetic_tasks_are_told_apart():
    ids = [task_id(family, person) for family in FAMILIES for person in PEOPLE]
    assert len(set(ids)) == len(ids) == 24
    assert sum(len(people) for people in SPLITS.values()) == len(PEOPLE)
    assert (
        len({json.dumps([family.instruction(p), family.answer(p), p.number]) for family in FAMILIES for p in PEOPLE})
        == 24
    )
