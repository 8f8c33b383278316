"""The faults, what each changes, and which rules may be raised for it. Written down before the runs were looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from astuner import JudgeOutput
from tests.planted.agent import Attempt, Behaviour, use_calculator

T = "astuner.trainer_common"
R = "astuner.rollout"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault that is planted in a run."""

    changes: str
    """For a reader: what is wrong."""
    overrides: Sequence[str] = ()
    behaviour: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `tests.planted.agent.Behaviour`."""
    patch: Callable[[int], AbstractContextManager[Any]] = lambda seed: nullcontext()
    """Changes inside the backbone, where no key and no agent can plant the fault; of the run's seed."""
    named: Sequence[str] = ()
    """Rules of which one must be raised; none: the cause cannot be known from the numbers, so silence is right."""
    allowed: Sequence[str] = ()
    """Rules that state a true symptom of it, and may be raised as well."""


def paid(attempt: Attempt, reward: float) -> JudgeOutput:
    return JudgeOutput(reward=reward, is_success=attempt.right)


def since(start: float, change: Callable[[Attempt], JudgeOutput]) -> Callable[[Attempt], JudgeOutput]:
    """Judge right until a share of the run has passed."""
    return lambda a: change(a) if a.trains and a.share > start else paid(a, float(a.right))


def shifted(tasks: list[dict[str, Any]], trains: bool) -> list[dict[str, Any]]:
    answers = [task["answer"] for task in tasks]
    return [{**task, "answer": answer} for task, answer in zip(tasks, answers[1:] + answers[:1], strict=True)]


def mostly_impossible(tasks: list[dict[str, Any]], trains: bool) -> list[dict[str, Any]]:
    return [task if n % 10 == 0 else {**task, "answer": "unknowable"} for n, task in enumerate(tasks)]


def half_wrong(tasks: list[dict[str, Any]], trains: bool) -> list[dict[str, Any]]:
    if not trains:
        return tasks
    return [task if n % 2 else {**task, "answer": str(int(float(task["answer"])) + 1)} for n, task in enumerate(tasks)]


def larger(tasks: list[dict[str, Any]], trains: bool) -> list[dict[str, Any]]:
    """Ask for other answers in validation: one more than the right one."""
    return tasks if trains else [{**task, "answer": str(float(task["answer"]) + 0.5)} for task in tasks]


def told(task: Mapping[str, Any], trains: bool) -> str:
    return f"{task['question']} {task['answer']}" if trains else str(task["question"])


def answer_alone(task: Mapping[str, Any], trains: bool) -> str:
    return str(task["answer"]) if trains else str(task["question"])


def cheating(attempt: Attempt, expression: str) -> str:
    return str(attempt.task["answer"]) if attempt.trains else use_calculator(expression)


def broken_service(attempt: Attempt, expression: str) -> str:
    return "error: service unavailable" if attempt.share > 0.5 else use_calculator(expression)


def raising(start: float, share: float) -> Callable[[Attempt, str], str]:
    def tool(attempt: Attempt, expression: str) -> str:
        if attempt.trains and attempt.share > start and attempt.draw.random() < share:
            raise TimeoutError("the tool's service did not answer within 30 s")
        return use_calculator(expression)

    return tool


def nan_for_some(attempt: Attempt) -> JudgeOutput:
    return paid(attempt, math.nan if attempt.trains and attempt.draw.random() < 0.2 else float(attempt.right))


def outliers(attempt: Attempt) -> JudgeOutput:
    return paid(attempt, 1e4 if attempt.trains and attempt.draw.random() < 0.02 else float(attempt.right))


def noisy(attempt: Attempt) -> JudgeOutput:
    return paid(attempt, float(attempt.right != (attempt.trains and attempt.draw.random() < 0.15)))


def dead_helper(attempt: Attempt) -> JudgeOutput:
    if attempt.trains and attempt.share > 0.5 and attempt.draw.random() < 0.4:
        raise ConnectionError("the helper model refuses connections")
    return paid(attempt, float(attempt.right))


@contextmanager
def equal_seeds(seed: int) -> Iterator[None]:
    """Give all attempts at a prompt one seed."""
    from astuner_local.engine import LocalEngine

    generate = LocalEngine.generate

    async def seeded(self: Any, prompt: Sequence[int], given: Any, **options: Any) -> Any:
        return await generate(self, prompt, replace(given, seed=sum(prompt)), **options)

    with patch.object(LocalEngine, "generate", seeded):
        yield


@contextmanager
def wrong_logprobs(seed: int) -> Iterator[None]:
    """Record log-probabilities that are 0.3 nats too low."""
    from astuner_local.engine import LocalEngine

    generate = LocalEngine.generate

    async def lying(self: Any, prompt: Sequence[int], given: Any, **options: Any) -> Any:
        found = await generate(self, prompt, given, **options)
        return replace(found, logprobs=[p - 0.3 for p in found.logprobs])

    with patch.object(LocalEngine, "generate", lying):
        yield


@contextmanager
def stale_versions(seed: int) -> Iterator[None]:
    """Have the engine state version 0 forever, as one that does not get the new weights would."""
    from astuner_local.engine import LocalEngine

    updated = LocalEngine.weights_updated
    with patch.object(LocalEngine, "weights_updated", lambda self, version: updated(self, 0)):
        yield


@contextmanager
def untrained_turns(seed: int) -> Iterator[None]:
    """Leave every turn out of the loss masks."""
    from astuner.rollout.turns import build_samples

    def emptied(episode: Any, **options: Any) -> Any:
        return build_samples(replace(episode, turns=[replace(t, trained=False) for t in episode.turns]), **options)

    with patch("astuner.runs.run.build_samples", emptied):
        yield


@contextmanager
def weights_reset(seed: int) -> Iterator[None]:
    """Put the starting weights back after 40 updates."""
    import torch

    from astuner_local.trainer.trainer import PolicyTrainer

    update, start = PolicyTrainer.update, {}

    def watched(self: Any, samples: Any) -> Any:
        if not start:
            start.update({n: p.detach().clone() for n, p in self.model.named_parameters()})
        found = update(self, samples)
        if self.updates == 40:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(start[name])
        return found

    with patch.object(PolicyTrainer, "update", watched):
        yield


@contextmanager
def swapped_advantages(seed: int) -> Iterator[None]:
    """Train on the negative of every advantage."""
    from astuner_local.trainer.trainer import PolicyTrainer

    update = PolicyTrainer.update
    with patch.object(
        PolicyTrainer, "update", lambda self, s: update(self, [replace(x, advantage=-x.advantage) for x in s])
    ):
        yield


STUCK = ("zero_variance", "nothing_to_learn", "no_progress")
"""Symptoms of a run in which nothing is learned."""
FALLEN = ("worse_than_best", "invalid_rising", "cut_off", "policy_broke", "length_explosion")
"""Symptoms of a policy that gets worse."""

FAULTS: dict[str, Fault] = {
    # --- those that issue 40 names ---
    "kl_100": Fault(
        changes="KL coefficient 100",
        overrides=[f"{T}.kl_loss_coef=100"],
        named=["regularizer_dominates"],
        allowed=STUCK,
    ),
    "entropy_1": Fault(
        changes="entropy coefficient 1",
        overrides=[f"{T}.entropy_coeff=1"],
        named=["regularizer_dominates"],
        allowed=["cut_off", "entropy_explosion"],
    ),
    "stop_string": Fault(
        changes="a stop string cuts the answer's closing brace",
        behaviour={"stop": ("}",)},
        allowed=STUCK,
    ),
    "temperature_3": Fault(
        changes="sampling temperature 3 in training",
        overrides=[f"{R}.temperature=3"],
        allowed=[*STUCK, "cut_off"],
    ),
    "wrong_template": Fault(
        changes="another model's chat template",
        overrides=["astuner.model.chat_template=hermes", f"{R}.max_model_len=1024"],
        allowed=[*STUCK, "cut_off"],
    ),
    "shifted_labels": Fault(
        changes="labels are shifted by one row, in training and validation",
        behaviour={"tasks": shifted},
        allowed=STUCK,
    ),
    "keyword_judge": Fault(
        changes="the judge pays a multiplication, whatever the question",
        behaviour={"judge": lambda a: paid(a, float("*" in a.calls))},
        named=["reward_only", "reward_hacking", "reward_success_apart"],
        allowed=["worse_than_best", "entropy_collapse"],
    ),
    "tool_tells": Fault(
        changes="in training the tool returns the reference",
        behaviour={"tool": cheating},
        named=["train_only"],
        allowed=["worse_than_best"],
    ),
    "impossible_90": Fault(
        changes="nine tasks of ten cannot be solved",
        behaviour={"tasks": mostly_impossible},
        named=["nothing_to_learn", "zero_variance"],
        allowed=["no_progress"],
    ),
    "entropy_rises": Fault(
        changes="entropy coefficient 0.3; validation is greedy",
        overrides=[f"{T}.entropy_coeff=0.3", f"{R}.val_kwargs.temperature=0"],
        named=["entropy_explosion", "regularizer_dominates"],
        allowed=["same_answer", *FALLEN],
    ),
    "equal_seeds": Fault(
        changes="all attempts at a task have one seed", patch=equal_seeds, named=["duplicate_answers"], allowed=STUCK
    ),
    "equal_seeds_pairs": Fault(
        changes="the same, with two attempts at a task",
        overrides=[f"{R}.num_repeat=2"],
        patch=equal_seeds,
        named=["duplicate_answers"],
        allowed=STUCK,
    ),
    # --- learning rate ---
    "lr_0": Fault(changes="learning rate 0", overrides=[f"{T}.optim.lr=0"], named=["learning_rate"]),
    "lr_x100": Fault(
        changes="learning rate times 100", overrides=[f"{T}.optim.lr=0.17"], named=["learning_rate"], allowed=FALLEN
    ),
    "lr_x600": Fault(
        changes="learning rate 1, the largest that is accepted",
        overrides=[f"{T}.optim.lr=1"],
        named=["learning_rate"],
        allowed=FALLEN,
    ),
    "lr_tiny": Fault(changes="learning rate 1e-9", overrides=[f"{T}.optim.lr=1e-9"], allowed=["no_progress"]),
    # --- rewards ---
    "random_reward": Fault(
        changes="the judge draws lots",
        behaviour={"judge": lambda a: paid(a, float(a.draw.random() < 0.5))},
        named=["random_reward"],
    ),
    "shuffled_labels": Fault(
        changes="every training task has another task's answer",
        behaviour={"tasks": lambda tasks, trains: shifted(shifted(shifted(tasks, trains), trains), trains)},
        allowed=STUCK,
    ),
    "constant_0": Fault(
        changes="the judge always gives 0", behaviour={"judge": lambda a: paid(a, 0.0)}, named=["zero_variance"]
    ),
    "constant_1": Fault(
        changes="the judge always gives 1", behaviour={"judge": lambda a: paid(a, 1.0)}, named=["zero_variance"]
    ),
    "swapped_sign": Fault(
        changes="the reward's sign is swapped",
        behaviour={"judge": lambda a: paid(a, float(not a.right) if a.trains else float(a.right))},
        named=["reward_success_apart"],
        allowed=["worse_than_best", "invalid_rising"],
    ),
    "swapped_advantages": Fault(
        changes="the trainer gets negative advantages",
        patch=swapped_advantages,
        allowed=[*STUCK, *FALLEN],
    ),
    "judge_pays_length": Fault(
        changes="the judge pays long answers",
        behaviour={"judge": lambda a: paid(a, len(a.text) / 40)},
        named=["reward_only", "reward_hacking", "reward_success_apart"],
        allowed=[*FALLEN],
    ),
    "judge_pays_form": Fault(
        changes="the judge pays any box; nearly every answer has one",
        behaviour={"judge": lambda a: paid(a, float("\\boxed{" in a.text))},
        allowed=[*STUCK],
    ),
    "judge_noise": Fault(
        changes="the judge errs in 15 % of the cases", behaviour={"judge": noisy}, allowed=["random_reward", *STUCK]
    ),
    "half_labels_wrong": Fault(
        changes="half of the training labels are wrong", behaviour={"tasks": half_wrong}, allowed=STUCK
    ),
    "nan_reward": Fault(
        changes="the judge returns NaN for a fifth of the attempts",
        behaviour={"judge": nan_for_some},
        allowed=["failures_rising"],
    ),
    "huge_reward": Fault(changes="rewards times 10,000", behaviour={"judge": lambda a: paid(a, 1e4 * a.right)}),
    "outlier_rewards": Fault(
        changes="one reward of 50 is 10,000",
        behaviour={"judge": outliers},
        allowed=["random_reward", "bad_gradients"],
    ),
    "judge_changes": Fault(
        changes="from the middle on the judge pays the wrong answers",
        behaviour={"judge": since(0.5, lambda a: paid(a, float(not a.right)))},
        named=["reward_success_apart"],
        allowed=["reward_only", "worse_than_best"],
    ),
    "judge_dies": Fault(
        changes="from the middle on the judge gives 0",
        behaviour={"judge": since(0.5, lambda a: paid(a, 0.0))},
        named=["zero_variance"],
    ),
    "dead_helper": Fault(
        changes="from the middle on the judge's helper fails in 40 % of the calls",
        behaviour={"judge": dead_helper},
        named=["failures_rising"],
    ),
    # --- data ---
    "answer_told": Fault(
        changes="each training question ends with its answer; the model is not used to read it",
        behaviour={"question": told},
        allowed=["train_only", "invalid_rising"],
    ),
    "answer_alone": Fault(
        changes="each training question is its answer alone",
        behaviour={"question": answer_alone},
        named=["train_only"],
        allowed=["invalid_rising", "worse_than_best"],
    ),
    "other_validation": Fault(
        changes="validation asks for other answers, which the policy cannot give",
        behaviour={"tasks": larger},
        named=["train_only"],
    ),
    "too_easy": Fault(
        changes="every boxed answer is right",
        behaviour={"judge": lambda a: JudgeOutput(reward=float("\\boxed{" in a.text))},
    ),
    "four_tasks": Fault(
        changes="four training tasks, learned by heart",
        overrides=["astuner.data.train_batch_size=4"],
        behaviour={"tasks": lambda tasks, trains: tasks[:4] if trains else tasks},
        allowed=["train_only", "nothing_to_learn", "worse_than_best"],
    ),
    # --- sampling, limits, agent, services ---
    "temperature_001": Fault(
        changes="sampling temperature 0.01",
        overrides=[f"{R}.temperature=0.01"],
        named=["duplicate_answers", "nothing_to_learn", "entropy_collapse"],
        allowed=STUCK,
    ),
    "too_short": Fault(
        changes="12 tokens of an answer at most",
        overrides=[f"{R}.max_response_length_in_one_turn=12"],
        named=["cut_off"],
        allowed=STUCK,
    ),
    "service_errs": Fault(
        changes="from the middle on the tool's service returns errors",
        behaviour={"tool": broken_service},
        allowed=["zero_variance", "nothing_to_learn", "worse_than_best", "invalid_rising"],
    ),
    "service_fails": Fault(
        changes="from the middle on a third of the episodes fail at the tool",
        behaviour={"tool": raising(0.5, 0.33)},
        named=["failures_rising"],
    ),
    "slow_service": Fault(
        changes="a fifth of the episodes fail at a slow tool, from the start",
        behaviour={"tool": raising(0.0, 0.2)},
        allowed=["failures_rising"],
    ),
    "skips_model": Fault(
        changes="the agent does not call the model in 60 % of the episodes",
        behaviour={"asks_model": lambda a: not a.trains or a.draw.random() > 0.6},
        named=["empty_masks"],
    ),
    # --- loss and trainer ---
    "entropy_negative": Fault(
        changes="entropy coefficient -1",
        overrides=[f"{T}.entropy_coeff=-1"],
        named=["regularizer_dominates"],
        allowed=["entropy_collapse", "nothing_to_learn", "duplicate_answers"],
    ),
    "grad_clip_tiny": Fault(
        changes="gradients are clipped to 1e-6 (both optimizers normalise)", overrides=[f"{T}.optim.grad_clip=1e-6"]
    ),
    "clip_tiny": Fault(
        changes="the ratio is clipped at 1e-6",
        overrides=[f"{T}.algorithm.clip_ratio_low=1e-6", f"{T}.algorithm.clip_ratio_high=1e-6"],
        allowed=["no_progress"],
    ),
    "empty_masks": Fault(changes="no token is trained", patch=untrained_turns, named=["empty_masks"]),
    "stale_weights": Fault(
        changes="the engine keeps version 0 (simulated: it says so)", patch=stale_versions, named=["stale_weights"]
    ),
    "wrong_logprobs": Fault(
        changes="log-probabilities are recorded 0.3 nats too low (simulated)",
        patch=wrong_logprobs,
        named=["logprob_drift"],
    ),
    "weights_reset": Fault(
        changes="the starting weights are put back after 40 updates (simulated)",
        overrides=[f"{T}.total_steps=80", f"{T}.test_freq=20", f"{T}.optim.lr=3e-3"],
        patch=weights_reset,
        allowed=["worse_than_best", "policy_broke", "no_progress"],
    ),
}

HEALTHY: dict[str, Sequence[str]] = {
    "plain": [],
    "one_pair": ["astuner.data.train_batch_size=1", f"{R}.num_repeat=2", f"{T}.total_steps=120", f"{T}.test_freq=40"],
    "small": ["astuner.data.train_batch_size=4"],
    "large": ["astuner.data.train_batch_size=16"],
    "pairs": ["astuner.data.train_batch_size=16", f"{R}.num_repeat=2"],
    "wide": ["astuner.data.train_batch_size=4", f"{R}.num_repeat=8"],
    "no_kl": [f"{T}.use_kl_loss=false", f"{T}.ppo_epochs=1"],
    "entropy_bonus": [f"{T}.entropy_coeff=0.001", f"{T}.use_kl_loss=false"],
    "greedy_validation": [f"{R}.val_kwargs.temperature=0"],
    "cool": [f"{R}.temperature=0.7"],
    "adamw": [f"{T}.optim.optimizer=adamw", f"{T}.optim.lr=5e-4"],
    "rloo": [f"{T}.algorithm.adv_estimator=rloo", f"{T}.algorithm.loss=reinforce_plus_plus"],
    "dr_grpo": [f"{T}.algorithm.loss=dr_grpo"],
    "mini_batches": [f"{T}.mini_batch_num=4", f"{T}.ppo_epochs=1"],
    "strong_kl": [f"{T}.kl_loss_coef=0.1"],
    "fast": [f"{T}.optim.lr=3e-3"],
    "long": [f"{T}.total_steps=120", f"{T}.test_freq=30"],
    "lora": ["astuner.model.lora.rank=8"],
    "two_tasks": ["astuner.data.train_batch_size=2", f"{R}.num_repeat=8"],
    "dynamic": [f"{T}.algorithm.dynamic_sampling=true"],
}
"""Twenty healthy runs; each differs from the base in something that is no fault."""
TRUE_OF_HEALTHY = {"healthy-one_pair_11": "no_progress", "healthy-lora_11": "no_progress"}
"""Runs that are too short for their settings to learn anything, and the rule that states it."""


def behaviour(fault: Fault | None, seed: int, episodes: int) -> Behaviour:
    """Return the behaviour of a run."""
    import random

    return Behaviour(**(fault.behaviour if fault else {}), seed=seed, episodes=episodes, draw=random.Random(seed))
