"""`astuner diff`: statistics against published examples, what is paired, and what a person is told."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from hypothesis import given
from hypothesis import strategies as st

from astuner.cli import main
from astuner.contracts.errors import ConfigError, DataError
from astuner.contracts.types import (
    Episode,
    FinishReason,
    Generation,
    JudgeOutput,
    Split,
    StopReason,
    Task,
    Turn,
    WorkflowOutput,
    WorkflowTask,
)
from astuner_record.episode_log import EpisodeLogWriter
from astuner_record.statistics import (
    Interval,
    PairedTable,
    bootstrap_interval,
    cohens_kappa,
    crossed_bootstrap_interval,
    mcnemar_exact,
    paired_success_interval,
    sign_flip_test,
)
from astuner_report.compare import compare, measure
from tests.table import table

# ------------------------------------------------------------------------------------------------------ statistics

CAVO = PairedTable(both=59, only_a=16, only_b=6, neither=80)
"""Complete response before and after consolidation therapy (Cavo et al. 2012), as in Fagerland, Lydersen and Laake."""


def test_mcnemar_is_that_of_the_published_example() -> None:
    assert mcnemar_exact(CAVO) == pytest.approx(0.052479, abs=5e-7)
    assert mcnemar_exact(PairedTable(5, 0, 0, 5)) == 1.0
    assert mcnemar_exact(PairedTable(0, 0, 10, 0)) == 2 / 1024


@table(
    ("table", "low", "high"),
    [
        (CAVO, -0.1186, -0.0046),  # Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables, ch. 8
        (PairedTable(both=36, only_a=2, only_b=12, neither=0), 0.0569, 0.3404),  # Newcombe 1998, method 10
    ],
)
def test_the_interval_of_paired_success_is_newcombes(table: PairedTable, low: float, high: float) -> None:
    found = paired_success_interval(table)
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@given(st.tuples(*[st.integers(0, 40)] * 4).filter(any))
def test_the_interval_of_paired_success_is_sane_everywhere(counts: tuple[int, int, int, int]) -> None:
    table = PairedTable(*counts)
    found, delta = paired_success_interval(table), (table.only_b - table.only_a) / table.n
    assert -1 - 1e-9 <= found.low <= delta + 1e-9
    assert delta - 1e-9 <= found.high <= 1 + 1e-9
    turned = paired_success_interval(PairedTable(table.both, table.only_b, table.only_a, table.neither))
    assert (turned.low, turned.high) == (pytest.approx(-found.high), pytest.approx(-found.low))


def test_the_permutation_test_is_fishers_with_darwins_plants() -> None:
    darwin = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]  # The Design of Experiments, section 21
    assert sign_flip_test(darwin) == 1726 / 32768
    assert sign_flip_test([*darwin, 0, 0]) == 1726 / 32768  # what does not differ has no sign
    assert sign_flip_test([0.0, 0.0]) == 1.0


def test_random_signs_come_close_to_all_signs() -> None:
    some = [0.3, -0.2, 0.5, 0.1, 0.4, -0.1, 0.2, 0.6, -0.3, 0.2, 0.1, 0.3, 0.2, -0.4, 0.5, 0.1]
    exact = sign_flip_test(some)
    drawn = sign_flip_test([*some, 1e-12])  # one more than are tried exactly
    assert drawn == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 10_000))
    assert drawn == sign_flip_test([*some, 1e-12])  # the same for the same seed
    assert sign_flip_test([1.0] * 40) == 1 / 10_001  # never 0


def test_the_bootstrap_is_that_of_the_normal_theory_where_that_holds() -> None:
    values = [((i * 37) % 101) / 50 - 1 for i in range(101)]  # uniform, so the mean is as good as normal
    sd = math.sqrt(sum((v - sum(values) / 101) ** 2 for v in values) / 101)
    found, half = bootstrap_interval(values), 1.96 * sd / math.sqrt(101)
    middle = sum(values) / 101
    assert (found.low, found.high) == (
        pytest.approx(middle - half, abs=0.05 * half),
        pytest.approx(middle + half, abs=0.05 * half),
    )
    assert found == bootstrap_interval(values)
    assert found != bootstrap_interval(values, seed=1)


@pytest.mark.slow
def test_several_runs_widen_the_interval_by_how_much_they_differ() -> None:
    tasks = [float(i % 2) for i in range(60)]
    apart = [[t + shift for t in tasks] for shift in (-0.3, 0.0, 0.3)]
    alike = [list(tasks) for _ in range(3)]
    wide = crossed_bootstrap_interval(apart, alike)
    assert crossed_bootstrap_interval(alike, alike) == Interval(0.0, 0.0)  # pairs stay together: tasks cancel
    sd_of_the_mean = math.sqrt((0.3**2 + 0.3**2) / 3 / 3)
    assert wide.high - wide.low == pytest.approx(2 * 1.96 * sd_of_the_mean, rel=0.1)


def test_it_does_not_matter_how_many_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [((i * 37) % 101) / 50 - 1 for i in range(30)]
    whole = bootstrap_interval(some, draws=200), sign_flip_test(some, draws=200)
    monkeypatch.setattr("astuner_record.statistics._AT_ONCE", 100)
    assert (bootstrap_interval(some, draws=200), sign_flip_test(some, draws=200)) == whole


def test_kappa_is_that_of_a_worked_example() -> None:
    assert cohens_kappa(PairedTable(20, 5, 10, 15)) == pytest.approx(0.4)  # p_o 0.7, p_e 0.5
    assert cohens_kappa(PairedTable(7, 0, 0, 0)) is None
    assert cohens_kappa(PairedTable(5, 0, 0, 5)) == 1.0


# ------------------------------------------------------------------------------------------------------------ runs

Outcome = tuple[str, Sequence[float | None]]
"""A task's query, and the rewards of its episodes; None: not scored."""


def episode(group: str, attempt: int, task: Task, reward: float | None, split: Split, tokens: int) -> Episode:
    said = Generation(
        prompt_ids=[1, 2],
        response_ids=[3] * tokens,
        logprobs=[-0.5] * tokens,
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )
    return Episode(
        workflow_task=WorkflowTask(
            task=task, episode_id=f"{group}-{attempt}", group_id=group, split=split, attempt=attempt
        ),
        turns=(Turn(index=0, agent="default", generation=said, continues=None),),
        output=WorkflowOutput(),
        verdict=None if reward is None else JudgeOutput(reward=reward),
        reward_source="" if reward is None else "judge",
        stop_reason=StopReason.JUDGE_FAILED if reward is None else StopReason.COMPLETED,
    )


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    def make(
        name: str,
        outcomes: Sequence[Outcome],
        *,
        step: int = 10,
        split: Split = Split.VALIDATION,
        ids: str = "heldout.jsonl",
        lr: float = 0.1,
        tokens: int = 4,
        judge: str | None = "math_answer",
        temperature: float = 0.0,
        answers: Sequence[str] = (),
        **more: Any,
    ) -> Path:
        run = tmp_path / name
        run.mkdir(exist_ok=True)
        common = {"experiment_name": name, "trainer_common": {"optim": {"lr": lr}}}
        measured = {"task_judge": {"judge": judge}, "rollout": {"val_kwargs": {"temperature": temperature}}}
        settings = {"astuner": {**common, **measured, **more}}
        (run / "resolved.yaml").write_text(json.dumps({"resolved": {"file": "x.yaml"}, **settings}))
        log = EpisodeLogWriter(run / "episodes")
        for i, (query, rewards) in enumerate(outcomes):
            known = {"id": name, "answer": answers[i]} if answers else {}
            task = Task(task_id=f"{ids}:{i}", main_query=query, metadata=known)
            for attempt, reward in enumerate(rewards):
                log.episode(step, episode(f"{split.value[0]}{step}-{i}", attempt, task, reward, split, tokens))
        log.close()
        return run

    return make


def astuner(*arguments: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in arguments])
    return int(e.value.code or 0)


BEFORE = [("q0", [1.0]), ("q1", [0.0]), ("q2", [0.0]), ("q3", [1.0]), ("q4", [0.0]), ("q5", [0.0])]
AFTER = [("q0", [1.0]), ("q1", [1.0]), ("q2", [1.0]), ("q3", [0.0]), ("q4", [1.0]), ("q5", [0.0])]


def test_two_runs_with_a_known_difference(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run("a", BEFORE, tokens=4), make_run("b", AFTER, tokens=6, lr=0.2)
    assert astuner("diff", a, b, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["table"] == {"both": 1, "only_a": 1, "only_b": 3, "neither": 1}
    success = said["measures"]["success"]
    assert (success["a"], success["b"]) == (pytest.approx(2 / 6), pytest.approx(4 / 6))
    assert success["p_value"] == 0.625  # 2 (1 + 4) / 16
    assert success["test"] == "McNemar's exact test"
    tokens = said["measures"]["response tokens"]
    assert (tokens["difference"], tokens["ci_low"], tokens["ci_high"], tokens["p_value"]) == (2.0, 2.0, 2.0, None)
    assert [flip["task_id"] for flip in said["won"]] == ["heldout.jsonl:1", "heldout.jsonl:2", "heldout.jsonl:4"]
    (lost,) = said["lost"]
    assert (lost["episodes_a"], lost["episodes_b"]) == (["v10-3-0"], ["v10-3-0"])
    assert said["settings"] == [{"key": "astuner.trainer_common.optim.lr", "a": [0.1], "b": [0.2]}]


@table(
    "before, after, by",
    [
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.5, 0.6, 0.7, 0.8, 0.9, 0.95], "reward"),
        ([1, 2, 3, 4, 5, 1], [2, 3, 4, 5, 5, 2], "reward"),
        ([-3, -2, -1, -3, -2, -1], [-1, -1, -1, -1, -1, -1], "reward"),
        ([0, 0, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1], "success"),
        ([-1, -1, 1, -1, -1, -1], [-1, 1, 1, 1, 1, 1], "success"),
    ],
)
def test_the_measure_that_tells_two_runs_apart_is_named(
    make_run: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    before: list[float],
    after: list[float],
    by: str,
) -> None:
    runs = [
        make_run(f"{name}{before}", [(f"q{n}", [float(r)]) for n, r in enumerate(rewards)])
        for name, rewards in (("a", before), ("b", after))
    ]
    assert astuner("diff", *runs, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["measure"], bool(said["reason"])) == (by, by == "reward")
    assert astuner("diff", *runs) == 0
    assert ("Compare the rewards" in capsys.readouterr().out) == (by == "reward")


def test_other_judges_are_said_first_and_what_they_gave_is_not_tested(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    strict, lenient = [(f"q{i}", [0.0]) for i in range(40)], [(f"q{i}", [1.0]) for i in range(40)]
    a, b = make_run("a", strict), make_run("b", lenient, judge="llm_judge", lr=0.2)
    assert astuner("diff", a, b) == 0
    first, text = (out := capsys.readouterr().out).splitlines()[0], out
    assert first.startswith("MEASURED DIFFERENTLY (judge): success and reward of A and B cannot be compared")
    assert "judge: astuner.task_judge.judge: math_answer | llm_judge" in text.splitlines()[1]
    assert text.count("not tested: the judges differ") == 2
    assert "McNemar" not in text.replace("Newcombe", "")
    assert "40 tasks won (solved by B, not by A), each by its own judge" in text
    found = compare([a], [b])
    assert found["yardsticks"] == [
        {"about": "judge", "key": "astuner.task_judge.judge", "a": ("math_answer",), "b": ("llm_judge",)}
    ]
    comparable = {name: m["comparable"] for name, m in found["measures"].items()}
    assert (comparable["success"], comparable["reward"], comparable["response tokens"]) == (False, False, True)
    assert found["measures"]["success"]["p_value"] is None


def test_other_sampling_keeps_the_test_and_says_what_else_differs(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run("a", BEFORE), make_run("b", AFTER, temperature=1.0)
    assert astuner("diff", a, b) == 0
    out = capsys.readouterr().out
    assert out.startswith("MEASURED DIFFERENTLY (sampling): ")
    assert "0.62 (McNemar's exact test; measured differently, see above)" in out
    assert not any(m["comparable"] for m in compare([a], [b])["measures"].values())


def test_what_is_no_yardstick_is_not_called_one(make_run: Callable[..., Path]) -> None:
    """Another learning rate, an older run without a key, a helper that does not judge, ids of the rows."""
    answers = list("abcdef")
    a = make_run("a", BEFORE, answers=answers, helper_models={"writer": {"model": "x"}})
    b = make_run("b", AFTER, answers=answers, lr=0.2, helper_models={"writer": {"model": "y"}}, data={"max": 1})
    found = compare([a], [b])
    assert (found["yardsticks"], found["measures"]["success"]["p_value"]) == ([], 0.625)
    assert all(m["comparable"] for m in found["measures"].values())


def test_other_reference_answers_of_the_same_questions_are_another_judge(make_run: Callable[..., Path]) -> None:
    a, b = make_run("a", BEFORE, answers=list("abcdef")), make_run("b", AFTER, answers=list("abcdxy"))
    (found,) = compare([a], [b])["yardsticks"]
    assert (found["about"], found["key"][:26]) == ("judge", "metadata of 2 tasks, refer")


def test_without_a_judge_the_workflow_is_one(make_run: Callable[..., Path]) -> None:
    a, b = (make_run(n, BEFORE, judge=None, rollout={"workflow": f"{n}.py->W"}) for n in "ab")
    (found,) = compare([a], [b])["yardsticks"]
    assert (found["about"], found["key"]) == ("judge", "astuner.rollout.workflow")


def test_what_a_person_reads(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = make_run("a", BEFORE), make_run("b", AFTER, lr=0.2)
    assert astuner("diff", a, b) == 0
    text = capsys.readouterr().out
    assert text.index("astuner.trainer_common.optim.lr: 0.1 | 0.2") < text.index("6 tasks are in all runs")
    assert "33.3 %    66.7 %   +33.3 %" in text
    assert "0.62 (McNemar's exact test)" in text
    assert "3 tasks won (solved by B, not by A)" in text
    assert "Tasks solved: both 1, only A 1, only B 3, neither 1" in text


def test_repeats_are_means_over_a_task_and_tested_by_permutation(make_run: Callable[..., Path]) -> None:
    a = make_run("a", [("q0", [0.0, 1.0]), ("q1", [0.0, 0.0])])
    b = make_run("b", [("q0", [1.0, 1.0, 1.0]), ("q1", [0.0, 0.0, 1.0])])  # other numbers of repeats are fine
    found = compare([a], [b])
    assert found["table"] is None
    success = found["measures"]["success"]
    assert (success["a"], success["b"]) == (0.25, pytest.approx(2 / 3))
    assert success["test"] == "permutation test of signs"
    assert success["p_value"] == 0.5  # of the four ways to sign two differences, two are as far from 0
    assert [flip["task_id"] for flip in found["won"]] == ["heldout.jsonl:0"]


def test_two_validations_of_one_run(make_run: Callable[..., Path]) -> None:
    run = make_run("a", BEFORE, step=0)
    make_run("a", AFTER, step=20)
    found = compare([run], [run], step_a=0)
    assert (found["a"][0]["step"], found["b"][0]["step"]) == (0, 20)  # the newest is the default
    assert found["settings"] == []
    with pytest.raises(ConfigError, match="--step-a N --step-b M"):
        compare([run], [run])
    with pytest.raises(DataError, match=r"validation episodes of step 5\. Available steps: 0, 20"):
        compare([run], [run], step_a=5)


def test_different_task_sets_are_compared_only_when_asked(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run("a", BEFORE), make_run("b", AFTER[:4])
    assert astuner("diff", a, b) == 1
    said = capsys.readouterr().err
    assert "(a has 6, b has 4, 4 in common)" in said
    assert "--common" in said
    assert astuner("diff", a, b, "--common") == 0
    said = capsys.readouterr().out
    assert "4 tasks are in all runs and are compared" in said
    assert "2 tasks left out: only in A, e.g. heldout.jsonl:4" in said


def test_an_id_that_asks_something_else_is_another_task(make_run: Callable[..., Path]) -> None:
    a, b = make_run("a", BEFORE), make_run("b", [("another", [1.0]), *AFTER[1:]])
    with pytest.raises(DataError, match=r"1 tasks have the same ID but different text, e\.g\. heldout\.jsonl:0"):
        compare([a], [b])
    found = compare([a], [b], common=True)
    assert found["tasks"]["paired"] == 5
    assert found["tasks"]["changed"] == ["heldout.jsonl:0"]


def test_tasks_of_a_renamed_file_are_paired_by_text(make_run: Callable[..., Path]) -> None:
    a, b = make_run("a", BEFORE), make_run("b", AFTER[::-1], ids="moved.jsonl")
    with pytest.raises(DataError, match="--by text"):
        compare([a], [b])
    found = compare([a], [b], by="text")
    assert found["table"] == vars(PairedTable(1, 1, 3, 1))


def test_a_task_without_a_verdict_is_left_out_and_said(
    make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run("a", BEFORE), make_run("b", [("q0", [None]), *AFTER[1:]])
    assert astuner("diff", a, b) == 0
    said = capsys.readouterr().out
    assert "5 tasks are in all runs and are compared" in said
    assert "1 tasks left out: not scored in at least one run, e.g. heldout.jsonl:0 (judge_failed in b)" in said


@pytest.mark.slow
def test_several_seeds_are_a_pattern(make_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    a = make_run("base-seed0", BEFORE)
    make_run("base-seed1", BEFORE[::-1][::-1])
    make_run("new-seed0", AFTER)
    make_run("new-seed1", BEFORE)
    assert astuner("diff", a.parent / "base-seed*", a.parent / "new-seed*", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    success = said["measures"]["success"]
    assert (len(said["a"]), len(said["b"])) == (2, 2)
    assert (success["a"], success["b"]) == (pytest.approx(2 / 6), pytest.approx(3 / 6))
    assert success["ci_by"] == "bootstrap over runs and tasks"
    assert success["p_value"] is None
    one = compare([a], [a.parent / "new-seed0"])["measures"]["reward"]["ci_high"]
    assert success["ci_low"] < 0 < success["ci_high"]
    assert success["ci_high"] <= one + 0.35
    assert said["won"][0]["episodes_b"] == ["new-seed0/v10-1-0", "new-seed1/v10-1-0"]


def test_training_is_compared_too(make_run: Callable[..., Path]) -> None:
    a, b = make_run("a", BEFORE, split=Split.TRAIN), make_run("b", AFTER, split=Split.TRAIN)
    with pytest.raises(DataError, match="but train episodes: add --split train"):
        compare([a], [b])
    assert compare([a], [b], split=Split.TRAIN)["table"] == vars(PairedTable(1, 1, 3, 1))
    assert measure(a, split=Split.TRAIN).step is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["a", "nothing"], "RUN_B: nothing is not a run folder and matches none. Available: a"),
        (["a", "empty"], "not a run folder"),
        (["a", "without"], "has no episode log"),
        (["a", "a", "--step-a", "10", "--step-b", "10"], "is on both sides"),
    ],
)
def test_what_cannot_be_compared_says_why(
    make_run: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    a = make_run("a", BEFORE)
    monkeypatch.chdir(a.parent)
    Path("empty").mkdir()
    Path("without").mkdir()
    Path("without/resolved.yaml").write_text("astuner: {}")
    assert astuner("diff", *arguments) in (1, 2)
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_the_order_of_tasks_does_not_matter(make_run: Callable[..., Path]) -> None:
    def numbers(found: Any) -> list[tuple[float, float]]:
        return [(m["a"], m["b"]) for m in found["measures"].values()]

    a = make_run("a", BEFORE)
    straight, turned = make_run("b", AFTER), make_run("c", AFTER[::-1], ids="heldout.jsonl")
    assert numbers(compare([a], [straight])) == numbers(compare([a], [turned], by="text"))
