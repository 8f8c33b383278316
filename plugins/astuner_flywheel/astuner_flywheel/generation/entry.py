"""Where a generation begins: from an experiment's config to a finished folder.

The command and the task reader both come in here.  Invariant: a folder that is finished for the same material and
settings is never worked on again, and one that is not is left so that the same command goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from astuner.config import Config
from astuner.contracts.errors import ConfigError, DataError, Interrupted
from astuner_flywheel.generation import prompts
from astuner_flywheel.generation.config import DataGenerationConfig
from astuner_flywheel.generation.folder import Folder
from astuner_flywheel.generation.luck import NothingAccepted
from astuner_flywheel.generation.making import Making
from astuner_flywheel.generation.material import Material, gather
from astuner_flywheel.generation.plan import GenerationPlan, plan
from astuner_flywheel.generation.result import report, result_settings, write_result
from astuner_flywheel.generation.standing import Standing
from astuner_helpers import BudgetSpent, Helper, HelperFailed, HelperModels
from astuner_helpers.settings import HelperModelKeys

READER = "data_generation"
WHERE = f"astuner.task_reader.{READER}"

_FREE = {
    "tasks", "validation_share", "use_seeds", "leak_threshold", "folder", "documents", "seeds", "on_bad_document",
    "helper_model", "rounds", "max_file_mb", "max_pages", "max_characters", "max_seconds", "max_memory_mb",
}  # fmt: skip
"""Keys that may change while a folder is worked on; documents and samples count by their content."""


class Generation:
    """One experiment's generation.

    :param say: called with what is being done, a line at a time, while documents are read.
    :param progress: called with how far it is whenever something has happened while tasks are made.
    :param tell: called with what a person should know meanwhile, once each.
    :param again: what a person types to go on; None: the command, with the experiment's file alone.
    """

    def __init__(
        self,
        config: Config,
        *,
        say: Callable[[str], None] = lambda _: None,
        progress: Callable[[Standing], None] = lambda _: None,
        tell: Callable[[str], None] = lambda _: None,
        again: str | None = None,
    ) -> None:
        section = config.section("task reader", READER)
        if section is None:
            raise ConfigError(
                f"{config.path} has no data generation; add {WHERE} with helper_model, and documents or seeds"
            )
        self._config, self._say, self._progress, self._tell = config, say, progress, tell
        self._again = again or f"astuner data generate {config.path}"
        self.section: DataGenerationConfig = section
        self.folder = Folder(folder_of(config, section))
        self._earlier: Path | None = None

    def plan(self, *, fresh: bool = False) -> GenerationPlan:
        """What `run` would do, ask and take; asks nobody and writes nothing.

        :raises ConfigError: as `run`; or there is no such helper model.
        :raises RunError: another process is at work in the folder.
        """
        self.folder.check_free()
        models, name = self._models(), self.section.helper_model
        if name not in models.names:
            models.get(name, where=f"{WHERE}.helper_model")
        material, there, done = self._gather(None), None, False
        if not fresh and self.folder.check(self._fingerprint(material), self._again) is not None:
            there, done = self.folder, self._is_done(self.folder.read_report())
        notes = []
        try:
            models.get(name, where=f"{WHERE}.helper_model")
        except ConfigError as e:
            notes.append(f"{e}: a start would be refused")
        if fresh and self.folder.read_about() is not None:
            notes.append(f"what is in {self.folder.path} would be kept in a folder earlier-… in it")
        return plan(
            self.section,
            material,
            self._config.keys_of(HelperModelKeys).helper_models[name],
            Standing(self.section, material, there),
            finished=done,
            folder=self.folder.path,
            used=models.usage()[name],
            notes=notes,
        )

    def run(self, *, fresh: bool = False) -> dict[str, Any]:
        """Make the tasks that are missing; the report.

        :param fresh: start over; what is in the folder is kept in a folder in it.
        :raises ConfigError: the folder's tasks were made from something else.
        :raises astuner_helpers.BudgetSpent: the budget is reached; says how to go on.
        :raises astuner_helpers.HelperFailed: the helper gives no answers; says how to go on.
        :raises NothingAccepted: the helper answers, and no task comes of it; says how to go on.
        :raises Interrupted: Ctrl-C; says how to go on.
        """
        with self.folder.locked():
            self._earlier = self.folder.start_over() if fresh else None
            material = self._gather(self.folder.documents)
            secret = self.folder.begin(self._fingerprint(material), self._again)
            if self._is_done(done := self.folder.read_report()):
                return done
            return self._make(material, secret)

    def finished(self) -> dict[str, Any]:
        """The report of tasks that are made already; asks nobody and writes nothing.

        :raises DataError: they are not made yet, or others were.
        """
        done = self.folder.read_report()
        if not self._is_done(done):
            raise DataError(
                f"{self.folder.path} holds no finished set of tasks, and a dry run asks no model; type first: "
                f"astuner data generate {self._config.path} (what that would take: --dry-run)"
            )
        return done

    def _make(self, material: Material, secret: str) -> dict[str, Any]:
        models = self._models()
        helper = models.get(self.section.helper_model, where=f"{WHERE}.helper_model")
        embedder: Helper | None = None
        if (meaning := self.section.near_in_meaning) is not None:
            embedder = models.get(meaning.helper_model, where=f"{WHERE}.near_in_meaning.helper_model")
        helpers = list(dict.fromkeys(h for h in (helper, embedder) if h is not None))
        making = Making(self.section, material, self.folder, helper, embedder, secret, self._progress, self._tell)
        stopped: BaseException | None = None
        try:
            run(making.run())
        except (BudgetSpent, HelperFailed, NothingAccepted, KeyboardInterrupt) as e:
            stopped = e
        sides = None if stopped else write_result(self.section, material, self.folder, making.standing)
        why = "" if stopped is None else str(stopped) or "Ctrl-C"
        found = report(self.section, material, making, helpers, sides=sides, stopped=why)
        if self._earlier is not None:
            found["earlier"] = str(self._earlier)
        self.folder.write_report(found)
        if stopped is None:
            return found
        made = f"{len(making.standing.accepted)} of {self.section.tasks} tasks"
        kept = f"{why}\n{made} are kept in {self.folder.path}; go on with: {self._again}"
        if isinstance(stopped, BudgetSpent):
            raise BudgetSpent(kept) from None
        if isinstance(stopped, NothingAccepted):
            raise NothingAccepted(kept) from None
        raise (Interrupted(kept) if isinstance(stopped, KeyboardInterrupt) else HelperFailed(kept)) from None

    def _models(self) -> HelperModels:
        return HelperModels(self._config.keys_of(HelperModelKeys).helper_models, scope=str(self.folder.path))

    def _is_done(self, report: Mapping[str, Any]) -> bool:
        return bool(report.get("finished") and report["settings"] == result_settings(self.section))

    def _gather(self, kept: Path | None) -> Material:
        return gather(self.section, self._config.base_dir, kept, self._say)

    def _fingerprint(self, material: Material) -> dict[str, Any]:
        helper = self._config.keys_of(HelperModelKeys).helper_models.get(self.section.helper_model)
        model = helper.model if helper is not None else None  # None is an error further on, which says more
        section = self.section.model_dump(mode="json", exclude=_FREE)
        return {**material.fingerprint(), "model": model, "prompts": prompts.VERSION, **section}


def folder_of(config: Config, section: DataGenerationConfig) -> Path:
    """Where an experiment's generated tasks are."""
    return config.base_dir / Path(section.folder or f"generated/{config.experiment_name}").expanduser()


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run it to its end, in a thread of its own where this one has an event loop that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(work)
        return
    raised: list[BaseException] = []

    def inside() -> None:
        try:
            asyncio.run(work)
        except BaseException as e:  # it is raised again in the thread that waits
            raised.append(e)

    thread = threading.Thread(target=inside, name="astuner-generation")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
