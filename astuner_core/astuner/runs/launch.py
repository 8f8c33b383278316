"""From a config file to a finished run: what `astuner run` does, as a Python function."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from astuner.config import Config
from astuner.contracts.backbone import Backbone
from astuner.contracts.errors import ConfigError, RunError
from astuner.contracts.events import RunPlanned
from astuner.contracts.interrupt import Interrupt
from astuner.contracts.parts import DebuggerPart, HelperModelsPart
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins
from astuner.runs.plan import make_plan
from astuner.runs.preflight import Preflight
from astuner.runs.result import RunResult, finish, told_if_cut_short
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir, debug_folder, lent_folder
from astuner.runs.services import run_services
from astuner.support.processes import register

Resume = Literal["auto", "must", "never"]


def run(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    resume: Resume = "auto",
    dry_run: bool = False,
    services: Sequence[str] = (),
    disabled_plugins: Sequence[str] = (),
    debug_tags: Sequence[str] = (),
    debug_listen: bool = False,
) -> RunResult:
    """Train, or with the `debug` backbone try out, the experiment in ``path``.

    :param services: what ``--with`` names: registered services, or environments to serve (see
        `astuner.runs.services`). They run before the tasks are read, and until the end; also for a dry run.
    :param resume: ``auto`` continues an unfinished run of the same config and otherwise starts over; ``must`` continues
        whatever is in the run folder; ``never`` starts over. An earlier run's folder is kept under another name.
    :param debug_tags: where to stop: ``bp("TAG")`` in an agent's code; see `astuner.runs.breakpoints`.
    :param debug_listen: wait there for a debugger, though the run has a terminal.
    :raises ConfigError: the file or an override is wrong (all mistakes at once), or this backbone would ignore keys.
    :raises Interrupted: Ctrl-C; everything finished is saved.
    :raises RunError: the run cannot go on, or not begin: what it wants from the hub cannot be had.
    """
    debug: DebuggerPart | None = None
    given = [*overrides]
    if debug_tags or debug_listen:
        debugger: type[DebuggerPart] = registry.part(load_plugins(disabled_plugins), "debugger", wanted_by="--db")
        debug = debugger(debug_tags, listen=debug_listen)
        given = [*debug.overrides, *overrides]
    preflight = Preflight(path, given, backbone=backbone, disabled_plugins=disabled_plugins)
    config, trainer, mistakes = preflight.config, preflight.backbone, preflight.mistakes
    stops = debug.check(trainer) if debug is not None and trainer is not None else ""
    if trainer is not None and trainer.lends and not dry_run:
        mistakes.raise_all()
        return _lend(trainer, preflight.notes, f"astuner run {path}", resume, services)
    with contextlib.ExitStack() as stack:
        if debug is not None:
            stack.enter_context(debug.active())
        parts = preflight.parts()
        if services:
            mistakes.raise_all()  # nothing is started for what is refused
        trains = trainer is None or trainer.capabilities.trains
        run_dir = RunDir(config.run_dir if trains else debug_folder(config.run_dir))
        running = stack.enter_context(run_services(config, services, run_dir.path))
        mistakes.ask("", run_dir.check_usable)
        tasks = preflight.tasks(dry_run=dry_run)
        mistakes.raise_all()
        assert trainer is not None  # these two are None only
        assert tasks is not None  # where a mistake was raised
        plan = make_plan(config, trains, parts.plan, run_dir.path, tasks)
        if dry_run:
            return RunResult(run_dir=run_dir.path, plan=plan, text=str(plan))
        sinks = [make() for make in parts.make_sinks]
        interrupt = Interrupt()
        stack.enter_context(interrupt.listening())
        stack.enter_context(run_dir.locked())
        stack.enter_context(register(os.getpid(), f"astuner run {path}", run_dir.path))
        resume_from, note = _prepare_run_dir(run_dir, config, trainer, resume)
        with _explained(path):
            training = TrainingRun(
                config,
                run_dir,
                tasks,
                runner=parts.runner,
                sinks=sinks,
                interrupt=interrupt,
                resume_from=resume_from,
                trains=trains,
            )
            stack.callback(training.close)
            if debug is not None:
                debug.note = training.note
                stack.callback(debug.end)
            for line in (*preflight.notes, stops, *running, note, str(plan)):
                if line:
                    training.note(line)
            if not trains:
                trainer.train(training)
                return finish(training, trains=False)
            command = _command(path, overrides, backbone, services)
            training.publish(RunPlanned(command=command, config_file=config.path, plan=plan.lines))
            with told_if_cut_short(training):
                trainer.train(training)
            return finish(training, trains=True)


def _command(path: str | Path, overrides: Sequence[str], backbone: str | None, services: Sequence[str]) -> list[str]:
    """What runs the same experiment again."""
    named = [word for service in services for word in ("--with", service)]
    return ["astuner", "run", str(path), *overrides, *(["--backbone", backbone] if backbone else []), *named]


def _lend(
    trainer: Backbone,
    notes: Sequence[str],
    command: str,
    resume: Resume,
    services: Sequence[str],
) -> RunResult:
    """Lend a part to another command's run: no tasks, no books, no lock of the run folder."""
    if resume != "auto":
        raise ConfigError(
            "--resume and --no-resume are for the command that has the run; this one lends a part to it: leave them out"
        )
    config = trainer.config
    folder = RunDir(lent_folder(config.run_dir))
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(run_services(config, services))
        interrupt = Interrupt()
        stack.enter_context(interrupt.listening())
        stack.enter_context(folder.locked())
        stack.enter_context(register(os.getpid(), command, folder.path))
        for line in (*notes, *running):
            _say(line)
        return RunResult(run_dir=config.run_dir, text=trainer.lend(folder.path, interrupt, _say))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _explained(path: str | Path) -> Iterator[None]:
    """Say what to do about a disk that is full or not ours."""
    try:
        yield
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        raise RunError(
            f"the run stopped: {e}; free space or mend permissions, then continue with: astuner run {path} --resume"
        ) from e


def _prepare_run_dir(run_dir: RunDir, config: Config, trainer: Backbone, resume: Resume) -> tuple[Path | None, str]:
    """Continue or start over: (state to resume from, a note for the person)."""
    saved = trainer.latest_state(run_dir.resume)
    unfinished = not run_dir.summary.exists()  # written last, and only by a run that came to its end
    if resume == "must" and not run_dir.path.exists():
        raise RunError(f"there is nothing to resume in {run_dir.path}; leave out --resume to start")
    same = run_dir.resolved.exists() and _comparable(run_dir.resolved.read_text(encoding="utf-8")) == _comparable(
        config.dump_yaml()
    )
    if saved and (resume == "must" or (resume == "auto" and unfinished and same)):
        run_dir.summary.unlink(missing_ok=True)
        RunDir.write_atomically(run_dir.resolved, config.dump_yaml())
        return saved, f"continuing the run in {run_dir.path} from {saved.name}"
    moved = run_dir.start(keep=trainer.capabilities.trains)
    part: type[HelperModelsPart] | None = registry.optional_part(config.plugins, "helper_models")
    if part is not None:
        part.of(config).begin()
    RunDir.write_atomically(run_dir.resolved, config.dump_yaml())
    notes = ["nothing was saved yet, so the run starts over"] if resume == "must" else []
    notes += [f"the earlier run's folder is now {moved}"] if moved else []
    return None, "; ".join(notes)


def _comparable(text: str) -> Any:
    """A resolved config without what may change between a run and its continuation."""
    data = yaml.safe_load(text) or {}
    data.pop("resolved", None)  # which keys were written, and where
    data.get("astuner", {}).pop("telemetry", None)
    common = data.get("astuner", {}).get("trainer_common", {})
    for key in (
        "total_epochs",
        "total_steps",
        "save_freq",
        "test_freq",
        "resume_freq",
        "max_checkpoints",
        "logger",
        "save_episodes",
        "save_tokens",
        "sentinel",
        "watts",
    ):
        common.pop(key, None)
    for section, key in (  # how long things may take, and how many at once: --db changes these
        ("rollout", "episode_timeout"),
        ("rollout", "max_env_worker"),
        ("task_judge", "judge_timeout"),
    ):
        data.get("astuner", {}).get(section, {}).pop(key, None)
    service = data.get("astuner", {}).get("env_service", {})
    for key in ("url", "token_env", "timeout", "busy_timeout"):  # where it runs, not what it is
        service.pop(key, None)
    return data
