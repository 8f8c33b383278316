"""Run an experiment from its config file: the Python function of `astuner run`.

A plan describes the run before it starts. `finish` writes its summary, as text and as ``summary.json``.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.config import Config, load_config
from astuner.config.schema import MOST
from astuner.contracts.backbone import Backbone
from astuner.contracts.display import Displayed, RunView
from astuner.contracts.errors import AstunerError, ConfigError, Interrupted, RunError, told
from astuner.contracts.events import RunPlanned, Subscriber
from astuner.contracts.interrupt import Interrupt
from astuner.contracts.parts import DebuggerPart
from astuner.contracts.proxies import bypass_proxies
from astuner.contracts.secrets import without_secrets, without_user
from astuner.contracts.statistics import percent
from astuner.plugins import registry
from astuner.plugins.loader import load_plugins
from astuner.rollout.metrics import counted, reward_beside
from astuner.rollout.models import AgentRegistry
from astuner.rollout.parts import source_of
from astuner.runs.clock import RunClock, Schedule
from astuner.runs.command import RunCommand
from astuner.runs.estimate import (
    PROBE_VALIDATION_TASKS,
    ProbeEnd,
    earlier_timing,
    estimate,
    is_probe,
    probe_folder,
    time_plan,
)
from astuner.runs.preflight import Preflight
from astuner.runs.resuming import Resume, next_step, prepare_run_dir, with_next_step
from astuner.runs.run import TrainingRun
from astuner.runs.run_dir import RunDir, debug_folder
from astuner.runs.services import run_services
from astuner.runs.tasks import TaskSet, planned_steps
from astuner.support.limits import describe_limit
from astuner.support.processes import recorded_process

if TYPE_CHECKING:
    from astuner import LoggedEpisode
    from astuner.config.schema import AgentSection, AstunerSection, ModelSection
    from astuner.runs.run import RunWriter


PLAN_LABELS = {
    "model": "Model",
    "tasks": "Tasks",
    "held out": "Held-out tasks",
    "workflow": "Workflow",
    "reward": "Judge",
    "at a limit": "Truncated episodes",
    "backbone": "Backbone",
    "a step": "Step",
    "tokens": "Generated tokens",
    "steps": "Training steps",
    "learning": "Algorithm",
    "saved": "Checkpoints",
    "time": "Total time",
    "tokens per second": "Speed",
    "run folder": "Run folder",
}
"""Printed labels of a plan's keys. The keys are part of ``--dry-run --json`` and of the report's facts."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Description of a run before it starts: key -> text, in printing order."""

    title: str
    lines: Mapping[str, str]

    @property
    def labels(self) -> dict[str, str]:
        """Printed label -> text."""
        return {PLAN_LABELS.get(key, key[:1].upper() + key[1:]): text for key, text in self.lines.items()}

    def __str__(self) -> str:
        return f"{self.title}\n{_table(self.labels, indent='  ')}"


def _table(lines: Mapping[str, str], *, indent: str = "") -> str:
    """Return labels and texts in two columns."""
    width = max(map(len, lines), default=0) + 2
    return "\n".join(
        f"{indent}{label:<{width}}" + text.replace("\n", "\n" + " " * (len(indent) + width))
        for label, text in lines.items()
    )


def make_plan(
    config: Config,
    trains: bool,
    of_backbone: Mapping[str, str],
    run_dir: Path,
    tasks: TaskSet,
    of_time: Mapping[str, str],
) -> Plan:
    """Return the plan. This imports the workflow, but loads no weights and starts nothing.

    :param of_backbone: Lines of the backbone (`astuner.contracts.backbone.Backbone.plan`).
    :param of_time: Lines on the total time and cost.
    """
    a = config.astuner
    common, rollout, data = a.trainer_common, a.rollout, a.data
    train, validated = len(tasks.train), len(tasks.validation)
    workflow = source_of(config, "workflow", rollout.workflow)  # raises if it cannot be found or imported
    reader = source_of(config, "task reader", a.task_reader.type)
    judge = source_of(config, "judge", a.task_judge.judge) if a.task_judge.judge else "set by the workflow"
    missing = "" if validated else "; name a validation split in the task reader's section to measure success"
    counts = tasks.counts() if validated else tasks.counts().replace(", 0 to validate", ", none to validate")
    lines = {
        "model": _model(a.model),
        "tasks": f"{counts}, from {reader}{missing}",
        **tasks.checked.get("plan", {}),
        "workflow": workflow,
        "reward": judge,
        "at a limit": _at_a_limit(a),
        "backbone": source_of(config, "backbone", a.backbone),
        **_agents(config),
    }
    if trains:
        draws = math.ceil(data.train_batch_size * rollout.oversample)
        episodes = draws * rollout.num_repeat
        steps = planned_steps(config, train)
        epochs = steps * data.train_batch_size / train if train else 0.0
        a_turn = f"at most {rollout.max_response_length_in_one_turn:,} per turn"
        most = data.max_response_length or rollout.max_response_length_in_one_turn * (rollout.multi_turn.max_steps or 0)
        known = most and not a.agents  # with several agents, their number per episode is unknown
        updates = common.mini_batch_num * common.ppo_epochs
        lines |= {
            "a step": f"{draws} groups x {rollout.num_repeat} attempts = {episodes} episodes, "
            f"{rollout.max_env_worker} in parallel",
            "tokens": f"up to {episodes * most:,} per step ({a_turn})" if known else a_turn,
            "steps": f"{steps} = {epochs:.3g} epochs of {train} tasks, {updates} optimizer "
            f"step{'s' * (updates > 1)} each = {steps * updates} in total",
            "learning": f"{common.algorithm.loss} loss, {common.algorithm.adv_estimator} advantages, "
            f"{common.algorithm.loss_agg_mode}, {common.optim.optimizer} lr {common.optim.lr:g}",
            "saved": f"{_every(common.save_freq)}; validation {_every(common.test_freq)}",
        }
    lines |= {**of_backbone, **of_time}
    lines["run folder"] = str(run_dir)
    return Plan(title=f"{config.experiment_name} ({config.path})", lines=lines)


def _at_a_limit(settings: AstunerSection) -> str:
    """Describe how an episode is scored that a limit on calls, tokens or context ended."""
    rule = settings.rollout.truncated_reward
    if isinstance(rule, float):
        worth = f"scored {rule:g}, regardless of the workflow's reward"
    elif rule == "drop":
        worth = "dropped from training"
    elif settings.task_judge.judge:
        worth = "judged like all other episodes"
    else:
        worth = "scored 0 if the workflow returns no reward, because no judge is configured"
    return f"{worth} (astuner.rollout.truncated_reward: {rule})"


def _agents(config: Config) -> dict[str, str]:
    """Return plan lines for agents and policies, or nothing if the config does not distinguish agents."""
    a = config.astuner
    if not a.agents:
        return {}
    roster = AgentRegistry.of(a)
    speakers = {name: _speaker(agent) for name, agent in a.agents.items()}
    models = {name: config.model_of(name) for name in roster.policies}
    policies = {
        name: _model(model) if name in roster.trained_policies else f"{model.path}, not trained"
        for name, model in models.items()
    }
    return {
        "agents": "; ".join(f"{name}: {text}" for name, text in speakers.items()),
        "policies": "; ".join(f"{name}: {text}" for name, text in policies.items()),
    }


def _speaker(agent: AgentSection) -> str:
    if agent.model == "external":
        return f"{without_user(str(agent.name))} at {without_user(str(agent.base_url))}, never trained"
    return f"policy {agent.policy}" + ("" if agent.train else ", not trained")


def _model(model: ModelSection) -> str:
    return model.path + (f", LoRA rank {model.lora.rank}" if model.lora.rank else "")


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult(Displayed):
    """Result of a run. Notebooks show it with its verdict, curve and main metrics."""

    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the last step and the last validation."""
    plan: Plan | None = None
    """The plan, for a dry run only."""
    estimate: Mapping[str, float] = field(default_factory=dict)
    """Expected time and cost (`astuner.runs.estimate.estimate`), for a dry run after an earlier run or a probe."""
    updated: Mapping[str, Any] = field(default_factory=dict)
    """Amount of training (from the report), if the backbone trains."""
    verdict: Mapping[str, str] = field(default_factory=dict)
    """The report's verdict, if the backbone trains."""
    next: Mapping[str, str] = field(default_factory=dict)
    """The next command to type (``command``) and its purpose (``why``)."""
    informative_episodes: Sequence[Mapping[str, str]] = ()
    """Episodes to read first, each with ``episode`` (ID), ``reason`` and the ``command`` that shows it."""
    best_checkpoint: Path | None = None
    """Kept checkpoint with the best validation."""
    best_validation: Mapping[str, Any] = field(default_factory=dict)
    """Details of the best validation (`astuner.contracts.validation.Best.as_dict`)."""
    lines: Mapping[str, str] = field(default_factory=dict)
    """Lines of the summary: label -> text."""
    text: str = ""

    def __repr__(self) -> str:
        return repr(self.view)

    @property
    def view(self) -> RunView:
        """State of the run, for display; the plan after a dry run."""
        if self.plan is not None:
            return RunView(name=self.plan.title, status="dry run", facts=self.plan.labels)
        best = {"Best checkpoint": str(self.best_checkpoint)} if self.best_checkpoint else {}
        facts = {**self.lines, **best}
        status = facts.pop("Verdict", "finished")
        return RunView(name=self.run_dir.name, status=status, rows=self._rows(), facts=facts)

    def summary(self) -> str:
        """Return the printed summary: success before and after, and the paths of the results."""
        return self.text

    def plot(self) -> RunView:
        """Return the curve of reward and validation success, which notebooks show as an SVG."""
        return RunView(rows=self._rows())

    def to_pandas(self) -> Any:
        """Return the metrics as a `pandas.DataFrame` with one row per step; step 0 is before training.

        :raises ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self._rows()).groupby("step").last()

    def episodes(self, *where: str, limit: int = 10) -> list[LoggedEpisode]:
        """Return the newest episodes of the run, newest first; requires ``trainer_common.save_tokens``.

        :param where: Conditions, for example ``"reward<0.5"`` (``docs/episode_log.md``).
        :param limit: Maximum number; -1 for all.
        :raises ImportError: astuner-record is not installed.
        :raises DataError: The run has no episode log.
        """
        from astuner import EpisodeLog

        with EpisodeLog(self.run_dir) as log:
            return [log.read(listed) for listed in log.list(where, descending=True, limit=limit)]

    def _rows(self) -> list[dict[str, Any]]:
        return RunDir(self.run_dir).read_metrics()


def finish(run: RunWriter, *, trains: bool) -> RunResult:
    """Write ``summary.json``, which marks the run as finished, and return the result with subscribers' summaries."""
    run_dir, ledger = run.run_dir, run.ledger
    rows = run_dir.read_metrics()
    newest: dict[str, float] = {}
    for kind in ("reward/mean", "val/success"):  # the last step and the last validation, each complete
        last: dict[str, Any] = next((row for row in reversed(rows) if kind in row), {})
        newest.update({k: v for k, v in last.items() if k not in ("step", "time")})
    lines = _before_and_after(rows)
    endings = [f"{count} {name}" for name, count in sorted(ledger.counts.items()) if count]
    lines["Episodes"] = ", ".join(endings) or "none"
    facts: dict[str, Any] = {}
    verdict = next_command = ""
    for said in run.ended():
        lines |= said.lines
        facts |= said.facts
        verdict, next_command = said.verdict or verdict, said.next_command or next_command
    chosen = run_dir.best_validation() if trains else None
    best = None if chosen is None else run_dir.checkpoint(chosen.step)
    if trains:
        lines["Checkpoint"] = _models(run_dir.models[-1:])
        if chosen is not None and best is not None and (best != run_dir.models[-1] or chosen.not_comparable):
            lines["Best checkpoint"] = f"{_models([best])} ({chosen})"
        facts["best_checkpoint"] = str(best) if best else None
        facts["best_validation"] = chosen.as_dict() if chosen else None
    lines["Run folder"] = str(run_dir.path)
    if verdict:  # last, because the end of the output is read first
        lines["Verdict"] = verdict
    if next_command:
        lines["Next"] = next_command
    run_dir.write_json(run_dir.summary, {"metrics": newest, "ledger": dict(ledger.counts), **facts})
    text = _table(lines)
    report = facts.get("report", {})
    return RunResult(
        run_dir=run_dir.path,
        metrics=newest,
        lines=lines,
        text=text,
        best_checkpoint=best,
        best_validation=chosen.as_dict() if chosen else {},
        updated=report.get("updated", {}),
        verdict=report.get("verdict", {}),
        next=facts.get("next") or {},
        informative_episodes=facts.get("informative_episodes", ()),
    )


@contextmanager
def told_if_cut_short(run: RunWriter) -> Iterator[None]:
    """Publish an error that ends the run, so that subscribers write a report; the error propagates."""
    try:
        yield
    except OSError:  # on a full disk the report would fail too
        raise
    except Exception as error:
        run.ended(error)
        raise


def _every(steps: int) -> str:
    return "at the end" if steps == MOST else f"every {steps} steps"


def _models(checkpoints: Sequence[Path]) -> str:
    """Return the folders of a checkpoint that contain a model: one, or one per policy."""
    folders = [p.parent for checkpoint in checkpoints for p in sorted(checkpoint.glob("**/config.json"))]
    return ", ".join(map(str, folders)) or "none saved"


def _before_and_after(rows: list[dict[str, Any]]) -> dict[str, str]:
    validated = [row for row in rows if "val/success" in row]
    if not validated:
        return {}
    first, last = validated[0], validated[-1]
    if first["step"] == 0 and last is not first:
        return {"Success before": _success(first), "Success after": _success(last)}
    return {"Success": _success(last)}


def _success(row: Mapping[str, Any]) -> str:
    success, low, high = (percent(row[f"val/success{end}"], 1) for end in ("", "_ci_low", "_ci_high"))
    over = f"{counted(row)}{reward_beside(row)}"
    return f"{success}  (95 %: {low} to {high}; {over}; step {row['step']})"


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
    listeners: Sequence[Subscriber] = (),
    interrupt: Interrupt | None = None,
) -> RunResult:
    """Train the experiment in ``path``, or try it out with the `debug` backbone.

    :param services: Names from ``--with``: registered services, or environments to serve (`astuner.runs.services`).
        They start before the tasks are read and stop at the end, also in a dry run.
    :param resume: ``auto`` resumes an unfinished run of the same config and otherwise starts over; ``must`` resumes
        the run in the run folder; ``never`` starts over. The folder of an earlier run is renamed, not deleted. A run
        resumes only with its original tasks, validation tasks, seed and shuffling.
    :param debug_tags: Tags of ``bp("TAG")`` calls that stop (`astuner.runs.breakpoints`).
    :param debug_listen: Wait for a debugger at breakpoints, even if the run has a terminal.
    :param listeners: Additional event subscribers.
    :param interrupt: Lets another thread stop the run.
    :raises ConfigError: The file or an override is invalid (all mistakes in one error), or the backbone does not
        support keys that are set.
    :raises Interrupted: The run was stopped with Ctrl-C; all finished work is saved.
    :raises RunError: The run cannot start or continue, for example because a download failed.
    """
    started = time.monotonic()
    bypass_proxies()  # before user modules are imported, which may create HTTP clients
    command = RunCommand(
        file=str(path),
        overrides=tuple(overrides),
        backbone=backbone,
        services=tuple(services),
        disabled_plugins=tuple(disabled_plugins),
    )
    debug: DebuggerPart | None = None
    given = [*overrides]
    if debug_tags or debug_listen:
        debugger: type[DebuggerPart] = registry.find_part(load_plugins(disabled_plugins), "debugger", wanted_by="--db")
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
        preflight.parts()
        if services:
            mistakes.raise_all()  # start no service for a config that is rejected
        trains = trainer is None or trainer.capabilities.trains
        run_dir = RunDir(config.run_dir if trains else debug_folder(config.run_dir))
        running = stack.enter_context(run_services(config, services, run_dir.path, dry_run=dry_run))
        mistakes.ask("", run_dir.check_usable)
        tasks = preflight.tasks(dry_run=dry_run)
        mistakes.raise_all()
        assert trainer is not None  # `raise_all` raised
        assert tasks is not None  # if one of them is None
        schedule = Schedule.of(
            config,
            steps=planned_steps(config, len(tasks.train)) if trains else 0,
            validation_tasks=len(tasks.validation),
        )
        timing = earlier_timing(run_dir, config, schedule) if trains else None
        is_timed = trains and not is_probe(run_dir.path)
        of_time = time_plan(timing, schedule, probe_command=command.probing()) if is_timed else {}
        plan = make_plan(config, trains, preflight.plan, run_dir.path, tasks, of_time)
        warnings = [f"warning: {text}" for text in preflight.warnings]
        if dry_run:
            expected = estimate(timing, schedule) if timing is not None else {}
            text = "\n".join([*warnings, str(plan)])
            return RunResult(run_dir=run_dir.path, plan=plan, estimate=expected, text=text)
        sinks = [*listeners, *(make() for make in preflight.make_sinks)]
        interrupt = interrupt or Interrupt()
        stack.enter_context(interrupt.listening())
        stack.enter_context(run_dir.locked())
        stack.enter_context(recorded_process(os.getpid(), f"astuner run {path}", run_dir.path))
        resume_from, note = prepare_run_dir(run_dir, config, trainer, resume, tasks, command)
        stack.enter_context(_explained(command, run_dir, trainer))  # also covers errors on closing
        training = TrainingRun(
            config,
            run_dir,
            tasks,
            runner=preflight.runner,
            sinks=sinks,
            interrupt=interrupt,
            resume_from=resume_from,
            resume_command=command.resuming() if trains else "",
            trains=trains,
            clock=RunClock(schedule, timing, started=started),
        )
        stack.callback(training.close)
        if debug is not None:
            debug.note = training.note
            stack.callback(debug.end)
        for line in (*preflight.notes, *warnings, stops, *running, note, str(plan)):
            if line:
                training.note(line)
        if not trains:
            trainer.train(training)
            return finish(training, trains=False)
        planned = RunPlanned(command=command.words(), config_file=config.path, plan=plan.lines, tasks=tasks.checked)
        training.publish(planned)
        with told_if_cut_short(training), with_next_step(command, run_dir, trainer):
            trainer.train(training)
        return finish(training, trains=True)


def probe(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    services: Sequence[str] = (),
    disabled_plugins: Sequence[str] = (),
    listeners: Sequence[Subscriber] = (),
) -> RunResult:
    """Train one to three steps of the experiment in ``path`` in a temporary folder, and return the plan with times.

    :raises ConfigError, RunError: As `run`.
    :raises Interrupted: The user stopped the probe.
    """
    options: dict[str, Any] = {"backbone": backbone, "services": services, "disabled_plugins": disabled_plugins}
    planned = run(path, overrides, dry_run=True, **options)
    if planned.plan is None or "time" not in planned.plan.lines:
        raise ConfigError("--probe measures training steps, but this backbone does not train; add --backbone local")
    folder, interrupt = probe_folder(planned.run_dir), Interrupt()
    with RunDir(folder).locked():  # not while another probe runs
        shutil.rmtree(folder, ignore_errors=True)
    config = load_config(path, overrides, backbone=backbone, disabled_plugins=disabled_plugins)
    validated = min(config.astuner.data.max_validation_tasks or PROBE_VALIDATION_TASKS, PROBE_VALIDATION_TASKS)
    short = [
        f"astuner.data.max_validation_tasks={validated}",
        "astuner.trainer_common.test_freq=never",
        "astuner.trainer_common.save_freq=never",
    ]
    command = RunCommand(file=str(path), overrides=tuple(overrides)).at(folder).overriding(*short)
    end = ProbeEnd(interrupt)
    try:
        run(path, command.overrides, resume="never", listeners=[*listeners, end], interrupt=interrupt, **options)
    except Interrupted:
        if not end.is_reached:
            raise
    finally:
        for weights in (RunDir(folder).resume, RunDir(folder).checkpoints):
            shutil.rmtree(weights, ignore_errors=True)
    return run(path, overrides, dry_run=True, **options)


def _lend(trainer: Backbone, notes: Sequence[str], command: str, resume: Resume, services: Sequence[str]) -> RunResult:
    """Run a part of another command's run: no tasks, no metrics, no lock on the run folder."""
    if resume != "auto":
        raise ConfigError(
            "--resume and --no-resume do not apply here: this command only serves a part of another run. "
            "Pass them to the command that started the run"
        )
    config = trainer.config
    folder = RunDir(config.run_dir.with_name(f"{config.run_dir.name}.lent"))  # never the run's own folder
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(run_services(config, services))
        interrupt = Interrupt()
        stack.enter_context(interrupt.listening())
        stack.enter_context(folder.locked())
        stack.enter_context(recorded_process(os.getpid(), command, folder.path))
        for line in (*notes, *running):
            _say(line)
        return RunResult(run_dir=config.run_dir, text=trainer.lend(folder.path, interrupt, _say))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _explained(command: RunCommand, run_dir: RunDir, trainer: Backbone) -> Iterator[None]:
    """Add the next step to errors of a full or failing disk, missing permissions, or a removed run folder."""
    try:
        yield
    except Exception as e:
        removed = "" if run_dir.is_whole() else f"its folder {run_dir.path} was removed. Start again: {command}"
        numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
        if not removed and getattr(e, "errno", None) not in numbers:
            if not isinstance(e, AstunerError):
                _describe_ending(e, run_dir, next_step(command, run_dir, trainer))
            raise
        if removed:
            raise RunError(f"the run stopped: {removed}") from e
        fix = f"{e}. Free disk space or fix the permissions, then {next_step(command, run_dir, trainer)}"
        raise RunError(f"the run stopped: {fix}") from e


def _describe_ending(error: Exception, run_dir: RunDir, what_next: str) -> None:
    """Write the traceback of an unexpected error to ``run.log``, and add the message for the command line to it."""
    with contextlib.suppress(OSError):
        with run_dir.log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(without_secrets("".join(traceback.format_exception(error))))
        why = describe_limit(error) or told(error).removesuffix(".")
        error.ending = f"the run stopped: {why}. The traceback is in {run_dir.log}; {what_next}"  # type: ignore[attr-defined]
