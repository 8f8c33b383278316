"""Checking a judge as the command does it: found, configured and made as a run would.

Without an experiment file there is one of the least that a run needs, so that a judge's section is checked by the same
code, with the same messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from astuner.config import Config, load_config
from astuner.contracts.errors import ConfigError, DataError
from astuner.plugins.registry import is_code
from astuner_helpers.members import Member
from astuner_rubrics.card.asking import JudgeUnderTest, WatchedHelpers
from astuner_rubrics.card.card import Card, Plan, Say, check, plan_of
from astuner_rubrics.labels import Labels, Overlap, places_of_same, without_known
from astuner_rubrics.models import ONE, WHICH_MODEL, section_of
from astuner_rubrics.rubric_file import load_rubrics
from astuner_rubrics.rubrics_judge import RubricsConfig

SCOPE = "judge-check"
"""What budgets are counted for, below the current folder: not the experiment's run, which has a budget of its own."""

_WANTS_HELPER = re.compile(r"astuner\.task_judge\.(\w+)\.helper_model is required")
_REQUIRED = re.compile(r"(astuner\.[\w.]+) is required$")
_SUFFIXES = (".yaml", ".yml")
_SHOWN_PLACES = 5
_GRADES_WITH = "astuner.task_judge.rubrics.helper_model="


def run_check(
    judge: str, labels: Labels, plan: Plan, *, config: Path | None, overrides: Sequence[str], base_url: str | None,
    model: str | None, api_key_env: str | None, answer_field: str, at_once: int, say: Say,
) -> Card:  # fmt: skip
    """Make the judge, and measure it.

    :raises ConfigError: there is no such judge, or its settings are wrong.
    :raises DataError: the labels are of a kind that it cannot be compared with.
    """
    given = section_of(config, base_url, model, api_key_env)
    rubrics = Path(judge) if is_rubric_file(judge) else None
    if rubrics is not None:
        load_rubrics(rubrics)  # what is wrong with it comes before what is wrong with the options
    wanted: dict[str, Any] = {"judge": judge}
    if is_rubric_file(judge):
        wanted = {"judge": "rubrics", "rubrics": {"file": str(Path(judge).resolve()), "helper_model": ONE}}
    if given is not None:
        models = {ONE: given.model_dump(exclude_defaults=True)}
        experiment = _least({"task_judge": wanted, "helper_models": models}, overrides)
    elif config is not None:
        experiment = load_config(config, [*_as_overrides(wanted, config, overrides), *overrides])
    else:
        if is_rubric_file(judge) and not any(text.startswith("astuner.helper_models") for text in overrides):
            raise ConfigError(WHICH_MODEL)
        experiment = _least({"task_judge": wanted}, overrides)
    reference = experiment.astuner.task_judge.judge
    assert reference is not None
    section = experiment.section("judge", reference)
    if isinstance(section, RubricsConfig) and rubrics is None:
        rubrics = experiment.base_dir / section.file
    notes: list[str] = []
    overlap = None
    if rubrics is not None:
        labels, overlap, notes = _held_out(rubrics, labels)
    scope = str(Path.cwd() / SCOPE)
    helpers = WatchedHelpers(experiment.astuner.helper_models, scope=scope)
    made = Member.build(experiment, reference, None, where="astuner.task_judge.judge", helper_models=helpers)
    under_test = JudgeUnderTest(
        made, answer_field=answer_field, at_once=at_once, timeout=experiment.astuner.task_judge.judge_timeout
    )
    say(f"about {plan_of(labels, plan, by_group=under_test.by_group)} questions to the judge")
    try:
        card = asyncio.run(check(under_test, labels, plan, name=judge, notes=notes, say=say))
        return replace(card, overlap=overlap)
    finally:
        made.close()


def is_rubric_file(judge: str) -> bool:
    """Whether JUDGE names a file rather than a judge."""
    return judge.endswith(_SUFFIXES) and not is_code(judge)


def _held_out(file: Path, labels: Labels) -> tuple[Labels, Overlap | None, list[str]]:
    """The labels that the rubrics were not learned from, how many others there were, and what their file says.

    Where none is left, as all nearly repeat one and none is the same, all are, with a note: texts that are alike may
    still be others, and who has no others could measure nothing.

    :raises DataError: they were learned from all of them, or from some which the others nearly repeat, so agreement
        with them says nothing about others.
    """
    rubrics = load_rubrics(file)
    notes = [f"rubrics {rubrics.digest}"]
    if rubrics.learned is None:
        return labels, None, [*notes, "written by hand: no agreement was measured when they were learned"]
    if rubrics.is_edited:
        was = rubrics.learned.digest
        notes.append(f"edited since they were learned ({was}): the agreement in the file is not theirs")
    else:
        a = rubrics.learned.agreement
        notes.append(f"agreement when learned: {a.share:.0%} ({a.low:.0%} to {a.high:.0%}, {a.n} held-out examples)")
    kept, overlap = without_known(labels.samples, rubrics.learned.prints)
    if rubrics.learned.sha256 == labels.sha256 or (not kept and overlap.same):
        near, way_out = "", ""
        if overlap.near and not kept:
            places = places_of_same(labels.samples, rubrics.learned.prints)
            more = f" and {len(places) - _SHOWN_PLACES} more" if len(places) > _SHOWN_PLACES else ""
            near = f" (or from what {overlap.near} of them nearly repeat)"
            way_out = f"; without {', '.join(places[:_SHOWN_PLACES])}{more}, the others are measured, with a note"
        raise DataError(
            f"--labels {labels.name}: {file} was learned from these very labels{near}, and rubrics agree with what "
            "they were learned from; name labels that learning never saw (the file says how it agreed with those held "
            f"out){way_out}"
        )
    if not rubrics.learned.prints:
        notes.append("the file does not say which examples it was learned from: labels among them are not known again")
        return labels, None, notes
    if not kept:
        notes.append(
            f"all {overlap.near} labels nearly repeat one that the rubrics were learned from, and none was left out: "
            "agreement with labels that are less alike may be lower"
        )
        return labels, replace(overlap, near=0), notes
    if overlap.same or overlap.near:
        notes.append(
            f"{overlap.same + overlap.near} of {len(labels.samples)} labels were left out: the rubrics were learned "
            f"from {overlap.same} of them, and {overlap.near} nearly repeat one that they were learned from"
        )
    if overlap.same_question:
        notes.append(
            f"{overlap.same_question} labels have a question that the rubrics were learned from, with other answers"
        )
    return replace(labels, samples=kept), overlap, notes


def _as_overrides(wanted: dict[str, Any], config: Path, overrides: Sequence[str]) -> list[str]:
    """The judge as ``key=value``; of a rubric file, the helper model is that of the experiment's own section."""
    found = [f"astuner.task_judge.judge={json.dumps(wanted['judge'])}"]
    section = wanted.get("rubrics")
    if section is None:
        return found
    found.append(f"astuner.task_judge.rubrics.file={json.dumps(section['file'])}")
    raw = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None
    astuner = raw.get("astuner") if isinstance(raw, dict) else None
    astuner = astuner if isinstance(astuner, dict) else {}
    own = astuner.get("task_judge", {}).get("rubrics") if isinstance(astuner.get("task_judge"), dict) else None
    said = any(text.startswith(_GRADES_WITH) for text in overrides)
    if not said and not (isinstance(own, dict) and own.get("helper_model")):
        models = list(astuner.get("helper_models") or {})
        if len(models) != 1:
            there = f"there are {', '.join(models)}" if models else "astuner.helper_models is empty"
            raise ConfigError(
                f"{config}: which helper model grades? {there}; say it with "
                f"--set {_GRADES_WITH}NAME"
            )
        found.append(f"{_GRADES_WITH}{json.dumps(models[0])}")
    return found


def _least(astuner: dict[str, Any], overrides: Sequence[str]) -> Config:
    """An experiment of options alone.

    :raises ConfigError: something is wrong or missing; no message names a file that the person did not write.
    """
    helper = next(iter(astuner.get("helper_models", {})), None)
    with _experiment(astuner) as file:
        try:
            return load_config(file, overrides)
        except ConfigError as e:
            problems = [re.sub(rf"^{re.escape(str(file))}(:\d+)*: ", "", problem) for problem in e.problems]
    wanting = [m[1] for problem in problems if (m := _WANTS_HELPER.match(problem))]
    if wanting and helper is None:
        raise ConfigError([WHICH_MODEL, *(_with_option(p) for p in problems if not _WANTS_HELPER.match(p))])
    if wanting:
        sections = {name: {"helper_model": helper} for name in wanting}
        return _least({**astuner, "task_judge": {**astuner["task_judge"], **sections}}, overrides)
    raise ConfigError([_with_option(problem) for problem in problems])


def _with_option(problem: str) -> str:
    """What is required, with the option that gives it."""
    required = _REQUIRED.match(problem)
    if required and required[1] == "astuner.task_judge.rubrics.file":
        return f"{problem}; name the rubric file itself: astuner judge check FILE.yaml, or --config FILE"
    return f"{problem}; --set {required[1]}=VALUE, or --config FILE" if required else problem


@contextlib.contextmanager
def _experiment(astuner: dict[str, Any]) -> Iterator[Path]:
    """A file of the least that a run needs; code of the person's own is found in the current folder."""
    least = {"model": {"path": "unused"}, "rollout": {"num_repeat": 2}, **astuner}
    with tempfile.TemporaryDirectory(prefix="astuner-judge-") as folder:
        path = Path(folder) / "experiment.yaml"
        path.write_text(yaml.safe_dump({"astuner": least}), encoding="utf-8")
        yield path
