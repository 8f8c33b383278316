"""The next command to type after a run, chosen by its verdict."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from astuner import RunDir
from astuner.contracts.shell import shell_text
from astuner_report.compare import view_command

_Choice: TypeAlias = Callable[..., dict[str, str]]
_EPOCHS = "astuner.trainer_common.total_epochs"


def next_step(
    facts: Mapping[str, Any], run_dir: RunDir, settings: Mapping[str, Any], written: Sequence[str]
) -> dict[str, str] | None:
    """Return the next command as ``command`` and its purpose as ``why``; None if the run's command is unknown.

    :param facts: facts of the report, with the verdict.
    :param settings: the section ``astuner`` of the run.
    :param written: keys that the experiment file or an override sets.
    """
    if not facts["origin"] or facts["state"]["word"] == "unfinished":
        return None
    words = shlex.split(facts["origin"][-1]["command"])
    if facts["state"]["word"] != "ended":
        can_resume = any(run_dir.resume.iterdir()) if run_dir.resume.is_dir() else False
        return _next("resume the run", [*words, "--resume"]) if can_resume else None
    choose: _Choice = _CHOICES.get(facts["verdict"]["word"], _view)
    return choose(facts, run_dir, words, settings, written)


def _next(why: str, words: Sequence[str]) -> dict[str, str]:
    return {"command": shell_text(words), "why": why}


def _of_checkpoint(command: str, words: Sequence[str], checkpoint: str) -> list[str]:
    """Return another command on the same experiment, with the same plugins, overrides, backbone and services."""
    at = words.index("run")
    return [*words[:at], command, *words[at + 1 :], "--checkpoint", checkpoint]


def _view(facts: Mapping[str, Any], run_dir: RunDir, *_: Any) -> dict[str, str]:
    episodes = [episode["episode"] for episode in facts["informative_episodes"][:1]]
    return {"command": view_command(run_dir.path, *episodes), "why": "read episodes and their rewards"}


def _promote(facts: Mapping[str, Any], run_dir: RunDir, words: Sequence[str], *_: Any) -> dict[str, str]:
    if not run_dir.models:
        return _view(facts, run_dir)
    return _next("serve the best checkpoint from now on, if it is better", _of_checkpoint("promote", words, "best"))


def _best(facts: Mapping[str, Any], run_dir: RunDir, words: Sequence[str], *_: Any) -> dict[str, str]:
    """Return the command for a run that got worse: measure its best checkpoint, if that is better than the start."""
    best = run_dir.best_validation()
    before = (facts["held_out"] or {}).get("before") or {}
    if best is None or best.compared[best.step].success <= (before.get("success") or 0.0):
        return _view(facts, run_dir)
    return _next(f"measure the best checkpoint (step {best.step})", _of_checkpoint("eval", words, "best"))


def _train_longer(
    facts: Mapping[str, Any], run_dir: RunDir, words: Sequence[str], settings: Mapping[str, Any], written: Sequence[str]
) -> dict[str, str]:
    if facts["updated"]["why"]:
        return _view(facts, run_dir)
    steps = 2 * facts["steps"]
    epochs = (settings.get("trainer_common") or {}).get("total_epochs")
    more = [f"{_EPOCHS}={2 * epochs:g}"] if _EPOCHS in written and epochs else []
    return _next(f"train to step {steps}", [*words, *more, "--steps", str(steps), "--resume"])


def _measure_before(facts: Mapping[str, Any], run_dir: RunDir, words: Sequence[str], *_: Any) -> dict[str, str]:
    held_out = facts["held_out"]
    if held_out is None:
        return _view(facts, run_dir)
    missing = "latest" if not held_out["after"]["step"] else "base"
    if missing == "latest" and not run_dir.models:
        return _view(facts, run_dir)
    return _next("make the missing validation", _of_checkpoint("eval", words, missing))


_CHOICES: Mapping[str, _Choice] = {
    "learned": _promote,
    "may be chance": _train_longer,
    "nothing was learned": _train_longer,
    "got worse": _best,
    "reward fell": _best,
    "not measured": _measure_before,
}
"""Word of a verdict -> its next step; for the others, read episodes."""
