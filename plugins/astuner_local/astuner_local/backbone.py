"""The `local` backbone: engines and trainers for the weights of every policy, in this process.

An engine reads the same tensors that its trainer updates, so weights need no synchronization: a step rolls out, pauses
the engine, updates in place, and increments the policy version (`loop`).  Policies share weights that none of them
changes (`policy`).

torch is imported on first use, so that querying capabilities or reporting a missing model takes no time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from astuner import AgentRegistry
from astuner.contracts.backbone import Backbone, Capabilities, Served
from astuner.contracts.events import StalenessBounded
from astuner_local.settings import LocalSettings

if TYPE_CHECKING:
    from astuner import Config, RunDir
    from astuner.contracts.run import Run
    from astuner_local.engine.engine import Turns


class LocalBackbone(Backbone):
    """Backbone that trains on one machine, on a CPU or one GPU."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        policies=True,
        honours=frozenset({"model", "rollout", "trainer_common"}),
        only={
            "rollout.tensor_model_parallel_size": (1,),
            "rollout.name": (None, "local"),
            "rollout.top_p": (1,),
            "rollout.top_k": (-1,),
            "rollout.multi_turn.expected_steps": (1,),
            "trainer_common.nnodes": (1,),
            "trainer_common.n_gpus_per_node": (None, 0, 1),
            "trainer_common.ulysses_sequence_parallel_size": (1,),
            "trainer_common.fsdp_config.param_offload": (False,),
            "trainer_common.fsdp_config.optimizer_offload": (False,),
        },
        instead={
            "rollout.top_p": "the trainer uses log-probabilities of the full distribution; lower rollout.temperature",
            "rollout.top_k": "the trainer uses log-probabilities of the full distribution; lower rollout.temperature",
            "rollout.tensor_model_parallel_size": "the local backbone has one device; for more, use --backbone verl",
            "trainer_common.nnodes": "the local backbone is one process; for more, use --backbone verl or trinity",
        },
    )

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._engines = len(AgentRegistry.of(config.astuner).policies)

    @cached_property
    def _turns(self) -> Turns | None:
        from astuner_local.engine.engine import Turns

        return Turns() if self._engines > 1 else None

    def plan(self) -> Mapping[str, str]:
        from astuner_local.memory import estimate

        warm = LocalSettings.of(self.config).warm_start
        first = {"warm start": f"{warm.steps} steps on conversations from {warm.file}, lr {warm.lr:g}"} if warm else {}
        return {**first, **estimate(self.config)}

    def check(self) -> None:
        from astuner_local.memory import checked_config
        from astuner_local.warm_start import warm_start_of

        for policy in AgentRegistry.of(self.config.astuner).policies:
            checked_config(self.config, policy)
        warm_start_of(self.config)

    def saved_states(self, run_dir: RunDir) -> Iterable[tuple[Path, str]]:
        from astuner_local.trainer.checkpoint import saved_states

        return saved_states(run_dir.resume, run_dir.checkpoints)

    def has_saved_state(self, run_dir: RunDir) -> bool:
        from astuner_local.trainer.checkpoint import is_there

        return any(map(is_there, (run_dir.resume, run_dir.checkpoints)))

    @contextmanager
    def serve(self, model_path: str | None = None) -> Iterator[Served]:
        from astuner_local.modeling import load_model
        from astuner_local.policy import start_engine, threads

        loaded = load_model(self.config.astuner.model, path=model_path or self.config.locate_model())
        with threads(self.config, loaded):
            seed = f"{self.config.astuner.seed}/0"
            engine = start_engine(self.config, loaded, seed=seed, engines=self._engines, turns=self._turns)
            try:
                name = model_path or self.config.astuner.model.path
                yield Served(engine=engine, tokenizer=loaded.tokenizer, name=name)
            finally:
                engine.close()

    def train(self, run: Run) -> None:
        from astuner_local.loop import TrainingLoop, place, trainers
        from astuner_local.policy import running
        from astuner_local.trainer.checkpoint import read_checkpoint, restore
        from astuner_local.warm_start import warm_start_of, warm_up

        run.publish(StalenessBounded(most=0))  # engine and trainer share tensors
        warm, start = warm_start_of(self.config), run.resume_from
        if warm is not None and start is None:
            start = warm_up(run, warm)
        saved = read_checkpoint(start) if start else None
        done = saved.step if saved else 0
        total_steps = run.total_steps - (warm.steps if warm else 0)
        with running(self.config, done=done, total_steps=total_steps) as policies:
            learning = trainers(policies)
            if saved is not None:
                restore(saved, {place(policies, name): trainer for name, trainer in learning.items()})
                if run.resume_from:
                    run.restore(saved.state, done)
            for name in learning:
                with policies[name].engine.paused():
                    policies[name].engine.weights_updated(done)
            TrainingLoop(run, policies).run(done)
