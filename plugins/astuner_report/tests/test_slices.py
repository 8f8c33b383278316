"""Success by a field of the tasks, tasks won and lost, the next command, and alarms that have ended."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("pyarrow")

from astuner import RunDir, run
from astuner.cli import main
from astuner.contracts.errors import ConfigError
from astuner.contracts.types import Split, Task
from astuner.contracts.validation import TaskResult
from astuner.support.json_lines import append_jsonl, read_jsonl, write_jsonl
from astuner_record.episode_log import EpisodeLogWriter
from astuner_report.run_report import origin, write_report
from astuner_report.run_report.facts import gather
from astuner_report.run_report.next_step import next_step
from astuner_report.run_report.sampling import sampling_note
from astuner_report.sentinel import Sentinel
from astuner_report.sentinel.settings import Sentinel as Watched
from astuner_report.slices import choose_slices, slice_metrics
from tests.table import table

from .test_compare import astuner, episode
from .test_run_report import a_run, trained, validated

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "math_agent"

# ------------------------------------------------------------------------------------------------- the choice of fields


def tasks(n: int = 40, **fields: Any) -> list[dict[str, Any]]:
    """Return metadata of ``n`` tasks; a field is a list of values that repeat, or one value for all tasks."""
    return [
        {name: v[i % len(v)] if isinstance(v, list) else v for name, v in fields.items()} | {"question": f"q{i}"}
        for i in range(n)
    ]


@table(
    ("fields", "chosen"),
    [
        ({"layout": ["a", "b"]}, {"layout": {"a": "a", "b": "b"}}),
        ({"digits": [10, 9]}, {"digits": {"9": "9", "10": "10"}}),  # in the order of numbers
        ({"hard": [True, False]}, {"hard": {"false": "false", "true": "true"}}),
        ({"layout": "a"}, {}),  # constant
        ({"answer": ["a", "b"], "label": ["a", "b"], "split": ["a", "b"]}, {}),
        ({"name": [f"n{i}" for i in range(9)]}, {}),  # more than eight values
        ({"layout": ["a"] * 39 + ["b"]}, {}),  # one task of forty has "b"
        ({"layout": ["a", "b", None, None, None]}, {}),  # most tasks have none
        ({"score": [0.5, 1.5]}, {}),
        ({"text": ["x" * 41, "y"]}, {}),
        ({"layout": ["a", "b"], "layout_id": [1, 2]}, {"layout": {"a": "a", "b": "b"}}),  # the same tasks
        ({"sign": ["+", "-", "*"]}, {"sign": {"*": "_", "+": "_-2", "-": "-"}}),
        ({f"f{i}": [0] * (i + 1) + [1] * 8 for i in range(6)}, {f"f{i}": {"0": "0", "1": "1"} for i in range(4)}),
    ],
)
def test_fields_with_few_values_are_chosen(fields: dict[str, Any], chosen: Mapping[str, Any]) -> None:
    assert choose_slices(None, tasks(**fields), []) == chosen


def test_a_field_has_to_vary_within_each_split() -> None:
    train, validation = tasks(source="train", layout=["a", "b"]), tasks(source="test", layout=["a", "b"])
    assert list(choose_slices(None, train, validation)) == ["layout"]
    assert choose_slices([], train, validation) == {}


def test_configured_fields_may_be_nested_and_a_wrong_one_is_named() -> None:
    metadata = [{"info": {"layout": "a"}, "n": i} for i in range(31)]
    assert choose_slices(["info.layout"], metadata, []) == {"info.layout": {"a": "a"}}
    with pytest.raises(ConfigError) as e:
        choose_slices(["info.layuot", "colour", "n"], metadata, [])
    text = str(e.value)
    assert "no task has a value for 'info.layuot'; did you mean info.layout?" in text
    assert "no task has a value for 'colour'. Available fields: info.layout, n" in text
    assert "n has 31 values, and at most 30 are possible" in text


def test_config_check_names_the_place_of_an_unknown_field(capsys: pytest.CaptureFixture[str]) -> None:
    file = EXAMPLE / "math_agent.yaml"
    assert astuner("config", "check", file, "--backbone", "local", "astuner.report.slices=[layout]") == 1
    text = "command line: astuner.report.slices: no task has a value for 'layout'. Available fields: answer"
    assert text in "".join(capsys.readouterr())


def test_the_metrics_are_means_over_episodes_in_training_and_over_tasks_in_validation() -> None:
    slices = {"layout": {"a": "a", "b/c": "b_c", "d": "d"}}

    def attempts(split: Split) -> list[Any]:
        rewards = {"a": [1.0, 0.0, None], "b/c": [1.0, 1.0, 1.0], "": [0.0]}
        return [
            episode(f"g{layout}", i, Task(task_id="t", metadata={"layout": layout}), reward, split, 1)
            for layout, of in rewards.items() for i, reward in enumerate(of)
        ]  # fmt: skip

    assert slice_metrics(slices, Split.TRAIN, attempts(Split.TRAIN)) == {
        "slice/layout/a/success": 0.5, "slice/layout/a/reward": 0.5, "slice/layout/a/episodes": 2.0,
        "slice/layout/b_c/success": 1.0, "slice/layout/b_c/reward": 1.0, "slice/layout/b_c/episodes": 3.0,
    }  # fmt: skip
    validation = slice_metrics(slices, Split.VALIDATION, attempts(Split.VALIDATION))
    assert validation["val/slice/layout/a/success"] == 0.5
    assert validation["val/slice/layout/b_c/tasks"] == 1.0
    assert slice_metrics({}, Split.TRAIN, attempts(Split.TRAIN)) == {}


# ----------------------------------------------------------------------------------------------------------- the report


def recorded(run_dir: RunDir, step: int, results: Mapping[str, Sequence[bool]]) -> None:
    """Write a validation into the episode log: layout -> success of its tasks."""
    log = EpisodeLogWriter(run_dir.episodes)
    flat = [(layout, ok) for layout, oks in results.items() for ok in oks]
    for i, (layout, ok) in enumerate(flat):
        task = Task(task_id=f"t{i}", main_query=f"q{i}", metadata={"layout": layout})
        log.episode(step, episode(f"v{step:06d}-{i:05d}", 0, task, float(ok), Split.VALIDATION, 2))
    log.close()
    run_dir.write_task_results(step, {f"t{i}": TaskResult(int(ok), 1, 0, float(ok)) for i, (_, ok) in enumerate(flat)})


BEFORE = {"a": [i < 4 for i in range(57)], "b": [True] * 23}
AFTER = {"a": [i < 34 for i in range(57)], "b": [i < 17 for i in range(23)]}


def fallen(folder: Path) -> RunDir:
    """Return a run in which success rises from 27 to 51 of 80, and falls from 23 to 17 of 23 in layout b."""
    run_dir = a_run(folder, rows=[validated(0, 27 / 80, 80), trained(1), trained(2), validated(2, 51 / 80, 80)])
    recorded(run_dir, 0, BEFORE)
    recorded(run_dir, 2, AFTER)
    return run_dir


def test_a_slice_that_fell_while_success_rose_is_a_finding(tmp_path: Path) -> None:
    run_dir = fallen(tmp_path)
    facts = write_report(run_dir)
    a, b = facts["slices"]
    assert (a["field"], a["value"], a["tasks"], a["fell"]) == ("layout", "a", 57, False)
    assert (b["first"]["solved"], b["last"]["solved"], b["fell"]) == (23, 17, True)
    assert b["p_fell"] == pytest.approx(2 / 2**6)  # one-sided, two slices
    assert b["first"]["low"] < 1.0 == b["first"]["high"]
    finding = "layout=b fell from 23/23 to 17/23 (p = 0.031, corrected for 2 slices)"
    assert facts["verdict"]["text"].startswith("Learned: +30 points")
    assert facts["verdict"]["text"].endswith(f"; {finding}")
    page = run_dir.report_md.read_text()
    assert "> ! layout=b fell from 23/23 to 17/23" in page
    assert "| layout=b | 23 | 100.0 % | 86 % to 100 % | 73.9 % | 54 % to 87 % | -26.1 (fell, p = 0.031) |" in page
    assert "## Success by field" in page


def test_slices_that_cannot_be_significant_are_no_further_tests(tmp_path: Path) -> None:
    """Tarone's correction: a slice in which one task changed has p >= 0.5, whatever happens."""
    run_dir = fallen(tmp_path)
    few = {name: [True, False, False] for name in "cdefg"}
    recorded(run_dir, 0, BEFORE | few)
    recorded(run_dir, 2, AFTER | {name: [False] * 3 for name in "cdefg"})
    by_value = {row["value"]: row for row in gather(run_dir)["slices"]}
    assert by_value["b"]["p_fell"] == pytest.approx(2 / 2**6)
    assert not by_value["c"]["fell"]


def test_a_slice_that_fell_with_all_others_is_no_finding_of_its_own(tmp_path: Path) -> None:
    run_dir = fallen(tmp_path)
    recorded(run_dir, 0, AFTER)
    recorded(run_dir, 2, {"a": [False] * 57, "b": [False] * 23})
    facts = gather(run_dir)
    assert not any(row["fell"] for row in facts["slices"])


def test_tasks_won_and_lost_lead_to_both_transcripts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = fallen(tmp_path)
    facts = write_report(run_dir)
    (pair,) = facts["won_and_lost"]
    assert (pair["from"], pair["to"], pair["won"], pair["lost"]) == (0, 2, 30, 6)
    assert len(pair["won_tasks"]) == 20
    assert [task["task_id"] for task in pair["lost_tasks"]] == [f"t{i}" for i in range(74, 80)]
    first = pair["lost_tasks"][0]
    view = f"astuner view {run_dir.path} --episode v000002-00074-0 --episode v000000-00074-0"
    assert (first["episodes_a"], first["episodes_b"]) == (["v000000-00074-0"], ["v000002-00074-0"])
    assert first["command"] == view
    assert pair["command"] == f"astuner diff {run_dir.path} {run_dir.path} --step-a 0 --step-b 2"
    lost, won, *_ = facts["informative_episodes"]
    assert (lost["episode"], lost["command"]) == ("v000002-00074-0", view)
    assert lost["reason"] == "validation task t74 was lost: success 100 % at step 0, 0 % at step 2"
    assert "t4 was won" in won["reason"]
    assert f"`{view}`" in run_dir.report_md.read_text()
    assert astuner("report", run_dir.path) == 0
    out = capsys.readouterr().out
    assert "layout=b  100.0 % to 73.9 %  (23 tasks)  FELL" in out
    assert "30 won, 6 lost from step 0 to 2" in out
    assert view in out
    assert astuner("diff", run_dir.path, run_dir.path, "--step-a", 0, "--step-b", 2) == 0
    assert view in capsys.readouterr().out


def test_frequent_failures_are_read_before_large_advantages(tmp_path: Path) -> None:
    run_dir = fallen(tmp_path)
    log = EpisodeLogWriter(run_dir.episodes)
    for i in range(3):
        log.episode(1, episode("g0000001", i, Task(task_id="t"), None, Split.TRAIN, 2))
        error = {"episode_id": f"g0000001-{i}", "stop_reason": "judge_failed", "error": "no verdict\nTraceback"}
        append_jsonl(run_dir.failures, {"step": 1, **error})
    log.close()
    last = gather(run_dir)["informative_episodes"][2]
    assert last["episode"] == "g0000001-2"
    assert last["reason"] == "judge_failed is the most frequent failure (3 episodes): no verdict Traceback"


def test_without_an_episode_log_the_report_has_none_of_it(tmp_path: Path) -> None:
    facts = write_report(a_run(tmp_path))
    assert (facts["slices"], facts["won_and_lost"], facts["informative_episodes"]) == ([], [], [])


# -------------------------------------------------------------------------------------------------------- sampling note


@table(
    ("rollout", "training", "expected"),
    [
        ({}, 0.078, "with temperature 1 (exploration), validation with temperature 0 (greedy)"),
        ({"val_kwargs": {"temperature": 1.0}}, 0.078, ""),
        ({}, 0.55, ""),  # closer than 10 points
        (
            {"top_p": 0.9, "val_kwargs": {"temperature": 1.0, "top_p": 0.5}},
            0.078,
            "with top_p 0.9 (exploration), validation with top_p 0.5",
        ),
    ],
)
def test_other_sampling_explains_other_success(rollout: dict[str, Any], training: float, expected: str) -> None:
    note = sampling_note(rollout, training, 0.613)
    assert bool(note) == bool(expected)
    assert note.endswith(expected)
    if note:
        assert note.startswith("Training success 7.8 % and validation success 61.3 % cannot be compared")


# --------------------------------------------------------------------------------------------------------------- alarms


def test_an_alarm_whose_condition_has_ended_is_a_past_one(tmp_path: Path) -> None:
    equal = {"adv/reward_min": 0.5, "adv/reward_max": 0.5, "adv/zero_frac": 1.0, "success/mean": 0.0}
    differing = equal | {"adv/reward_max": 1.0, "adv/zero_frac": 0.5}

    def alarms(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        run_dir = a_run(tmp_path, rows=rows)
        sentinel = Sentinel(Watched(), ())
        for row in rows:
            for alarm in sentinel.see(row["step"], {k: v for k, v in row.items() if k not in ("step", "time")}):
                append_jsonl(run_dir.alarms, alarm.as_dict())
        facts = write_report(run_dir)
        page = run_dir.report_md.read_text()
        assert ("### Past alarms" in page) == any(not alarm["current"] for alarm in facts["alarms"])
        return list(facts["alarms"])

    episodes = {"rollout/episodes": 64.0}
    early = [trained(step, **(equal if step <= 8 else differing), **episodes) for step in range(1, 13)]
    (past,) = alarms(early)
    assert (past["rule"], past["first_step"], past["last_step"], past["current"]) == ("zero_variance", 5, 8, False)
    (current,) = alarms(early[:8])
    assert (current["first_step"], current["last_step"], current["current"]) == (5, 8, True)


# -------------------------------------------------------------------------------------------------------- the next step


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The math agent with the field `operation` in its tasks, after two steps with two validations."""
    folder = tmp_path_factory.mktemp("math agent")  # a path that has to be quoted
    for name in ("math_agent.yaml", "workflow.py"):
        (folder / name).write_text((EXAMPLE / name).read_text())
    (folder / "data").mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        rows = read_jsonl(EXAMPLE / "data" / name)[:100]
        tagged = [{**row, "operation": next(sign for sign in "*+-/" if sign in row["answer"])} for row in rows]
        write_jsonl(folder / "data" / name, tagged)
    common = ("total_steps=2", "test_freq=2", "save_freq=1", "resume_freq=2", "logger=[]")
    settings = [f"astuner.trainer_common.{text}" for text in common]
    settings += ["astuner.data.train_batch_size=2", "astuner.data.max_validation_tasks=8"]
    settings += [f"astuner.experiment_dir={folder}", "astuner.experiment_name=run", "astuner.report.slices=[operation]"]
    run(folder / "math_agent.yaml", settings, backbone="local")
    return folder


def test_a_real_run_has_slices_in_its_rows_its_report_and_its_summary(experiment: Path) -> None:
    run_dir = RunDir(experiment / "run")
    rows = run_dir.read_metrics()
    first = next(row for row in rows if "val/success" in row)
    step = next(row for row in rows if "reward/mean" in row)
    counts = [value for name, value in first.items() if name.startswith("val/slice/operation/") and "tasks" in name]
    assert sum(counts) == 8
    assert sum(value for name, value in step.items() if name.endswith("/episodes") and "slice" in name) == 8
    summary = json.loads(run_dir.summary.read_text())
    assert {row["field"] for row in summary["report"]["slices"]} == {"operation"}
    assert len(summary["informative_episodes"]) == 3
    assert summary["next"] == summary["report"]["next"]
    assert summary["next"]["command"].startswith("astuner ")
    assert "## Success by field" in run_dir.report_md.read_text()


VERDICTS = {
    "learned": "astuner promote",
    "got worse": "astuner eval",
    "may be chance": "--steps 4 --resume",
    "nothing was learned": "--steps 4 --resume",
    "not measured": "--checkpoint base",
    "nothing was trained": "astuner view",
    "one answer for all": "astuner view",
    "reward rose": "astuner view",
}


def command_for(run_dir: RunDir, word: str, written: Sequence[str] = ()) -> str:
    settings = yaml.safe_load(run_dir.resolved.read_text())["astuner"]
    facts = gather(run_dir) | {"verdict": {"word": word}}
    facts["held_out"]["before"]["success"] = -1.0  # so the best checkpoint is better than the start
    chosen = next_step(facts, run_dir, settings, written)
    assert chosen is not None
    return chosen["command"]


def test_the_next_command_follows_from_the_verdict(tmp_path: Path) -> None:
    run_dir = fallen(tmp_path)
    words = ["astuner", "-p", "no:check", "run", "x y.yaml", "a.b=[1, 2]", "--run-dir", "/r", "--backbone", "local"]
    origin.begin(run_dir, command=words, config_file=tmp_path / "x", plan={}, energy="")
    run_dir.checkpoint(2).mkdir()
    run_dir.write_json(run_dir.summary, {})
    commands = {word: command_for(run_dir, word) for word in VERDICTS}
    assert [word for word, text in VERDICTS.items() if text not in commands[word].replace("-p no:check ", "")] == []
    same = "'x y.yaml' 'a.b=[1, 2]' --run-dir /r --backbone local"
    assert commands["learned"] == f"astuner -p no:check promote {same} --checkpoint best"
    run_dir.resolved.write_text(yaml.safe_dump({"astuner": {"trainer_common": {"total_epochs": 1.5}}}))
    longer = command_for(run_dir, "may be chance", ["astuner.trainer_common.total_epochs"])
    assert longer.endswith(f"{same} astuner.trainer_common.total_epochs=3 --steps 4 --resume")


@pytest.mark.slow
def test_the_next_command_works_as_it_is_printed(
    experiment: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(experiment)
    run_dir = RunDir(experiment / "run")
    for word in ("learned", "got worse", "not measured", "may be chance"):
        with pytest.raises(SystemExit) as ended:
            main(shlex.split(command_for(run_dir, word))[1:])
        out = capfd.readouterr().out
        assert ended.value.code in (0, None, 4), out  # 4: the candidate is not better
    steps = [row for row in run_dir.read_metrics() if "reward/mean" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert all(any(name.startswith("slice/operation/") for name in row) for row in steps)  # also after the resume
    assert out.rstrip().rpartition("\n")[2].startswith("Next  ")


@pytest.mark.slow
def test_the_viewer_opens_what_the_summary_names(experiment: Path) -> None:
    for named in gather(RunDir(experiment / "run"))["informative_episodes"]:
        words = [*shlex.split(named["command"])[1:], "--port", "0", "--no-browser", "--json"]
        with subprocess.Popen([sys.executable, "-m", "astuner", *words], stdout=subprocess.PIPE, text=True) as viewer:
            assert viewer.stdout is not None
            text = "".join(iter(viewer.stdout.readline, "}\n"))
            viewer.terminate()
        assert named["episode"] in json.loads(text + "}")["url"]


def test_a_run_that_was_stopped_is_resumed_next(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    origin.begin(run_dir, command=["astuner", "run", "x y.yaml"], config_file=tmp_path / "x", plan={}, energy="")
    origin.end(run_dir, RuntimeError("stop"))
    assert gather(run_dir)["next"] is None
    (run_dir.resume / "step-000001").mkdir()
    assert gather(run_dir)["next"] == {"command": "astuner run 'x y.yaml' --resume", "why": "resume the run"}
