"""A weighted combination of judges: sums, success, failures, groups, and mistakes that show before anything runs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from astuner.contracts.environment import Evaluation
from astuner.contracts.errors import ConfigError, JudgeFailed, PluginError
from astuner.contracts.judge import GroupJudge
from astuner.contracts.types import JudgeOutput, WorkflowOutput
from astuner.rollout.parts import build_judge
from astuner.runs.preflight import Preflight
from astuner.testing import check_judge
from astuner_testing.fakes import fake_config, workflow_task
from tests.table import table

CODE = """
from astuner import Judge, JudgeOutput
from astuner.contracts.errors import ConfigError, JudgeFailed
from astuner.contracts.judge import GroupJudge

class Right(Judge):
    def judge(self, workflow_task, output):
        right = output.response == "4"
        return JudgeOutput(reward=float(right), is_success=right, metrics={"seen": 1.0})

class Short(Judge):
    async def judge(self, workflow_task, output):
        return JudgeOutput(reward=1 / len(output.response))

class Old:
    def __init__(self, config):
        pass
    def compute_reward(self, workflow_task, output):
        return 1.0, False

class Picky(Judge):
    def judge(self, workflow_task, output):
        if output.response == "?":
            raise JudgeFailed("unreadable")
        return JudgeOutput(reward=1.0)

class Broken(Judge):
    def judge(self, workflow_task, output):
        raise KeyError("x")

class Spent(Judge):
    def judge(self, workflow_task, output):
        raise ConfigError("the budget is spent")

class Best(GroupJudge):
    def judge_group(self, attempts):
        best = max(len(a.output.response) for a in attempts)
        return [JudgeOutput(reward=float(len(a.output.response) == best)) for a in attempts]

class BestBroken(GroupJudge):
    def judge_group(self, attempts):
        raise KeyError("x")

class Team(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput.per_agent({"a": 1.0, "b": 0.0})

class OtherTeam(Judge):
    def judge(self, workflow_task, output):
        return JudgeOutput.per_agent({"a": 1.0, "c": 0.0})

class World(Judge):
    wants_evaluation = True
    def judge(self, workflow_task, output):
        return JudgeOutput(reward=output.evaluation.score)
"""


def make(folder: Path, section: str) -> Any:
    (folder / "mine.py").write_text(CODE)
    return build_judge(fake_config(folder, f"  task_judge: {{judge: weighted, weighted: {section}}}\n"))


def of(*parts: str, rest: str = "") -> str:
    """``right=Right*2`` -> a section with that part."""
    judges = []
    for part in parts:
        label, _, what = part.partition("=")
        name, _, weight = what.partition("*")
        judges.append(f"{label}: {{judge: mine.py->{name}, weight: {weight or 1}}}")
    return f"{{judges: {{{', '.join(judges)}}}{rest}}}"


def verdict(judge: Any, response: str) -> JudgeOutput:
    return check_judge(judge, workflow_task(), WorkflowOutput(response=response))


def test_rewards_are_summed_by_weight_and_each_part_is_seen(tmp_path: Path) -> None:
    found = verdict(make(tmp_path, of("right=Right*3", "short=Short")), "four")
    assert found.reward == pytest.approx(0.25 * 0.25)
    assert found.metrics == {"right": 0.0, "short": 0.25, "right/seen": 1.0}
    assert verdict(make(tmp_path, of("right=Right*3", "short=Short")), "4").reward == pytest.approx(1.0)
    plain = make(tmp_path, of("right=Right*3", "short=Short*-1", rest=", normalise: false"))
    assert verdict(plain, "4").reward == pytest.approx(2.0)


@table(
    ("rule", "response", "success"),
    [
        ("", "4", True),
        ("", "4.0", False),
        (", success: any", "4", True),
        (", success: any", "xy", False),
        (", success: short", "x", True),
        (", success: right", "x", False),
    ],
)
def test_success_is_what_the_rule_says(tmp_path: Path, rule: str, response: str, success: bool) -> None:
    judge = make(tmp_path, of("right=Right", "short=Short", rest=rule))
    assert verdict(judge, response).is_success is success


def test_a_penalty_has_no_say_in_success_and_the_seeds_judges_can_be_parts(tmp_path: Path) -> None:
    judge = make(tmp_path, of("right=Right", "long=Old*-0.5"))
    found = verdict(judge, "4")
    assert (found.is_success, found.reward) == (True, pytest.approx(0.5 / 1.5))


@table(
    ("part", "says"), [("picky=Picky", "picky: unreadable"), ("bad=Broken", "bad: the judge mine.py->Broken raised")]
)
def test_a_part_without_a_verdict_leaves_none_at_all(tmp_path: Path, part: str, says: str) -> None:
    judge = make(tmp_path, of("right=Right", part))
    with pytest.raises(JudgeFailed, match=says):
        asyncio.run(judge.judge(workflow_task(), WorkflowOutput(response="?")))


def test_a_budget_that_is_spent_ends_the_run(tmp_path: Path) -> None:
    for others in (("right=Right",), ("best=Best",)):
        judge = make(tmp_path, of("spent=Spent", *others))
        with pytest.raises(ConfigError, match="budget is spent"):
            asyncio.run(judge.judge(workflow_task(), WorkflowOutput(response="4")))


def test_with_a_part_that_compares_attempts_the_whole_does(tmp_path: Path) -> None:
    judge = make(tmp_path, of("right=Right", "best=Best", rest=", success: right"))
    assert isinstance(judge, GroupJudge)
    outputs = [WorkflowOutput(response=text) for text in ("4", "five", "six")]
    found = check_judge(judge, workflow_task(), outputs)
    assert [(v.reward, v.is_success) for v in found if isinstance(v, JudgeOutput)] == [
        (0.5, True),
        (0.5, False),
        (0.0, False),
    ]
    assert not isinstance(make(tmp_path, of("right=Right", "short=Short")), GroupJudge)


def test_in_a_group_one_failed_verdict_drops_its_attempt_alone(tmp_path: Path) -> None:
    outputs = [WorkflowOutput(response=text) for text in ("4", "?")]
    first, second = check_judge(make(tmp_path, of("picky=Picky", "best=Best")), workflow_task(), outputs)
    assert isinstance(first, JudgeOutput)
    assert isinstance(second, JudgeFailed)
    assert str(second) == "picky: unreadable"
    broken = check_judge(make(tmp_path, of("right=Right", "best=BestBroken")), workflow_task(), outputs)
    assert ["best: the judge mine.py->BestBroken raised KeyError" in str(v) for v in broken] == [True, True]


def test_agents_rewards_are_combined_by_name_and_one_reward_counts_for_all_of_them(tmp_path: Path) -> None:
    found = verdict(make(tmp_path, of("team=Team", "right=Right")), "4")
    assert (found.rewards, found.reward) == ({"a": 1.0, "b": 0.5}, 0.75)
    different = make(tmp_path, of("team=Team", "other=OtherTeam"))
    with pytest.raises(JudgeFailed, match=r"different agents .team: a, b; other: a, c."):
        asyncio.run(different.judge(workflow_task(), WorkflowOutput(response="4")))


def test_a_part_may_want_the_environments_evaluation(tmp_path: Path) -> None:
    judge = make(tmp_path, of("world=World", "right=Right"))
    assert judge.wants_evaluation is True
    assert make(tmp_path, of("right=Right")).wants_evaluation is False
    output = WorkflowOutput(response="4", evaluation=Evaluation(score=0.5))
    assert check_judge(judge, workflow_task(), output).reward == 0.75


def test_two_parts_of_one_judge_may_have_different_options(tmp_path: Path) -> None:
    section = (
        "{judges: {strict: {judge: math_answer, config: {require_boxed: true}},"
        " loose: {judge: math_answer, config: {require_boxed: false}}}}"
    )
    task, output = workflow_task(answer="4"), WorkflowOutput(response="it is 4")
    found = asyncio.run(make(tmp_path, section).judge(task, output))
    assert (found.metrics["strict"], found.metrics["loose"]) == (0.0, 1.0)


@table(
    ("section", "says"),
    [
        ("{}", "judges"),
        ("{judges: {}}", "at least 1"),
        ("{judges: {a: {judge: mine.py->Right, wieght: 2}}}", "wieght.*did you mean"),
        ("{judges: {a: {judge: mine.py->Right, weight: 0}}}", "weights are 0"),
        ("{judges: {all: {judge: mine.py->Right}}}", "'all' is not a valid label"),
        ("{judges: {a: {judge: mine.py->Right}}, success: b}", "use all, any or one of a"),
        ("{judges: {a: {judge: mine.py->Right, weight: -1}}}", "success needs a part"),
        ("{judges: {a: {judge: nobody}}}", "unknown judge 'nobody'"),
        ("{judges: {a: {judge: mine.py->Right, config: {x: 1}}}}", "has no options"),
        (
            "{judges: {a: {judge: math_answer, config: {require_boxde: true}}}}",
            r"weighted.judges.a.config.require_boxde; did you mean require_boxed",
        ),
        ("{judges: {a: {judge: weighted}}}", "would call itself"),
        ("{judges: {a: {judge: weighted, config: {judges: {b: {judge: weighted}}}}}}", "would call itself"),
    ],
)
def test_mistakes_show_before_anything_runs(tmp_path: Path, section: str, says: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=says):
        make(tmp_path, section)


def test_combinations_can_be_parts_of_combinations(tmp_path: Path) -> None:
    inner = "{judge: weighted, config: {judges: {r: {judge: mine.py->Right}, s: {judge: mine.py->Short}}}}"
    found = verdict(make(tmp_path, f"{{judges: {{inner: {inner}, right: {{judge: mine.py->Right}}}}}}"), "4 ")
    assert found.reward == pytest.approx(0.125)
    assert found.metrics["inner/s"] == 0.5


def test_a_check_lists_every_mistake_of_the_parts_and_asks_for_no_key(tmp_path: Path) -> None:
    text = """
  rollout: {workflow: nothing.py->Flow}
  task_judge:
    judge: weighted
    weighted: {judges: {a: {judge: no_such}, b: {judge: nor_this}}}
  helper_models: {h: {base_url: "http://127.0.0.1:1/v1", model: m, api_key_env: NO_SUCH_KEY_HERE}}
"""
    found = Preflight(fake_config(tmp_path, text).path, only_look=True)
    found.parts()
    said = "; ".join(found.mistakes.told)
    assert all(word in said for word in ("nothing.py", "no_such", "nor_this"))
    assert "NO_SUCH_KEY_HERE is not set" in "".join(found.unchecked)
