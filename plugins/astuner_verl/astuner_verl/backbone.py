"""The `verl` backbone: train an experiment with VERL's trainer and rollout engines on a Ray cluster.

The core selects and weighs the training data, as on every backbone; VERL stores, updates and serves the weights.
`session` connects the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from astuner.contracts.backbone import Backbone, Capabilities, InferenceEngine, Served
from astuner.contracts.events import Note, StalenessBounded, StepEnded
from astuner_models.serving import load_tokenizer
from astuner_ray import step_states
from astuner_ray.cluster import Cluster, connected, worker_environ
from astuner_ray.fleet import Fleet
from astuner_ray.native.host import disk_and_speed, host_plan
from astuner_ray.native.table import correction_plan
from astuner_ray.redirect import Redirect
from astuner_verl import native, reserved, separate
from astuner_verl.facts import Facts
from astuner_verl.native import Native, platform_settings
from astuner_verl.table import TABLE

if TYPE_CHECKING:
    from astuner import RunDir
    from astuner.contracts.run import Run


class VerlBackbone(Backbone):
    """Backbone that trains with VERL on a Ray cluster."""

    capabilities: ClassVar[Capabilities] = TABLE.capabilities

    def plan(self) -> Mapping[str, str]:
        facts = Facts.of(self.config)
        composed = native.compose(facts, platform_settings())
        told, notes = composed.config, composed.notes
        host = host_plan(reserved.processes(told), cpus=reserved.training_cpus(told))
        more = {**host, **disk_and_speed(facts), **correction_plan(composed.common)}
        return {**facts.memory_plan(), **more, **({"verl": "; ".join(notes)} if notes else {})}

    def native(self) -> Mapping[str, Any]:
        return native.compose(Facts.planned(self.config), platform_settings()).as_dict()

    def saved_states(self, run_dir: RunDir) -> Iterable[tuple[Path, str]]:
        return step_states.saved(run_dir.resume)

    def has_saved_state(self, run_dir: RunDir) -> bool:
        return step_states.is_there(run_dir.resume)

    @contextmanager
    def serve(self, model_path: str | None = None) -> Iterator[Served]:
        facts = Facts.of(self.config)
        composed = native.compose(facts, platform_settings())
        told, model = composed.config, model_path or facts.model
        told.actor_rollout_ref.model.path = model
        redirect = Redirect(self.config.run_dir / "verl" / "serve.log")
        with redirect.theirs():
            from verl.workers.rollout.llm_server import LLMServerManager

            _ready(composed)
        nodes, gpus = separate.serving_gpus(told)
        cpus = reserved.serving_cpus(told)
        with self._cluster(told, redirect.log, gpus=nodes * gpus, cpus=cpus, model=model):
            rollout = told.actor_rollout_ref.rollout
            rollout.nnodes, rollout.n_gpus_per_node = nodes, gpus
            rollout.load_format = "auto"  # the weights come from the model's folder, not from a trainer
            with redirect.theirs():
                client = LLMServerManager.create(config=told).get_client()  # they end with the Ray connection
                with redirect.ours():
                    yield Served(
                        engine=_engine(told, facts, client)(),
                        tokenizer=load_tokenizer(model, trust_remote_code=facts.a.model.trust_remote_code),
                        name=model_path or self.config.astuner.model.path,
                    )

    def train(self, run: Run) -> None:
        facts = Facts.of_run(run)
        composed = native.compose(facts, platform_settings())
        told = composed.config
        if told.trainer.v1.trainer_mode == "sync":
            run.publish(StalenessBounded(most=0))  # rollouts and training take turns
        done, saved = step_states.restore(run)
        if saved:
            told.trainer.resume_mode = "resume_path"
            told.trainer.resume_from_path = str(run.resume_from)
            told.trainer.val_before_train = run.is_due("test", done)
        redirect = Redirect(run.run_dir.path / "verl" / "verl.log")
        with redirect.theirs():
            from astuner_verl.session import Session  # imports verl, which prints a lot

            _ready(composed)
        needed = separate.training_gpus(told)
        needs: dict[str, Any] = {"gpus": needed, "cpus": reserved.training_cpus(told), "model": facts.model}
        with self._cluster(told, redirect.log, **needs, writes=run.run_dir.path) as cluster:
            if not facts.is_written("trainer_common.n_gpus_per_node") and cluster.gpus > max(
                needed, facts.gpus * cluster.nodes
            ):
                text = (
                    f"{cluster}, but the run uses {facts.gpus} GPUs per machine, as many as this machine has; to use "
                    "more, set astuner.trainer_common.n_gpus_per_node"
                )
                run.publish(Note(text=text))
            environ = worker_environ(self.config)

            def fleet(client: Any) -> Fleet:
                return Fleet(
                    run.runner,
                    _engine(told, facts, client),
                    workers=told.actor_rollout_ref.rollout.agent.num_workers,
                    environ=environ,
                    model=facts.model,
                    note=lambda text: run.publish(Note(text=text)),
                )

            session = Session(run, composed, redirect, done=done)
            if (
                unlogged := saved.get("unlogged")
            ) and not any(  # by verl, or by an earlier run that continued from here
                row["step"] == done and "time/rollout" in row for row in run.run_dir.read_metrics()
            ):
                run.publish(StepEnded(step=done, metrics=unlogged))
            session.run(fleet)

    def _cluster(self, told: DictConfig, log: Path, **needs: Any) -> AbstractContextManager[Cluster]:
        """Connect to Ray with the variables that VERL's own launcher sets in every process of a run."""
        from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

        env = {**get_ppo_ray_runtime_env(told)["env_vars"], "TRANSFER_QUEUE_ENABLE": "1"}
        logical_gpus = OmegaConf.select(told, separate.LENT)  # set by a platform without GPUs
        return connected(self.config, env=env, logical_gpus=logical_gpus, log=log, **needs)


def _engine(told: DictConfig, facts: Facts, client: Any) -> Callable[[], InferenceEngine]:
    """Return a factory of engines for any process; VERL starts SGLang without a tokenizer, so no stop strings there."""
    from astuner_verl.engine import VerlEngine

    strings = told.actor_rollout_ref.rollout.name != "sglang"
    return partial(VerlEngine, client, max_model_len=facts.max_model_len, strings=strings)


def _ready(composed: Native) -> None:
    """Apply the settings that VERL's own launcher would set last, and check the configuration.

    :raises ConfigError: VERL rejects it.
    """
    from verl.utils.device import auto_set_device

    auto_set_device(composed.config)
    native.check(composed)
    composed.config.transfer_queue.enable = True
    OmegaConf.resolve(composed.config)
