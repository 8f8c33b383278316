"""Resume the run in a folder or start over, and describe what changed.

A run resumes only if its metrics stay comparable and no task of an epoch is lost or drawn twice: with its original
training tasks, in the order of its seed, and with its original validation tasks. All other settings may change with
``--resume``; changes are listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from astuner.config.checking import TABLES
from astuner.contracts.errors import AstunerError, Interrupted, RunError
from astuner.contracts.parts import HelperModelsPart
from astuner.contracts.places import Tree
from astuner.plugins import registry
from astuner.runs.command import RunCommand, yaml_text
from astuner.runs.fingerprint import Fingerprint, describe_difference
from astuner.runs.run_dir import RunDir

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.contracts.backbone import Backbone
    from astuner.runs.tasks import TaskSet

Resume = Literal["auto", "must", "never"]

BACKBONE = "astuner.backbone"
_READER = "astuner.task_reader"


@dataclass(frozen=True, kw_only=True)
class ChangedKey:
    """A key whose value differs from the run in the folder."""

    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.name} is {_shown(self.now)} (was {_shown(self.before)})"

    @property
    def is_of_reader(self) -> bool:
        """Whether the key only locates the tasks. The tasks themselves are compared separately."""
        return self.name.startswith(f"{_READER}.")

    @property
    def is_fixed(self) -> bool:
        """Whether the key must not change during a run."""
        return is_listed(self.name, "must_stay")


def prepare_run_dir(
    run_dir: RunDir, config: Config, trainer: Backbone, resume: Resume, tasks: TaskSet, command: RunCommand
) -> tuple[Path | None, str]:
    """Resume the run in the folder or start over.

    :param command: The command as typed, for messages.
    :returns: The state to resume from (None for a fresh start) and a note.
    :raises RunError: There is nothing to resume, or the run cannot resume with these tasks or settings.
    """
    now = Fingerprint.of(tasks.train, tasks.validation)
    before = _Before() if resume == "never" else _Before.read(run_dir, config)
    if resume == "must" or (resume == "auto" and before.continues_as(now)):
        damaged: list[str] = []
        for path, problem in trainer.saved_states(run_dir):
            if not problem:
                notes = _check_same_run(run_dir, config, before, now, tasks, command)
                run_dir.summary.unlink(missing_ok=True)
                RunDir.write_atomically(run_dir.resolved, config.dump_yaml())
                now.write(run_dir.task_digests)
                note = f"continuing the run in {run_dir.path} from {path.relative_to(run_dir.path)}"
                return path, "; ".join([*damaged, note, *notes])
            damaged.append(f"{path} cannot be used: {problem}")
        if damaged or resume == "must":
            raise RunError(
                f"nothing to resume in {run_dir.path}: {'; '.join(damaged) or 'nothing was saved yet'}. "
                f"List the intact parts with: astuner doctor {run_dir.path}; or start over (the folder is kept under "
                f"another name) with: {command.starting_over()}"
            )
    trains = trainer.capabilities.trains
    why = before.why_not_continued if resume == "auto" and trains else ""
    is_saved = bool(why) and (before.is_of_other_backbone or trainer.has_saved_state(run_dir))
    moved = run_dir.start(keep=trains)
    part: type[HelperModelsPart] | None = registry.find_optional_part(config.plugins, "helper_models")
    if part is not None:
        part.of(config).begin()
    RunDir.write_atomically(run_dir.resolved, config.dump_yaml())
    if trains:
        now.write(run_dir.task_digests)
    if moved is None:
        return None, ""
    note = f"the earlier run's folder is now {moved}"
    if not is_saved:
        return None, f"{why}, so a new run starts; {note}" if why else note
    return None, f"{why}, so a new run starts; {note}. {before.advice(command.at(moved), now, tasks)}"


@dataclass(frozen=True, kw_only=True)
class _Before:
    """The run that is already in the folder, compared with the new one."""

    exists: bool = False
    is_finished: bool = False
    changed: Sequence[ChangedKey] = ()
    fingerprint: Fingerprint | None = None
    """None if the run is of an earlier version, or a file is damaged."""
    damage: Sequence[str] = ()
    """Reasons why settings or tasks cannot be compared."""

    @classmethod
    def read(cls, run_dir: RunDir, config: Config) -> _Before:
        damage: list[str] = []
        changed: list[ChangedKey] = []
        fingerprint: Fingerprint | None = None
        try:
            changed = changed_keys(run_dir, config)
        except RunError as e:
            damage.append(str(e))
        try:
            fingerprint = Fingerprint.read(run_dir.task_digests)
        except RunError as e:
            damage.append(str(e))
        return cls(
            exists=run_dir.resolved.exists(),
            is_finished=run_dir.summary.exists(),  # the summary is written last
            changed=changed,
            fingerprint=fingerprint,
            damage=damage,
        )

    def continues_as(self, now: Fingerprint) -> bool:
        """Return whether the run in the folder is unfinished and belongs to the same experiment.

        The same tasks from another file are the same experiment.

        :raises RunError: A damaged file prevents the comparison.
        """
        if not self.exists or self.is_finished:
            return False
        if self.damage:
            raise RunError("; ".join(self.damage))
        return all(key.is_of_reader and self.fingerprint == now for key in self.changed)

    @property
    def is_of_other_backbone(self) -> bool:
        return any(key.name == BACKBONE for key in self.changed)

    @property
    def why_not_continued(self) -> str:
        """Reason why a new run starts; empty if the folder has no run, or nothing changed."""
        if not self.exists:
            return ""
        if self.is_finished:
            return "the earlier run is finished"
        return ", ".join(map(str, self.changed))

    def advice(self, command: RunCommand, now: Fingerprint, tasks: TaskSet) -> str:
        """Return instructions to resume this run.

        :param command: Command for the folder's new location.
        """
        earlier = [f"{key.name}={yaml_text(key.before)}" for key in self.changed if key.is_fixed]
        again = command.overriding(*earlier).resuming()
        if self.fingerprint is not None:
            train = describe_difference(self.fingerprint.train, now.train, tasks.train)
            validation = describe_difference(self.fingerprint.validation, now.validation, tasks.validation)
            differs = [f"{name} ({text})" for name, text in (("training", train), ("validation", validation)) if text]
            if differs:
                return f"To resume it, restore its {' and '.join(differs)} tasks, then run: {again}"
        if self.is_finished:
            return f"To train it further, add a larger --steps to: {again}"
        return f"To resume it, run: {again}"


def changed_keys(run_dir: RunDir, config: Config) -> list[ChangedKey]:
    """Return the keys whose values differ from the run in the folder, except keys that may change.

    :raises RunError: The folder's ``resolved.yaml`` is damaged.
    """
    if not run_dir.resolved.exists():
        return []
    try:
        before = Tree(dict(yaml.safe_load(run_dir.resolved.read_text(encoding="utf-8")) or {}))
    except (OSError, TypeError, ValueError, yaml.YAMLError, RecursionError) as e:
        raise RunError(f"{run_dir.resolved} is damaged: {e}. Pass --resume to continue, or --no-resume") from e
    written = {*config.written, *(before.get(("resolved", "written")) or ())}
    old, new = _values(before), _values(Tree(yaml.safe_load(config.dump_yaml())))
    return [
        ChangedKey(name=name, before=old.get(name), now=new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
        # ignore defaults that differ between versions of ASTuner
        and ((name in old and name in new) or any(key == name or name.startswith(f"{key}.") for key in written))
    ]


def _values(tree: Tree) -> dict[str, Any]:
    leaves = {".".join(key): value for key, value in tree.leaves() if key[0] != "resolved"}
    return {name: value for name, value in leaves.items() if not is_listed(name, "may_change") and value != {}}


def is_listed(name: str, table: str) -> bool:
    """Return whether a key, or a section above it, is in a list of ``config/tables.yaml``."""
    return any(f"{name}.".startswith(f"astuner.{key}.") for key in TABLES[table])


def _check_same_run(
    run_dir: RunDir,
    config: Config,
    before: _Before,
    now: Fingerprint,
    tasks: TaskSet,
    command: RunCommand,
) -> list[str]:
    """Return notes on what changed since the run was saved.

    :raises RunError: Something changed that must not change during a run.
    """
    refused = [str(key) for key in before.changed if key.is_fixed]
    notes = [*before.damage, *(str(key) for key in before.changed if not key.is_fixed)]
    if (saved := before.fingerprint) is not None:
        if difference := describe_difference(saved.train, now.train, tasks.train):
            refused.append(f"the training tasks have changed{_source(config, 'validation')}: {difference}")
        if difference := describe_difference(saved.validation, now.validation, tasks.validation):
            measured = bool(now.validation) and any("val/success" in row for row in run_dir.read_metrics())
            text = f"the validation tasks have changed{_source(config, 'training')}: {difference}"
            (refused if measured else notes).append(text)
    elif not before.damage:
        notes.append("the run was started by an earlier version, so its tasks were not compared")
    if refused:
        raise RunError(
            f"the run in {run_dir.path} cannot resume: {'; '.join(refused)}. Restore what changed, or start over "
            f"with: {command.starting_over()}"
        )
    return notes


def _source(config: Config, other: str) -> str:
    """Return the keys that locate the tasks, for messages.

    :param other: A word in the keys of the other split; those keys are excluded.
    """
    values = Tree(config.as_dict())
    keys = {name: values.get(tuple(name.split("."))) for name in sorted(config.written)}
    shown = [
        f"{name}: {value}"
        for name, value in keys.items()
        if name.startswith(f"{_READER}.") and name != f"{_READER}.type"
        if other not in name and not isinstance(value, Mapping)
    ]
    return f" ({', '.join(shown)})" if shown else ""


@contextmanager
def with_next_step(command: RunCommand, run_dir: RunDir, trainer: Backbone) -> Iterator[None]:
    """Add instructions to resume to an error that ends the run."""
    try:
        yield
    except AstunerError as e:
        e.next_step = e.next_step or next_step(command, run_dir, trainer, start_again=isinstance(e, Interrupted))
        raise


def next_step(command: RunCommand, run_dir: RunDir, trainer: Backbone, *, start_again: bool = True) -> str:
    """Return instructions to continue a run that ended early.

    :param start_again: Whether to include the start command if nothing was saved.
    """
    if trainer.has_saved_state(run_dir):
        return f"continue with: {command.resuming()}"
    return f"nothing was saved yet, start again with: {command}" if start_again else ""


def _shown(value: Any) -> str:
    return "not set" if value is None else json.dumps(value, ensure_ascii=False, default=str)
