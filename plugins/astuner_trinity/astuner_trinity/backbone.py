"""The `trinity` backbone: train an experiment with Trinity-RFT's explorer and trainer on a Ray cluster.

The core selects and weighs the training data, as on every backbone; Trinity coordinates rollouts and training.
`session` connects the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from astuner.contracts.backbone import Backbone, Capabilities, Served
from astuner.contracts.errors import RunError
from astuner.contracts.events import StalenessBounded, TokenizersLoaded
from astuner.contracts.types import DEFAULT_POLICY
from astuner_models.serving import load_tokenizer
from astuner_ray import step_states
from astuner_ray.cluster import ADDRESS_VARIABLE, Cluster, connected, worker_environ
from astuner_ray.native.host import disk_and_speed, host_plan
from astuner_ray.native.table import correction_plan
from astuner_ray.redirect import Redirect
from astuner_trinity import native
from astuner_trinity.facts import Facts, Platform, part_of, platform
from astuner_trinity.table import TABLE

if TYPE_CHECKING:
    from astuner import RunDir
    from astuner.contracts.interrupt import Interrupt
    from astuner.contracts.run import Run
    from astuner_trinity.session import Session

_DOES = {
    "explore": "owns the run and rolls out; the same command with trinity.mode=train lends it a trainer",
    "train": "lends a trainer to the same command with trinity.mode=explore, which owns the run",
}
"""Role of each of two commands that share a run."""


class TrinityBackbone(Backbone):
    """Backbone that trains with Trinity-RFT on a Ray cluster."""

    capabilities: ClassVar[Capabilities] = TABLE.capabilities

    def plan(self) -> Mapping[str, str]:
        facts = Facts.of(self.config)
        composed = native.compose(facts, platform().settings)
        notes, runners = composed.notes, composed.values["explorer"]["runner_per_model"] * facts.engines
        parts = {"this command": _DOES[part]} if (part := part_of(self.config)) else {}
        host = host_plan(facts.processes(runners), cpus=facts.reserved[1])
        more = {**host, **disk_and_speed(facts), **correction_plan(composed.common)}
        return {**parts, **facts.memory_plan(), **more, **({"trinity": "; ".join(notes)} if notes else {})}

    def native(self) -> Mapping[str, Any]:
        return native.compose(Facts.planned(self.config), platform().settings).as_dict()

    def saved_states(self, run_dir: RunDir) -> Iterable[tuple[Path, str]]:
        return step_states.saved(run_dir.resume / "trinity")

    def has_saved_state(self, run_dir: RunDir) -> bool:
        return step_states.is_there(run_dir.resume / "trinity")

    @contextmanager
    def serve(self, model_path: str | None = None) -> Iterator[Served]:
        machine = _prepared()
        facts = Facts.of(self.config, total_steps=1)
        redirect = Redirect(self.config.run_dir / "trinity" / "serve.log")
        with redirect.theirs():
            from astuner_trinity.engine import start_engine

            told = native.compose(facts, machine.settings).load(self.config.run_dir / "trinity")
            told.model.model_path = told.explorer.rollout_model.model_path = model = model_path or facts.model
        with redirect.theirs(), self._cluster(facts, told, machine, redirect.log, model=model):
            engine = start_engine(told, max_model_len=facts.max_model_len)
            with redirect.ours():
                yield Served(
                    engine=engine,
                    tokenizer=load_tokenizer(model, trust_remote_code=facts.a.model.trust_remote_code),
                    name=model_path or self.config.astuner.model.path,
                )

    def train(self, run: Run) -> None:
        self._check_shared()
        machine = _prepared()
        facts = Facts.of_run(run)
        composed = native.compose(facts, machine.settings)
        run.publish(StalenessBounded(most=facts.max_staleness))
        done, _ = step_states.restore(run)
        redirect = Redirect(run.run_dir.path / "trinity" / "trinity.log")
        with redirect.theirs():
            from astuner_trinity import launch  # imports Trinity, which prints a lot
            from astuner_trinity.session import Parts, Session

            told = composed.load(run.run_dir.path / "trinity")
        job = Path(told.checkpoint_job_dir)
        launch.rewind(job, done)
        needs: dict[str, Any] = {"model": facts.model, "writes": run.run_dir.path}
        with redirect.theirs(), self._cluster(facts, told, machine, redirect.log, **needs):
            launch.check_free(told)
            runners = told.explorer.runner_per_model * told.explorer.rollout_model.engine_num
            parts = Parts(
                runner=run.runner,
                environ=worker_environ(self.config),
                model=facts.model,
                max_model_len=facts.max_model_len,
                max_parallel=-(-facts.a.rollout.max_env_worker // runners),
                helper_names=facts.helper_names,
            )
            trusted = facts.a.model.trust_remote_code
            tokenizer = partial(load_tokenizer, facts.model, trust_remote_code=trusted)
            run.publish(TokenizersLoaded(load={DEFAULT_POLICY: tokenizer}))
            session = Session(
                run,
                parts,
                job=job,
                done=done,
                max_staleness=facts.max_staleness,
                cuts_stragglers=facts.a.rollout.oversample > 1 or told.explorer.dynamic_timeout.enable,
            )
            with self._borrower(facts, told, machine, session) as borrower:
                mini_batches = facts.a.trainer_common.mini_batch_num
                launch.run(session, told, redirect, mini_batches=mini_batches, borrower=borrower)

    @property
    def lends(self) -> bool:
        return part_of(self.config) == "train"

    def lend(self, folder: Path, interrupt: Interrupt, note: Callable[[str], None]) -> str:
        machine = _prepared()
        facts = Facts.of(self.config)
        self._check_shared()
        values = native.compose(facts, machine.settings).values
        redirect = Redirect(folder / "trinity.log")

        def say(text: str) -> None:
            with redirect.ours():
                note(text)

        with redirect.theirs():
            from astuner_trinity import lending  # imports Trinity

            namespace, set_up = str(values["ray_namespace"]), machine.worker_setup
            with connected(self.config, log=redirect.log, namespace=namespace, set_up=set_up) as cluster:
                return lending.lend(
                    values,
                    gpus=facts.training_gpus if facts.training_gpus <= facts.gpus else 0,
                    cluster=cluster,
                    interrupt=interrupt,
                    note=say,
                    log=redirect.log,
                )

    def _check_shared(self) -> None:
        """Check that two commands of a run can meet on a Ray cluster.

        :raises RunError: RAY_ADDRESS is not set.
        """
        part = part_of(self.config)
        if part and os.environ.get(ADDRESS_VARIABLE, "") in ("", "local"):
            raise RunError(
                f"trinity.mode is {part}, so two commands of a run must meet on a Ray cluster, but {ADDRESS_VARIABLE} "
                f"is not set. Run on one machine: ray start --head; on the other: ray start --address=HOST:6379; and "
                f"on both: export {ADDRESS_VARIABLE}=HOST:6379"
            )

    def _borrower(self, facts: Facts, told: Any, machine: Platform, session: Session) -> AbstractContextManager[Any]:
        """Return the source of a trainer from another command; None if this command makes it."""
        if not part_of(self.config):
            return nullcontext()
        from astuner_trinity.lending import Borrower

        values = native.compose(Facts.of(self.config), machine.settings).values
        folder = session.training.run_dir.path
        return Borrower(
            values,
            told,
            facts.a.trainer_common.mini_batch_num,
            done=lambda: f"{session.done} steps are trained; run folder: {folder}",
        )

    def _cluster(
        self, facts: Facts, told: Any, machine: Platform, log: Path, **needs: Any
    ) -> AbstractContextManager[Cluster]:
        """Connect to Ray with the variables that Trinity's own launcher sets in every process of a run."""
        gpus, cpus = facts.reserved
        return connected(
            self.config,
            env=told.get_envs(),
            gpus=gpus,
            cpus=cpus,
            logical_gpus=machine.logical_gpus and told.cluster.gpu_per_node,
            log=log,
            namespace=told.ray_namespace,
            set_up=machine.worker_setup,
            **needs,
        )


def _prepared() -> Platform:
    """Return the platform, after preparing this process for the import of Trinity."""
    machine = platform()
    module, _, name = machine.worker_setup.rpartition(".")
    if module:
        getattr(import_module(module), name)()
    return machine
