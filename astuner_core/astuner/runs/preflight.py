"""Check everything about an experiment before its first episode and report all mistakes together.

`astuner run`, ``astuner run --dry-run`` and `astuner config check` share these checks, so they accept and reject the
same configs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.config.capabilities import check_capabilities
from astuner.config.loaded import Mistakes
from astuner.config.loading import read_config
from astuner.contracts.building import BuildContext
from astuner.contracts.errors import ConfigError, EnvironmentFailed, PluginError, RunError
from astuner.plugins import registry
from astuner.rollout.credit import estimator_of, loss_of
from astuner.rollout.parts import build, build_task_reader
from astuner.rollout.rewards import check_rewards, may_lack_reward
from astuner.rollout.runner import EpisodeRunner
from astuner.runs.run import subscribers
from astuner.runs.tasks import TaskSet, tasks_of

if TYPE_CHECKING:
    from astuner.config import Config
    from astuner.contracts.backbone import Backbone
    from astuner.contracts.log_sink import LogSink
    from astuner.contracts.parts import DownloadsPart, TaskCheckPart


class Preflight:
    """Complete check of one experiment. The checked parts are kept for the run.

    :param only_look: Only check: the run may use another machine. What cannot be checked on this one is collected in
        `unchecked`: API keys that are not in the environment, and downloads.
    :raises ConfigError: The file cannot be read, or too little of it is valid.
    :raises RunError: A download failed. This is raised before slow imports.
    """

    def __init__(
        self,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        backbone: str | None = None,
        disabled_plugins: Sequence[str] = (),
        only_look: bool = False,
    ) -> None:
        config, told = read_config(path, overrides, backbone=backbone, disabled_plugins=disabled_plugins)
        if config is None:
            raise ConfigError(told)
        self.unchecked: list[str] = []
        self._only_look = only_look
        self.config = self._without_absent_keys(config) if only_look else config
        self.mistakes = Mistakes(self.config, told)
        self.notes = list(config.notes)
        self.warnings: list[str] = []
        """Probable mistakes, each with its place and a remedy."""
        self.runner = EpisodeRunner(self.config)
        self.make_sinks: Sequence[Callable[[], LogSink]] = ()
        self.plan: Mapping[str, str] = {}
        """Plan lines of the backbone (`astuner.contracts.backbone.Backbone.plan`)."""
        self._lacks_model = False
        """Whether a missing model was already reported."""
        self.backbone = self.mistakes.ask("astuner.backbone", self._find_backbone)
        """The backbone, or None if it cannot be used."""
        if self.backbone is not None:
            self._fetchable(self.backbone)

    def parts(self) -> None:
        """Check everything except the tasks. No service is needed, and nothing is opened."""
        self.mistakes.ask("", self.runner.prepare)
        if self.backbone is not None and self.backbone.capabilities.trains:
            self._objective()
        self._rewards()
        told = self.mistakes.ask("astuner.trainer_common.logger", self._sinks, needs=["astuner.telemetry"])
        wanted = ["astuner.policies", "astuner.rollout.max_model_len"]
        plan = self.mistakes.ask("astuner.model", self._plan, needs=wanted)
        self.make_sinks, self.plan = told or (), plan or {}

    def tasks(self, *, dry_run: bool) -> TaskSet | None:
        """Return the tasks, or None if they cannot be read.

        Also return None, without reading, if the config was already rejected and the task reader is user code: reading
        may have costs.

        :param dry_run: Do not generate tasks. Tasks are also not generated if a mistake was found before.
        """
        refused = bool(self.mistakes.told)
        if refused and not self._only_look and registry.is_code(self.config.astuner.task_reader.type or ""):
            return None
        return self.mistakes.ask("astuner.task_reader", lambda: self._tasks(dry_run or refused))

    def _find_backbone(self) -> Backbone:
        backbone = make_backbone(self.config)
        notes = self.mistakes.ask("", lambda: check_capabilities(self.config, backbone.capabilities))
        self.notes += notes or ()
        return backbone

    def _rewards(self) -> None:
        """Check that a reward exists. It is required for training; a try-out shows conversations without it."""
        try:
            check_rewards(self.config)
            if warning := may_lack_reward(self.config):
                self._warn("astuner.rollout.workflow", warning)
        except PluginError:
            pass  # a workflow that cannot be found is reported separately
        except ConfigError as e:
            if self.backbone is not None and self.backbone.capabilities.trains:
                self.mistakes.keep("astuner.task_judge.judge", e)
            else:
                self.notes.append(str(e))

    def _objective(self) -> None:
        for key, find in (("loss", loss_of), ("adv_estimator", estimator_of)):
            self.mistakes.ask(f"astuner.trainer_common.algorithm.{key}", partial(find, self.config))

    def _fetchable(self, backbone: Backbone) -> None:
        downloads: type[DownloadsPart] | None = registry.find_optional_part(self.config.plugins, "downloads")
        try:
            if downloads is not None:
                downloads().require(self.config, backbone.capabilities)
        except RunError as e:
            misspelt = "did you mean" in str(e)  # a near miss of an existing name is wrong on every machine
            if self._only_look and not misspelt:
                self.unchecked += str(e).splitlines()
                return
            self.mistakes.keep("", e)
            self._lacks_model = True
            if not misspelt:  # without the download, skip the slow imports
                self.mistakes.raise_all()

    def _plan(self) -> Mapping[str, str] | None:
        if self.backbone is None or self._lacks_model:
            return None
        try:
            if not self._only_look:
                return self.backbone.plan()
            self.backbone.check()
        except RunError:
            if not self._only_look:  # otherwise `_fetchable` has reported it
                raise
        return None

    def _tasks(self, dry_run: bool) -> TaskSet | None:
        reader = build_task_reader(self.config, dry_run=dry_run)
        if self._only_look and (where := reader.elsewhere):
            if not any("astuner.task_reader" in text for text in self.unchecked):  # already reported
                place = self.config.place("astuner.task_reader")
                self.unchecked.append(f"{place}: astuner.task_reader: the tasks are in {where} and were not read")
            return None
        try:
            tasks = tasks_of(reader, self.config)
            part: type[TaskCheckPart] | None = registry.find_optional_part(self.config.plugins, "task_check")
            found = part().look(self.config, tasks.train, tasks.validation) if part else {}
            self._warn_of_tasks(tasks, found)
            return replace(tasks, checked=found)
        except (RunError, EnvironmentFailed) as e:  # from a service that is not running during a check
            if not self._only_look:
                raise
            self.unchecked.append(str(e))
            return None

    def _warn_of_tasks(self, tasks: TaskSet, checked: Mapping[str, Any]) -> None:
        """Add warnings about the tasks of both splits and the batch size."""
        for alarm in checked.get("alarms", ()) if checked.get("leakage") != "allow" else ():
            self._warn(_validation_key(self.config), f"{alarm['message']}. {alarm['advice']}")
        key = "astuner.data.train_batch_size"
        size, train = self.config.astuner.data.train_batch_size, len(tasks.train)
        trains = self.backbone is not None and self.backbone.capabilities.trains
        if train and size > train and (trains or key in self.config.written):
            self._warn(
                key,
                f"{key} is {size}, but there are only {train} training tasks, so every step repeats tasks. Set it "
                f"to at most {train}, or add tasks; for more attempts per task, increase astuner.rollout.num_repeat",
            )

    def _warn(self, key: str, text: str) -> None:
        warning = f"{self.config.place(key)}: {text}"
        if warning not in self.warnings:
            self.warnings.append(warning)

    def _sinks(self) -> list[Callable[[], LogSink]]:
        names: str | Sequence[str] = self.config.astuner.trainer_common.logger
        names = [names] if isinstance(names, str) else list(names)
        sinks: list[Callable[[], LogSink]] = []
        context = BuildContext(config=self.config)
        for kind in subscribers(self.config):
            kind.check(self.config)
        for name in dict.fromkeys(["jsonl", *names]):  # metrics.jsonl in the run folder is always written
            section = self.config.section("log sink", name)
            self.config.resolve("log sink", name)  # raises if it cannot be found
            sinks.append(partial(build, "log sink", name, section, context))
        return sinks

    def _without_absent_keys(self, config: Config) -> Config:
        """Return the config without API keys that are not set in this environment, and record each in `unchecked`."""

        def asked(kind: str, sections: Mapping[str, Any]) -> dict[str, Any]:
            found = dict(sections)
            for name, section in sections.items():
                if section.api_key_env and not os.environ.get(section.api_key_env, "").strip():
                    found[name] = section.model_copy(update={"api_key_env": None})
                    self.unchecked.append(
                        f"astuner.{kind}.{name}.api_key_env: {section.api_key_env} is not set in this environment. Set "
                        "it where the run calls this model"
                    )
            return found

        a = config.astuner
        without = {"agents": asked("agents", a.agents)}
        if helpers := getattr(a, "helper_models", None):  # keys of a plugin
            without["helper_models"] = asked("helper_models", helpers)
        return replace(config, astuner=a.model_copy(update=without))


def _validation_key(config: Config) -> str:
    """Return the written key that locates the validation tasks, or the task reader's."""
    keys = sorted(key for key in config.written if key.startswith("astuner.task_reader.") and "validation" in key)
    return next(iter(keys), "astuner.task_reader")


def find_backbone(config: Config) -> tuple[Backbone, Sequence[str]]:
    """Return the chosen backbone, and notes on keys that it ignores.

    :raises ConfigError: The config sets keys that the backbone does not support (the capability contract).
    """
    backbone = make_backbone(config)
    return backbone, check_capabilities(config, backbone.capabilities)


def make_backbone(config: Config) -> Backbone:
    """Return the chosen backbone without checking its capabilities."""
    name = config.astuner.backbone
    backbone: Backbone = build("backbone", name, config.backbone_section(name), BuildContext(config=config))
    return backbone
