"""From a config file to a finished run: what `astuner run`, `eval` and `chat` do, as Python functions."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from astuner.backbone import Backbone, Served
from astuner.chat.codec import ChatCodec
from astuner.config import Config, load_config
from astuner.config.capabilities import check_capabilities
from astuner.curve import draw_reward_curve
from astuner.errors import CheckpointError, ConfigError, Interrupted, RunError
from astuner.experiment import Experiment
from astuner.interrupt import Interrupt
from astuner.log_sink import LogSink
from astuner.plan import Plan, make_plan
from astuner.plugins import load_plugins
from astuner.processes import register
from astuner.rollout.evaluation import Evaluation, evaluate_groups
from astuner.rollout.parts import build_task_reader
from astuner.rollout.pool import RolloutPool
from astuner.rollout.runner import EpisodeRunner
from astuner.run_dir import RunDir
from astuner.types import Episode, SamplingParams, Split, WorkflowTask

if TYPE_CHECKING:
    from astuner.service import Service

Resume = Literal["auto", "must", "never"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to."""

    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The newest value of every metric."""
    plan: Plan | None = None
    """Only of a dry run."""
    text: str = ""

    def summary(self) -> str:
        """For a person: success before and after, and where things are."""
        return self.text


def run(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    resume: Resume = "auto",
    dry_run: bool = False,
    services: Sequence[str] = (),
    disabled_plugins: Sequence[str] = (),
) -> RunResult:
    """Train, or with the `debug` backbone try out, the experiment in ``path``.

    :param resume: ``auto`` continues an unfinished run of the same config and otherwise starts over; ``must`` continues
        whatever is in the run folder; ``never`` starts over. An earlier run's folder is kept under another name.
    :raises ConfigError: the file, an override, or what this backbone cannot honour; all mistakes at once.
    :raises Interrupted: Ctrl-C; everything finished is saved.
    :raises RunError: the run cannot go on.
    """
    config = load_config(path, overrides, backbone=backbone, disabled_plugins=disabled_plugins)
    trainer = _backbone(config, disabled_plugins)
    notes = _check(config, trainer, disabled_plugins)
    # A trial without training must not touch a training run's folder.
    run_dir = RunDir(
        config.run_dir if trainer.capabilities.trains else config.run_dir.with_name(f"{config.run_dir.name}.debug")
    )
    plan = make_plan(config, trainer, disabled_plugins)
    if dry_run:
        return RunResult(run_dir=run_dir.path, plan=plan, text=str(plan))
    if problems := trainer.check():
        raise RunError("\n".join(problems))
    with contextlib.ExitStack() as stack:
        stack.enter_context(run_dir.locked())
        stack.enter_context(register(os.getpid(), f"astuner run {path}", run_dir.path))
        resume_from, note = _prepare_run_dir(run_dir, config, trainer, resume)
        interrupt = Interrupt()
        stack.enter_context(interrupt.listening())
        for service in _services(config, services, disabled_plugins):
            stack.enter_context(_running(service, interrupt))
        experiment = Experiment(
            config,
            run_dir,
            sinks=_open_sinks(config, run_dir, disabled_plugins),
            interrupt=interrupt,
            disabled_plugins=disabled_plugins,
            resume_from=resume_from,
        )
        try:
            for line in (*config.notes, *notes, note, str(plan)):
                if line:
                    experiment.note(line)
            trainer.train(experiment)
        except OSError as e:
            raise RunError(
                f"the run stopped: {e}; free space or mend permissions, then continue with: astuner run {path} --resume"
            ) from e
        finally:
            result = _finish(experiment, run_dir)
            experiment.close()
        return result


@contextlib.contextmanager
def serve(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    checkpoint: str = "latest",
    disabled_plugins: Sequence[str] = (),
) -> Iterator[tuple[Config, Served, ChatCodec]]:
    """Load a model of the experiment in ``path`` and answer until the block ends.

    :param checkpoint: ``latest`` of the run (the configured model if there is none), ``base``, or a folder.
    """
    config = load_config(path, overrides, backbone=backbone, disabled_plugins=disabled_plugins)
    model = find_checkpoint(config, checkpoint)
    trainer = _backbone(config, disabled_plugins)
    _check(config, trainer, disabled_plugins)
    with trainer.serve(str(model) if model else None) as served:
        yield config, served, make_codec(config, served.tokenizer)


def evaluate(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    backbone: str | None = None,
    checkpoint: str = "latest",
    tasks: int | None = None,
    repeat: int | None = None,
    disabled_plugins: Sequence[str] = (),
) -> Evaluation:
    """Success of a checkpoint on the validation tasks, with a 95 % interval."""
    with serve(
        path, overrides, backbone=backbone, checkpoint=checkpoint, disabled_plugins=disabled_plugins
    ) as served_as:
        config, served, codec = served_as
        runner = EpisodeRunner(config, disabled_plugins=disabled_plugins)
        runner.prepare()
        r = config.astuner.rollout
        sampling = SamplingParams(
            max_tokens=r.max_response_length_in_one_turn,
            temperature=r.val_kwargs.temperature,
            top_p=r.val_kwargs.top_p,
            top_k=r.val_kwargs.top_k,
            stop_token_ids=codec.stop_token_ids,
        )

        async def run_episode(workflow_task: WorkflowTask) -> Episode:
            return await runner.run(workflow_task, served.engine, codec, sampling)

        reader = build_task_reader(config, disabled_plugins)
        held_out = list(reader.read(Split.VALIDATION))[: tasks or config.astuner.data.max_validation_tasks]
        if not held_out:
            raise ConfigError(
                f"{config.path}: the task reader yields no validation tasks, so there is nothing to evaluate on"
            )
        n = repeat or r.val_kwargs.num_repeat
        pool = RolloutPool(run_episode, max_parallel=r.max_env_worker)
        draws = [(f"v{i:05d}", task) for i, task in enumerate(held_out)]
        return evaluate_groups(asyncio.run(pool.run_groups(draws, repeat=n, split=Split.VALIDATION)), repeat=n)


def make_codec(config: Config, tokenizer: Any) -> ChatCodec:
    """The chat codec of an experiment: the tokenizer's template unless the config names a file."""
    template = config.astuner.model.chat_template
    if template is not None:
        file = config.base_dir / template
        try:
            template = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"astuner.model.chat_template: cannot read {file}: {e}") from None
    return ChatCodec(tokenizer, chat_template=template, disable_tool_calls=config.astuner.rollout.disable_tool_calls)


def find_checkpoint(config: Config, checkpoint: str) -> Path | None:
    """The model folder that ``latest``, ``base`` or a path means; None is the configured model."""
    if checkpoint == "base":
        return None
    if checkpoint == "latest":
        saved = sorted(p for p in RunDir(config.run_dir).checkpoints.glob("step-*") if (p / "config.json").is_file())
        return saved[-1] if saved else None
    folder = Path(checkpoint)
    if not (folder / "config.json").is_file() and not (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} is not a model folder (no config.json); write latest, base, or a folder such as "
            "…/checkpoints/step-000050"
        )
    return folder


def _backbone(config: Config, disabled_plugins: Sequence[str]) -> Backbone:
    backbone: Backbone = config.resolve("backbone", config.astuner.backbone, disabled_plugins)(config)
    return backbone


def _check(config: Config, backbone: Backbone, disabled_plugins: Sequence[str]) -> Sequence[str]:
    """The capability contract: raises for keys that would be ignored; returns notes on those that have no use here."""
    return check_capabilities(config, backbone.capabilities, plugins=load_plugins(disabled_plugins))


def _prepare_run_dir(run_dir: RunDir, config: Config, trainer: Backbone, resume: Resume) -> tuple[Path | None, str]:
    """Continue or start over: (state to resume from, a note for the person)."""
    saved = trainer.latest_state(run_dir.resume)
    unfinished = not run_dir.summary.exists()
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
    RunDir.write_atomically(run_dir.resolved, config.dump_yaml())
    return None, f"the earlier run's folder is now {moved}" if moved else ""


def _comparable(text: str) -> Any:
    """A resolved config without what may change between a run and its continuation."""
    data = yaml.safe_load(text) or {}
    data.pop("resolved", None)  # which keys were written, and where
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
    ):
        common.pop(key, None)
    return data


def _open_sinks(config: Config, run_dir: RunDir, disabled_plugins: Sequence[str]) -> list[LogSink]:
    names = config.astuner.trainer_common.logger
    names = [names] if isinstance(names, str) else list(names)
    sinks = []
    for name in dict.fromkeys(["jsonl", *names]):  # the run folder's own metrics.jsonl is always written
        target = config.resolve("log sink", name, disabled_plugins)
        section = config.section("log sink", name)
        sink = target(section) if section is not None else target()
        sink.open(run_dir.path, config.experiment_name, config.as_dict())
        sinks.append(sink)
    return sinks


def _services(config: Config, names: Sequence[str], disabled_plugins: Sequence[str]) -> list[Service]:
    return [config.resolve("service", name, disabled_plugins)(config.section("service", name)) for name in names]


@contextlib.contextmanager
def _running(service: Service, interrupt: Interrupt, timeout: float = 600.0) -> Iterator[None]:
    """Start a service, wait until it answers, stop it at the end, whatever happens."""
    import time

    try:
        service.start()
        deadline = time.monotonic() + timeout
        while not service.is_ready():
            if interrupt.requested:
                raise Interrupted("stopped on request while a service was starting")
            if time.monotonic() > deadline:
                raise RunError(f"{type(service).__name__} did not answer within {timeout:g} s; see its log")
            time.sleep(0.2)
        yield
    finally:
        service.stop()


def _finish(experiment: Experiment, run_dir: RunDir) -> RunResult:
    """Write the summary and the curve; also after a failure, from what there is."""
    rows = run_dir.read_metrics()
    newest: dict[str, float] = {}
    for row in rows:
        newest.update({k: v for k, v in row.items() if k not in ("step", "time")})
    validated = [row for row in rows if "val/success" in row]
    lines = []
    if validated:
        lines.append(f"held-out success  before  {_success(validated[0])}")
    if len(validated) > 1:
        lines.append(f"                  after   {_success(validated[-1])}")
    checkpoints = sorted(run_dir.checkpoints.glob("step-*"))
    endings = ", ".join(f"{name} {count}" for name, count in sorted(experiment.ledger.counts.items()) if count)
    lines += [
        f"episodes          {endings or 'none'}",
        f"reward curve      {draw_reward_curve(rows, run_dir.curve) if rows else 'no step was finished'}",
        f"conversations     {run_dir.episodes}",
        f"model             {checkpoints[-1] if checkpoints else 'none saved'}",
        f"run folder        {run_dir.path}",
    ]
    if rows and max(row["step"] for row in rows) >= experiment.total_steps:
        run_dir.write_json(run_dir.summary, {"metrics": newest, "ledger": dict(experiment.ledger.counts)})
    return RunResult(run_dir=run_dir.path, metrics=newest, text="\n".join(lines))


def _success(row: Mapping[str, Any]) -> str:
    low, high = row["val/success_ci_low"], row["val/success_ci_high"]
    return (
        f"{row['val/success']:.1%}  (95 %: {low:.1%} to {high:.1%}, {row['val/tasks']:.0f} tasks, step {row['step']})"
    )
