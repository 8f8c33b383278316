"""The report of a run: what it says is what the files say, and whatever they hold, it stays a page of text."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from astuner import RunDir
from astuner.builtin.console import JsonlSink
from astuner.cli import main
from astuner.contracts.errors import DataError, Interrupted, RunError
from astuner.runs.launch import Plan, finish, told_if_cut_short
from astuner.runs.run import RunWriter
from astuner.support.json_lines import append_jsonl, write_jsonl
from astuner_record.statistics import PairedTable, mcnemar_exact
from astuner_report.curve import Curve, draw_reward_curve, reward_curve_svg
from astuner_report.rendering import escaped
from astuner_report.run_report import POLICY, origin, write_report
from astuner_report.run_report.energy import EnergyMeter
from astuner_report.run_report.facts import gather
from astuner_report.sentinel import Sentinel
from astuner_report.sentinel.settings import Sentinel as Watched
from astuner_testing.fakes import fake_config
from tests.table import table

SETTINGS: dict[str, Any] = {
    "astuner": {
        "seed": 7,
        "backbone": "local",
        "model": {"path": "tiny-calculator", "lora": {"rank": 0}},
        "rollout": {"workflow": "flow.py->Flow", "num_repeat": 4, "temperature": 1.0},
        "data": {"train_batch_size": 8},
        "task_reader": {"type": "jsonl", "jsonl": {"training": {"file_path": "train.jsonl"}}},
        "task_judge": {"judge": "math_answer"},
        "trainer_common": {"algorithm": {"loss": "grpo"}, "optim": {"lr": 0.001}, "sentinel": {"enabled": True}},
    }
}
HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></style><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "[click](javascript:alert(1)) ![x](https://example.invalid/x.png) <https://example.invalid>",
    "| a | b |\n|---|---|\n# heading\n```\nfence",
    "&lt;b&gt; &#60;script&#62; \u202egnp.exe \x00\x1b[31m \ud800",
    "]]><!-- --> {{7*7}} ${7*7} `rm -rf`",
)


def validated(step: int, success: float, tasks: int = 20) -> dict[str, Any]:
    ci = {"val/success_ci_low": max(0.0, success - 0.2), "val/success_ci_high": min(1.0, success + 0.2)}
    counts = {"val/tasks": float(tasks), "val/unscored_tasks": 0.0, "val/failed_episodes": 0.0}
    return {"step": step, "time": 0.0, "val/success": success, "val/reward/mean": success, **ci, **counts}


def trained(step: int, **more: float) -> dict[str, Any]:
    numbers = {"reward/mean": step / 100, "tokens/generated": 100.0, "tokens/trainable": 90.0, "tokens/trained": 80.0}
    times = {"time/rollout": 2.0, "time/train": 1.0, "time/step": 3.0, "time/save": 0.5}
    return {"step": step, "time": float(step), **numbers, **times, **more}


def a_run(folder: Path, *, settings: dict[str, Any] | None = None, rows: list[dict[str, Any]] | None = None) -> RunDir:
    run_dir = RunDir(folder / "run")
    run_dir.start()
    run_dir.resolved.write_text(yaml.safe_dump(settings or SETTINGS))
    if rows is None:
        rows = [validated(0, 0.25), *map(trained, range(1, 21)), validated(20, 0.75) | {"time/validation": 4.0}]
    write_jsonl(run_dir.metrics, rows)
    return run_dir


def validation_file(run_dir: RunDir, step: int, outcomes: Sequence[Sequence[bool | None]]) -> None:
    """:param outcomes: task -> attempts; None where one failed."""
    rows = [
        {"group_id": f"v{step:06d}-{i:05d}", "task_id": f"t{i}", "reward": None if ok is None else float(ok),
         "is_success": ok}
        for i, attempts in enumerate(outcomes) for ok in attempts
    ]  # fmt: skip
    write_jsonl(run_dir.episodes / f"validation_{step:06d}.jsonl", rows)


class Page(HTMLParser):
    """What a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_report_is_written_through_no_link(tmp_path: Path) -> None:
    """Somebody else's run folder may hold links of the names that are written, to files of the person's."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    run_dir = a_run(tmp_path)
    for name in ("report.html", "report.md", "reward_curve.svg", "reward_curve.png"):
        for link in (run_dir.path / name, run_dir.path / f".{name}.{os.getpid()}.tmp"):
            link.symlink_to(precious)
    write_report(run_dir)
    draw_reward_curve(run_dir.read_metrics(), run_dir.curve)
    assert precious.read_text() == "mine"
    assert "report" in run_dir.report_html.read_text()


def test_settings_that_multiply_are_refused(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    run_dir.resolved.write_text("a: &a [x, x]\nastuner: {seed: *a}\n")
    with pytest.raises(DataError, match="aliases"):
        gather(run_dir)


# ------------------------------------------------------------------------------------------------- before and after


def test_before_and_after_are_paired_by_task_where_the_episodes_are_there(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    validation_file(run_dir, 0, [[i < 5] for i in range(20)])
    validation_file(run_dir, 20, [[i < 4 or i >= 9] for i in range(20)])  # 1 became wrong, 11 became right
    found = gather(run_dir)["held_out"]
    difference = found["difference"]
    assert difference["test"] == "McNemar's exact test, paired by task"
    assert difference["p"] == mcnemar_exact(PairedTable(both=4, only_a=1, only_b=11, neither=4))
    assert (difference["mean"], difference["significant"]) == (0.5, True)
    assert difference["changed"] == {"became right": 11, "became wrong": 1}
    assert difference["low"] < 0.5 < difference["high"]
    write_report(run_dir)
    text = run_dir.report_md.read_text()
    assert "+50.0 percentage points" in text
    assert "better, beyond chance" in text


def test_several_attempts_at_a_task_are_one_task(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    validation_file(run_dir, 0, [[False, True, None]] * 12 + [[None, None]])
    validation_file(run_dir, 20, [[True, True, False]] * 12 + [[True, True]])
    difference = gather(run_dir)["held_out"]["difference"]
    assert difference["test"].startswith("sign-flip permutation test")
    assert difference["tasks"] == 12  # the last one was scored on one side only
    assert difference["mean"] == pytest.approx(2 / 3 - 1 / 2)
    assert difference["p"] == 2 / 2**12


def test_without_episodes_two_proportions_are_compared_and_said_so(tmp_path: Path) -> None:
    difference = gather(a_run(tmp_path))["held_out"]["difference"]
    assert difference["test"].startswith("two-proportion z-test")
    assert difference["p"] == pytest.approx(0.0015654, rel=1e-4)  # z = 0.5 / sqrt(0.5 * 0.5 / 10)


def test_a_difference_that_may_be_chance_is_called_that(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, rows=[validated(0, 0.5), trained(1), validated(1, 0.55)])
    write_report(run_dir)
    assert "within chance" in run_dir.report_md.read_text()
    again = a_run(tmp_path, rows=[validated(0, 0.9), trained(1), validated(1, 0.1)])
    write_report(again)
    assert "worse, beyond chance" in again.report_md.read_text()


@table("rows", [[], [trained(1)], [validated(0, 0.5)], [trained(1), validated(1, 0.5)]])
def test_whatever_there_is_makes_a_report(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    run_dir = a_run(tmp_path, rows=rows)
    facts = write_report(run_dir)
    assert "difference" not in (facts["held_out"] or {})
    assert Page(run_dir.report_html.read_text()).tags.count("h2") == 8
    ElementTree.parse(run_dir.curve_svg)


def test_the_verdict_is_one_line_that_says_whether_anything_was_trained_and_learned(tmp_path: Path) -> None:
    nothing = {"nothing_learnable": 1.0, "tokens/trained": 0.0, "optimizer_steps": 0.0, "adv/zero_group_frac": 1.0}
    half = nothing | {"adv/reward_min": 0.5, "adv/reward_max": 0.5}
    solved = half | {"success/mean": 1.0}
    lost = {"nothing_learnable": 0.0, "optimizer_steps": 0.0, "skipped_steps": 2.0}
    flat = [trained(step, **{"reward/mean": 0.3}) for step in range(1, 9)]
    ends = [validated(0, 0.25, 100), trained(1)]
    wrong = []
    for rows, expected in [
        (
            [*ends, validated(1, 0.75, 100)],
            "Learned: +50 points, p < 0.001 (validation success 25.0 % to 75.0 %, 100 tasks)",
        ),
        ([*ends, validated(1, 0.05, 100)], "Got worse: -20 points, p < 0.001"),
        ([*ends, validated(1, 0.28, 100)], "Inconclusive: +3.0 points, p = 0.63"),
        ([*ends, validated(1, 0.25, 100)], "No change: +0.0 points, p = 1"),
        ([validated(0, 0.5, 2), trained(1), validated(1, 1.0, 2)], "Inconclusive: +50 points, p = 0.25"),
        ([validated(0, 0.5, 2), trained(1), validated(1, 1.0, 2)], "use 64 or more held-out tasks"),
        ([trained(1, **half), trained(2, **half)], "Not trained: every group had equal rewards (all are 0.5)"),
        ([*ends[:1], trained(1, **half), validated(1, 0.75, 100)], "Not trained: every group had equal"),
        ([trained(1, **nothing)], "Not trained: every group had equal rewards. Read a few episodes in episodes/"),
        ([trained(1, **solved)], "Not trained: every attempt succeeded. Use harder tasks"),
        ([trained(1, **lost)], "Not trained: every update was left out"),
        ([], "Not trained: no training step finished"),
        (flat, "Not measured: no held-out tasks; the training reward did not change beyond chance"),
        ([trained(s) for s in range(1, 9)], "the training reward rose (0.025 to 0.065, p < 0.001)"),
        ([trained(1), validated(1, 0.5)], "Not measured: no validation before training. Set"),
        (ends, "Not measured: no validation after training"),
    ]:
        run_dir = a_run(tmp_path, rows=rows)
        said = write_report(run_dir)["verdict"]["text"]
        page = run_dir.report_md.read_text()
        ticks = [line for line in page.splitlines() if line.startswith("> ✓") and "The run" in line]
        if expected not in said or (ticks and "Not trained" in said):
            wrong.append((expected, said, ticks))
    assert not wrong


def test_a_run_that_a_limit_kept_from_learning_is_told_so(tmp_path: Path) -> None:
    limits = {"nothing_learnable": 1.0, "adv/zero_group_frac": 1.0, "limits/rollout.multi_turn.max_steps": 0.5}
    run_dir = a_run(tmp_path, rows=[trained(1, **limits)])
    for alarm in Sentinel(Watched(), ()).see(1, trained(1, **limits)):
        append_jsonl(run_dir.alarms, alarm.as_dict())
    text = gather(run_dir)["verdict"]["text"]
    assert text.startswith("Not trained: every group had equal rewards. 50 % of the model calls or episodes end at a")
    assert "(astuner.rollout.multi_turn.max_steps)" in text
    assert text.endswith("raise that limit first")


def test_what_was_updated_is_told_of_the_updates_and_not_of_the_samples(tmp_path: Path) -> None:
    nothing = {"nothing_learnable": 1.0, "tokens/trained": 0.0, "optimizer_steps": 0.0}
    rows = [trained(1, optimizer_steps=2.0, nothing_learnable=0.0), trained(2, **nothing)]
    found = gather(a_run(tmp_path, rows=rows))["updated"]
    assert {name: found[name] for name in ("tokens", "optimizer_steps", "steps", "of", "why")} == {
        "tokens": 80.0, "optimizer_steps": 2.0, "steps": 1, "of": 2, "why": "",
    }  # fmt: skip
    several = {"policy/a/nothing_learnable": 1.0, "policy/b/nothing_learnable": 0.0, "policy/b/optimizer_steps": 3.0}
    found = gather(a_run(tmp_path, rows=[trained(1, **several)]))["updated"]
    assert (found["optimizer_steps"], found["steps"]) == (3.0, 1)


# ------------------------------------------------------------------------------------------------------ what it says


def test_cost_is_the_sum_of_the_rows(tmp_path: Path) -> None:
    cost = gather(a_run(tmp_path))["cost"]
    assert cost["tokens"] == {"generated": 2000.0, "trainable": 1800.0, "trained": 1600.0}
    assert cost["seconds"] == {"whole": 74.0, "rollout": 40.0, "train": 20.0, "validation": 4.0, "save": 10.0}
    assert cost["energy"] is None
    two = [trained(1, **{"policy/a/tokens/trained": 5.0, "policy/b/tokens/trained": 7.0})]
    del two[0]["tokens/trained"]
    assert gather(a_run(tmp_path, rows=two))["cost"]["tokens"]["trained"] == 12.0


def test_energy_is_measured_or_estimated_from_what_a_person_said_or_unknown(tmp_path: Path) -> None:
    def energy(**watts: float) -> str:
        common = SETTINGS["astuner"]["trainer_common"] | watts
        run_dir = a_run(tmp_path, settings={"astuner": SETTINGS["astuner"] | {"trainer_common": common}})
        write_report(run_dir)
        return next(line for line in run_dir.report_md.read_text().splitlines() if line.startswith("| Energy"))

    assert "unknown" in energy()
    assert "0.00206 kWh, estimated: 100 W" in energy(watts=100.0)
    run_dir = a_run(tmp_path, rows=[trained(1, **{"energy/cpu_joules": 3.6e6, "energy/gpu_joules": 7.2e6})])
    write_report(run_dir)
    assert re.search(r"3 kWh, measured .*CPU 1 kWh, GPU 2 kWh", run_dir.report_md.read_text())


def test_failures_alarms_and_the_certificate_are_told(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    failed = [("timed_out", "too slow")] * 3 + [("judge_failed", "no verdict\nTraceback")]
    for step, (kind, error) in enumerate(failed):
        append_jsonl(run_dir.failures, {"step": step, "episode_id": "e", "stop_reason": kind, "error": error})
    append_jsonl(run_dir.failures, {"step": 1, "group_id": "g", "dropped": "1 of 4 episodes were scored"})
    alarm = {"step": 9, "time": 0, "rule": "zero_variance", "severity": "warning", "message": "m", "advice": "a"}
    append_jsonl(run_dir.alarms, alarm)
    facts = write_report(run_dir, {"completed": 99, "timed_out": 3})
    assert facts["failures"]["kinds"] == {
        "timed_out": {"episodes": 3, "errors": {"too slow": 3}},
        "judge_failed": {"episodes": 1, "errors": {"no verdict": 1}},
    }
    assert facts["failures"]["dropped_groups"] == 1
    text = run_dir.report_md.read_text()
    assert "3 x too slow" in text
    assert r"| 9 | warning | zero\_variance | m |  | a |" in text
    assert "Traceback" not in text
    assert "| completed | 99 |" in text


def test_an_alarm_is_one_line_with_how_long_it_held_and_what_that_cost(tmp_path: Path) -> None:
    equal = {"adv/reward_min": 0.5, "adv/reward_max": 0.5, "adv/zero_frac": 1.0}
    other = equal | {"adv/reward_max": 1.0}
    rows = [trained(step, **(equal if step <= 8 or step > 20 else other)) for step in range(1, 41)]
    run_dir = a_run(tmp_path, rows=rows)
    for step in (5, 25):
        entry = {"step": step, "time": 0, "rule": "zero_variance", "severity": "warning", "message": "m", "advice": "a"}
        append_jsonl(run_dir.alarms, entry)
    (alarm,) = gather(run_dir)["alarms"]
    assert (alarm["step"], alarm["held"], alarm["of"], alarm["tokens_share"]) == (5, 20, 40, 0.5)
    write_report(run_dir)
    assert "| in 20 of 40 steps, 50 % of the tokens |" in run_dir.report_md.read_text()


def test_what_follows_from_another_alarm_is_told_with_it_since_its_first_sign(tmp_path: Path) -> None:
    still = {"lr": 0.0, "rollout/episodes": 64.0, "success/mean": 0.5}
    over = [trained(step, **still, **{"limits/other": 0.5 if step > 3 else 0.0}) for step in range(1, 11)]
    run_dir = a_run(tmp_path, rows=over)
    for step, rule in ((4, "cut_off"), (5, "learning_rate"), (6, "failures_rising")):
        entry = {"step": step, "time": 0, "rule": rule, "severity": "error", "message": rule, "advice": "a"}
        append_jsonl(run_dir.alarms, entry)
    cause, other = gather(run_dir)["alarms"]
    assert (cause["rule"], cause["step"], cause["with"], cause["held"]) == ("learning_rate", 4, ["cut_off"], 7)
    assert (other["rule"], "with" in other) == ("failures_rising", False)
    write_report(run_dir)
    assert r"| 4 | error | learning\_rate | learning\_rate (consequences: cut\_off) |" in run_dir.report_md.read_text()


def test_a_run_that_nobody_watched_is_not_said_to_be_free_of_alarms(tmp_path: Path) -> None:
    common = {key: value for key, value in SETTINGS["astuner"]["trainer_common"].items() if key != "sentinel"}
    run_dir = a_run(tmp_path, settings={"astuner": SETTINGS["astuner"] | {"trainer_common": common}})
    write_report(run_dir)
    assert "disabled for this run" in run_dir.report_md.read_text()
    write_report(a_run(tmp_path))
    assert "The sentinel raised no alarms" in run_dir.report_md.read_text()


# --------------------------------------------------------------------------------------------------- what it is like


def hostile_run(folder: Path, text: str) -> RunDir:
    settings = json.loads(json.dumps(SETTINGS).replace("tiny-calculator", "HERE").replace("math_answer", "HERE"))
    settings = _put(settings, text)
    run_dir = a_run(folder, settings=settings)
    append_jsonl(run_dir.failures, {"step": 1, "episode_id": "e", "stop_reason": text, "error": text})
    alarm = {"step": 9, "rule": text, "severity": text, "message": text, "advice": text}
    append_jsonl(run_dir.alarms, alarm)
    plan = Plan(title="t", lines={"tasks": text, "workflow": text})
    origin.begin(run_dir, command=["astuner", "run", text], config_file=folder / "x.yaml", plan=plan.lines, energy=text)
    return run_dir


def _put(value: Any, text: str) -> Any:
    if isinstance(value, dict):
        return {key: _put(item, text) for key, item in value.items()}
    return text.encode("utf-8", "replace").decode() if value == "HERE" else value


@table("text", HOSTILE)
def test_text_of_a_run_stays_text(tmp_path: Path, text: str) -> None:
    if "\ud800" in text:
        text = text.replace("\x00", "")  # which no command line holds
    plain, hostile = a_run(tmp_path / "plain"), hostile_run(tmp_path / "hostile", text.replace("\ud800", ""))
    append_jsonl(hostile.failures, {"step": 1, "episode_id": "e", "stop_reason": "model_failed", "error": text})
    facts = write_report(hostile)
    json.dumps(facts, allow_nan=False).encode()
    page = Page(hostile.report_html.read_text(encoding="utf-8"))
    write_report(plain)
    known = set(Page(plain.report_html.read_text()).tags) | {"thead", "th", "pre", "code"}
    assert set(page.tags) <= known
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not [value for name, value in page.attributes if name in ("href", "src", "action", "data", "srcdoc")]
    first = text.split()[0]
    assert first in page.text  # it is there to be read
    assert "\u202e" not in page.text


@table("text", HOSTILE)
def test_markdown_has_no_markup_of_anybody_else(tmp_path: Path, text: str) -> None:
    run_dir = hostile_run(tmp_path, text.replace("\x00", "").replace("\ud800", ""))
    write_report(run_dir)
    page = run_dir.report_md.read_text(encoding="utf-8")
    assert page.count(escaped(text.split()[0])) >= 5
    picture = "![Reward per step and validation success.](reward_curve.svg)"
    outside = re.sub(r"^(`{3,})bash\n.*\n\1$|^> ", "", page.replace(picture, ""), flags=re.MULTILINE)
    assert not re.search(r"(?<!\\)[<>\[\]`]", outside)
    assert not re.search(r"(?<!\\)://", outside)
    lines = outside.splitlines()
    assert sum(line.startswith("#") for line in lines) == 9  # its own title and sections
    widths = [line.count("|") - line.count("\\|") for line in lines if line.startswith("|")]
    assert set(widths) <= {3, 4, 7}  # the columns of its own tables


@table(
    ("text", "there"),
    [
        ("plain words, 12.5 % (of 3)", "plain words, 12.5 % (of 3)"),
        ("a_b *c*", r"a\_b \*c\*"),
        ("1. first", r"1\. first"),
        ("- item", r"\- item"),
        ("-5 points", "-5 points"),
        ("two\n\nlines", "two lines"),
    ],
)
def test_markdown_escapes_what_is_needed(text: str, there: str) -> None:
    assert escaped(text) == there


def test_the_page_allows_nothing_and_needs_nothing(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    write_report(run_dir)
    text = run_dir.report_html.read_text()
    page = Page(text)
    assert ("content", POLICY) in page.attributes
    assert "default-src 'none'" in POLICY
    assert "script" not in page.tags
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import""", text)
    assert "prefers-color-scheme:dark" in text
    assert "@media print" in text


# ------------------------------------------------------------------------------------------------------- the curve


def test_the_curve_has_every_step_and_every_validation() -> None:
    rows = [validated(0, 0.25), *map(trained, range(1, 21)), validated(20, 0.75)]
    svg = ElementTree.fromstring(reward_curve_svg(rows))
    assert all(
        line.get(end)
        for line in svg.iter()
        if line.tag.endswith("line") and "points" not in line.attrib
        for end in ("y1", "y2")
    )
    names = [element.tag.rpartition("}")[2] for element in svg.iter()]
    assert names.count("polyline") == 2
    raw = next(e for e in svg.iter() if e.get("class") == "rc-raw" and e.get("points"))
    assert len((raw.get("points") or "").split()) == 20
    titles = [e.text for e in svg.iter() if e.tag.endswith("title")]
    assert titles == ["step 0: 25.0 % (5.0 % to 45.0 %)", "step 20: 75.0 % (55.0 % to 95.0 %)"]
    points = [tuple(map(float, p.split(","))) for p in (raw.get("points") or "").split()]
    assert all(a[0] < b[0] and a[1] > b[1] for a, b in itertools.pairwise(points))  # it rises


@table("rewards", [[0.0], [0.5, 0.5], [-1e6, 1e6], [1e-9, 2e-9], [3.0] * 1500])
def test_curves_of_strange_runs_are_drawn(rewards: list[float]) -> None:
    rows = [{"step": i + 1, "reward/mean": r} for i, r in enumerate(rewards)] + [{"step": 99, "reward/mean": None}]
    svg = reward_curve_svg(rows)
    ElementTree.fromstring(svg)
    assert "nan" not in svg
    assert len(svg) < 40_000
    assert Curve(rows).smoothed[-1] == pytest.approx(sum(rewards[-10:]) / len(rewards[-10:]))


# ---------------------------------------------------------------------------------------------------------- energy


def zone(folder: Path, number: str, name: str, joules: float) -> Path:
    path = folder / f"intel-rapl:{number}"
    path.mkdir(parents=True)
    (path / "name").write_text(f"{name}\n")
    (path / "max_energy_range_uj").write_text("1000000000\n")
    (path / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    return path / "energy_uj"


def test_energy_of_packages_and_memory_is_counted_also_over_a_wrap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    package, memory = zone(tmp_path, "0", "package-0", 990.0), zone(tmp_path, "0:1", "dram", 5.0)
    zone(tmp_path, "0:0", "core", 1.0)  # is in the package
    meter = EnergyMeter(tmp_path)
    package.write_text("15000000\n")  # 25 J later, over 1000
    memory.write_text("7000000\n")
    assert meter.since_last() == {"energy/cpu_joules": pytest.approx(27.0)}
    assert meter.since_last() == {"energy/cpu_joules": 0.0}
    assert str(meter) == "CPUs measured by RAPL (package-0, dram)"


def test_a_machine_that_counts_nothing_gives_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    meter = EnergyMeter(tmp_path)
    assert meter.since_last() == {}
    assert "CPUs not measured" in str(meter)


class Nvml(SimpleNamespace):
    class NVMLError(Exception):
        pass


def test_gpus_are_counted_by_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = {0: 1000, 1: 5000}
    nvml = Nvml(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: used[handle],
    )
    monkeypatch.setattr("shutil.which", lambda name: f"/{name}")
    monkeypatch.setattr("importlib.import_module", lambda name: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    meter = EnergyMeter(tmp_path)
    used.update({0: 9000, 1: 7500})
    assert meter.since_last() == {"energy/gpu_joules": pytest.approx(2.5)}

    def fails(handle: int) -> int:
        raise Nvml.NVMLError("Not Supported")

    nvml.nvmlDeviceGetTotalEnergyConsumption = fails
    refused = EnergyMeter(tmp_path)
    assert refused.since_last() == {}
    assert "GPUs not measured: Not Supported" in str(refused)


# ---------------------------------------------------------------------------------------------------------- origin


def books_of(run_dir: RunDir, folder: Path) -> RunWriter:
    return RunWriter(fake_config(folder), run_dir, [JsonlSink()], total_steps=20)


def begin(run_dir: RunDir, folder: Path, *command: str) -> None:
    plan = Plan(title="t", lines={"tasks": "8 to train on"})
    origin.begin(run_dir, command=command, config_file=folder / "x.yaml", plan=plan.lines, energy="not measured")


def test_secrets_on_the_command_line_are_not_written_down(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    judge = "task_judge.x={api_key: hunter2, url: 'https://me:hunter2@host'}"
    begin(run_dir, tmp_path, "astuner", "run", "x.yaml", "a.b.api_key=hunter2", judge, "a.lr=1e-3", "a.n=[1, 2]")
    (start,) = origin.read(run_dir, [])
    assert "hunter2" not in run_dir.origin.read_text()
    assert start["command"].startswith("astuner run x.yaml")
    assert start["command"].endswith("a.lr=1e-3 'a.n=[1, 2]'")


def test_the_commit_of_the_project_is_told(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    project = tmp_path / "project"
    project.mkdir()
    (project / "x.yaml").write_text("a: 1\n")
    for command in (
        ["init", "-q"],
        ["add", "x.yaml"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "x", "--no-gpg-sign"],
    ):
        subprocess.run(["git", "-C", str(project), *command], check=True)
    begin(run_dir, project, "astuner", "run", "x.yaml")
    (project / "x.yaml").write_text("a: 2\n")
    begin(run_dir, project, "astuner", "run", "x.yaml")
    clean, changed = (start["project"] for start in origin.read(run_dir, []))
    assert re.fullmatch(r"[0-9a-f]{40}", clean["commit"])
    assert (clean["changed"], changed["changed"]) == (False, True)
    write_report(run_dir)
    text = run_dir.report_md.read_text()
    assert clean["commit"] in text
    assert "Resumed | 1 times" in text
    assert "```bash\nastuner run x.yaml\n```" in text
    assert "python 3." in text


def test_a_run_that_is_cut_short_has_a_report_that_says_why(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    books = books_of(run_dir, tmp_path)
    ends = {"The run failed": RunError("the engine <died>"), "The run was interrupted": Interrupted("stop")}
    for word, error in ends.items():
        begin(run_dir, tmp_path, "astuner", "run", "x.yaml")
        with pytest.raises(RunError), told_if_cut_short(books):
            raise error
        text = run_dir.report_md.read_text()
        assert word in text
    assert "the engine &lt;died&gt;" not in run_dir.report_html.read_text()  # that was the start before
    assert not run_dir.summary.exists()  # so it can be continued
    said = [line.split(" ", 2)[2] for line in run_dir.log.read_text().splitlines()]
    assert said == ["the run stopped: RunError: the engine <died>", "the run stopped: Interrupted: stop"]
    run_dir.resolved.unlink()
    with pytest.raises(RunError, match="the first"), told_if_cut_short(books):
        raise RunError("the first")
    assert "Could not write the report of this run (FileNotFoundError" in run_dir.log.read_text()
    books.close()


def test_a_run_that_was_killed_is_said_to_be_unfinished_and_a_finished_one_is_in_the_summary(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    begin(run_dir, tmp_path, "astuner", "run", "x.yaml")
    assert gather(run_dir)["state"]["word"] == "unfinished"
    books = books_of(run_dir, tmp_path)
    books.ledger.counts["completed"] = 12
    result = finish(books, trains=True)
    books.close()
    summary = json.loads(run_dir.summary.read_text())
    assert summary["report"]["state"] == {"word": "ended", "why": ""}
    assert summary["report"]["failures"]["endings"] == {"completed": 12}
    assert summary["report"] == json.loads(json.dumps(gather(run_dir)))
    assert re.search(rf"(?m)^Report +{re.escape(str(run_dir.report_html))}$", result.summary())
    assert re.search(r"(?m)^Alarms +none$", result.summary())


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_the_report_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = a_run(tmp_path)

    def report(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["report", *arguments])
        return int(ended.value.code or 0)

    assert report(str(run_dir.path)) == 0
    assert capsys.readouterr().out.split() == [str(run_dir.report_html), str(run_dir.report_md)]
    before = run_dir.report_html.read_bytes()
    assert report(str(tmp_path)) == 2
    assert "is not a run folder, because resolved.yaml is missing" in capsys.readouterr().err
    assert report(str(run_dir.path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 20
    assert run_dir.report_html.read_bytes() == before
