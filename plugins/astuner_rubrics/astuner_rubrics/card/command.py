"""Checking a judge as the command does it: found, configured and made as a run would.

Without an experiment file there is one of the least that a run needs, so that a judge's section is checked by the same
code, with the same messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from astuner.config import load_config
from astuner.errors import ConfigError
from astuner.registry import is_code
from astuner.rollout.parts import make_judge
from astuner_rubrics.card.asking import JudgeUnderTest, WatchedHelpers
from astuner_rubrics.card.card import Card, Plan, Say, check, plan_of
from astuner_rubrics.labels import Labels
from astuner_rubrics.models import ONE, section_of
from astuner_rubrics.rubric_file import load_rubrics

SCOPE = "judge-check"
"""What budgets are counted for, below the current folder: not the experiment's run, which has a budget of its own."""

_SUFFIXES = (".yaml", ".yml")
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
    notes = _notes(judge)
    wanted: dict[str, Any] = {"judge": judge}
    if is_rubric_file(judge):
        wanted = {"judge": "rubrics", "rubrics": {"file": str(Path(judge).resolve()), "helper_model": ONE}}
    if given is not None:
        models = {ONE: given.model_dump(exclude_defaults=True)}
        with _experiment({"task_judge": wanted, "helper_models": models}) as file:
            experiment = load_config(file, overrides)
    elif config is not None:
        experiment = load_config(config, [*_as_overrides(wanted, config, overrides), *overrides])
    else:
        with _experiment({"task_judge": wanted}) as file:
            experiment = load_config(file, overrides)
    reference = experiment.astuner.task_judge.judge
    assert reference is not None
    scope = str(Path.cwd() / SCOPE)
    helpers = WatchedHelpers(experiment.astuner.helper_models, scope=scope)
    made = make_judge(experiment, reference, experiment.section("judge", reference), helper_models=helpers)
    under_test = JudgeUnderTest(
        made, answer_field=answer_field, at_once=at_once, timeout=experiment.astuner.task_judge.judge_timeout
    )
    say(f"about {plan_of(labels, plan, by_group=under_test.by_group)} questions to the judge")
    try:
        return asyncio.run(check(under_test, labels, plan, name=judge, notes=notes, say=say))
    finally:
        if callable(getattr(made, "close", None)):
            made.close()


def is_rubric_file(judge: str) -> bool:
    """Whether JUDGE names a file rather than a judge."""
    return judge.endswith(_SUFFIXES) and not is_code(judge)


def _notes(judge: str) -> list[str]:
    """What a rubric file says about itself."""
    if not is_rubric_file(judge):
        return []
    rubrics = load_rubrics(Path(judge))
    found = [f"rubrics {rubrics.digest}"]
    if rubrics.learned is None:
        found.append("written by hand: no agreement was measured when they were learned")
    elif rubrics.is_edited:
        found.append(
            f"edited since they were learned ({rubrics.learned.digest}): the agreement in the file is not theirs"
        )
    else:
        a = rubrics.learned.agreement
        found.append(f"agreement when learned: {a.share:.0%} ({a.low:.0%} to {a.high:.0%}, {a.n} held-out examples)")
    return found


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


@contextlib.contextmanager
def _experiment(astuner: dict[str, Any]) -> Iterator[Path]:
    """A file of the least that a run needs; code of the person's own is found in the current folder."""
    least = {"model": {"path": "unused"}, "rollout": {"num_repeat": 2}, **astuner}
    with tempfile.TemporaryDirectory(prefix="astuner-judge-") as folder:
        path = Path(folder) / "experiment.yaml"
        path.write_text(yaml.safe_dump({"astuner": least}), encoding="utf-8")
        yield path
