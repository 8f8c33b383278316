"""GRPO steps of the `local` backbone, one at a time.

The step is the backbone's own (roll out, assign credit, pause the engine, update in place), built from the same
parts, so that it can be stopped between steps and its two halves be timed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from astuner import Generation, InferenceEngine, RunDir, Sample, load_config, make_codec
from astuner.chat.codec import ChatCodec
from astuner.config import Config
from astuner.contracts.types import SamplingParams
from astuner.rollout.models import one_model
from astuner.runs.run import TrainingRun
from astuner.runs.tasks import read_tasks
from astuner_local.engine.engine import LocalEngine
from astuner_local.trainer.trainer import PolicyTrainer
from benchmarks.models import load

REPOSITORY = Path(__file__).resolve().parent.parent
MATH_AGENT = REPOSITORY / "examples" / "math_agent"
AGENTSCOPE = f"{MATH_AGENT / ('agentscope1.py' if version('agentscope') < '2' else 'workflow.py')}->MathAgentWorkflow"
"""Math agent for the installed AgentScope."""
JUDGE = "astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge"
LEARNING_RATE = 1e-6
"""Learning rate so small that the policy and the lengths of its answers stay the same."""


def make_config(
    folder: Path,
    model: str | Path,
    *,
    workflow: str,
    judge: str | None = None,
    groups: int = 8,
    group_size: int = 8,
    max_new_tokens: int,
    max_added_tokens: int | None = None,
    skip_zero_advantage: bool = True,
    dtype: str = "float32",
) -> Config:
    """Return the configuration of an experiment on the benchmark's tasks.

    :param max_new_tokens: Limit of one model call.
    :param max_added_tokens: Limit of an episode after its first prompt, including tool results.
    :param skip_zero_advantage: Skip samples without a gradient, as by default.
    """
    astuner: dict[str, Any] = {
        "model": {"path": str(model), "dtype": dtype, "device": "cpu"},
        "data": {"train_batch_size": groups, "max_response_length": max_added_tokens},
        "rollout": {
            "workflow": workflow,
            "num_repeat": group_size,
            "max_response_length_in_one_turn": max_new_tokens,
            "max_env_worker": groups * group_size,
            "compute_madness_checklist": [],
        },
        "task_reader": {"type": "benchmarks.agents->Problems"},
        "task_judge": {"judge": judge},
        "trainer_common": {
            "total_epochs": 10**6,
            "save_episodes": 0,
            "algorithm": {
                "loss_agg_mode": "token-mean",
                "clip_ratio_high": 0.28,
                "filter_zero_advantage": skip_zero_advantage,
            },
            "optim": {"optimizer": "adamw", "lr": LEARNING_RATE},
        },
    }
    path = folder / "benchmark.yaml"
    path.write_text(yaml.safe_dump({"astuner": astuner}), encoding="utf-8")
    return load_config(path, backbone="local")


@dataclass
class StepCount:
    """Measurements of one step."""

    episodes: int
    prompt_tokens: int
    """Tokens of the first prompts."""
    added_tokens: int
    """Tokens after the first prompt, from the model and its tools."""
    model_tokens: int
    """Tokens after the first prompt, from the model only."""
    rollout_cpu: float
    """CPU seconds."""
    train_cpu: float


@dataclass
class LocalSteps:
    """Trainer of single steps; `counts` has their measurements.

    :param forced: Generate exactly the configured length: no token ends an answer.
    """

    config: Config
    folder: Path
    forced: bool = False
    counts: list[StepCount] = field(default_factory=list)

    def __post_init__(self) -> None:
        a = self.config.astuner
        run_dir = RunDir(self.folder / "run")
        run_dir.start()
        self.experiment = TrainingRun(self.config, run_dir, read_tasks(self.config))
        model, tokenizer = load(a.model.path, a.model.dtype)
        self.codec: ChatCodec = make_codec(self.config, tokenizer)
        self.engine = make_engine(model, () if self.forced else (tokenizer.eos_token_id,), a.rollout.max_env_worker)
        self.trainer = PolicyTrainer(
            model, a.trainer_common, temperature=a.rollout.temperature, device="cpu", total_optimizer_steps=10**9
        )

    @property
    def asked(self) -> InferenceEngine:
        """Return the engine that rollouts use."""
        return _Unending(self.engine) if self.forced else self.engine

    def __call__(self) -> None:
        started = time.process_time()
        number = len(self.counts) + 1
        rollout = self.experiment.rollout(one_model(self.asked, self.codec), number)
        samples, _ = self.experiment.credit(rollout, policy_version=number - 1)
        rolled_out = time.process_time()
        with self.engine.paused():
            self.trainer.update(samples)
            self.engine.weights_updated(number)
        trained = time.process_time()
        prompts = sum(list(s.loss_mask).index(1) for s in samples)
        self.counts.append(
            StepCount(
                episodes=len(rollout.scored),
                prompt_tokens=prompts,
                added_tokens=sum(len(s.input_ids) for s in samples) - prompts,
                model_tokens=sum(s.trained_tokens for s in samples),
                rollout_cpu=rolled_out - started,
                train_cpu=trained - rolled_out,
            )
        )

    def close(self) -> None:
        self.engine.close()
        self.experiment.close()


def make_engine(model: Any, eos_token_ids: Sequence[int], sequences: int) -> LocalEngine:
    """Return an engine that decodes up to ``sequences`` sequences concurrently."""
    return LocalEngine(model, tokenizer_eos_ids=eos_token_ids, max_num_seqs=sequences)


def collect_samples(model: str | Path, *, groups: int, group_size: int) -> list[Sample]:
    """Return all samples of one step of the plain calculator agent, with advantages."""
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(
            Path(folder),
            model,
            workflow="benchmarks.agents->CalculatorLoop",
            groups=groups,
            group_size=group_size,
            max_new_tokens=40,
        )
        steps = LocalSteps(config, Path(folder))
        try:
            rollout = steps.experiment.rollout(one_model(steps.engine, steps.codec), 1)
            return steps.experiment.credit(rollout, policy_version=0)[0]
        finally:
            steps.close()


class _Unending(InferenceEngine):
    """Return the same engine without stop tokens, so that every generation has the maximum length."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.max_model_len = engine.max_model_len

    async def generate(self, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = "") -> Generation:
        return await self._engine.generate(prompt_ids, replace(sampling, stop_token_ids=()), session=session)
