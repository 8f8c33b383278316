"""The same samples for the local backbone's trainer, another's actor in processes of its own, and plain torch.

What is compared is what both make of frozen samples: advantages and weights come from core, so a trainer shows that it
computes the same log-probabilities, the same loss, the same metrics and the same gradient.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astuner.config.schema import LoraSection, TrainerCommon
from astuner.contracts.types import Sample
from astuner.rollout.credit import Credit, Scored, assign_credit
from astuner_local.trainer.lora import is_lora, wrap
from astuner_local.trainer.trainer import PolicyTrainer

from . import plain
from .actor import TEMPERATURE

HERE = Path(__file__).parent
OWN = HERE / "own.py"
VOCAB = 500
MICRO_BATCH_TOKENS = 160
"""Several micro-batches for each optimizer step, and verl's padding rows (128 tokens) fit into one."""
WORLDS = (1, 2)
LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CORRECTIONS = ("token-truncate", "token-mask", "sequence-truncate", "sequence-mask")


def settings(algorithm: dict[str, Any] | None = None, **more: Any) -> TrainerCommon:
    """Clips and thresholds at which some tokens are cut off and some are not; the rate is 0 unless given."""
    cut = {
        "clip_ratio_low": 0.05,
        "clip_ratio_high": 0.08,
        "rollout_is_threshold": 1.05,
        "filter_zero_advantage": False,
    }
    common = {"optim": {"lr": 0.0, "grad_clip": 1e9}, "micro_batch_tokens": MICRO_BATCH_TOKENS, "kl_loss_coef": 0.3}
    return TrainerCommon.model_validate({**common, **more, "algorithm": {**cut, **(algorithm or {})}})


CASES: Mapping[str, TrainerCommon] = {
    **{
        f"{a}-{b}": settings({"loss": a, "loss_agg_mode": b})
        for a, b in zip(LOSSES, itertools.cycle(AGGREGATIONS), strict=False)
    },
    "rewards-as-they-are": settings({"adv_estimator": "none"}),
    "of-ones-own": settings(
        {"loss": f"{OWN}->soft_clip", "adv_estimator": f"{OWN}->above_the_median", "rollout_is": "token-truncate"}
    ),
    "ranks-of-ones-own": settings({"loss": f"{OWN}->soft_clip", "adv_estimator": f"{OWN}->ranks"}, use_kl_loss=True),
    **{f"correction-{c}": settings({"rollout_is": c}) for c in CORRECTIONS},
    **{f"kl-{k}": settings(use_kl_loss=True, kl_loss_type=k) for k in ("k1", "k2", "k3", "low_var_kl")},
    "entropy": settings(entropy_coeff=0.2),
    "everything": settings(
        {"loss": "gspo", "rollout_is": "token-truncate", "loss_agg_mode": "token-mean"},
        use_kl_loss=True,
        entropy_coeff=-0.1,
    ),
    "two-steps": settings(optim={"lr": 1e-3, "grad_clip": 1e9}, ppo_epochs=2),
    "two-steps-corrected": settings({"rollout_is": "token-mask"}, optim={"lr": 1e-3, "grad_clip": 1e9}, ppo_epochs=2),
}
"""What every trainer can do."""
LORA = {"rank": 4, "alpha": 6.0}
LORA_CASES: Mapping[str, TrainerCommon] = {
    f"lora-{name}": case
    for name, case in CASES.items()
    if name.partition("-")[0] in ("grpo", "dapo", "gspo", "cispo", "of", "everything")
} | {"lora-two-steps": settings(optim={"lr": 1e-3, "grad_clip": 1e9}, ppo_epochs=2)}
"""What every trainer can do with adapters."""
CONSTANT_LENGTH = 24


# --- what both train on -------------------------------------------------------------------------------------------


def model_in(folder: Path, *, made_of: Path) -> Any:
    """A model made less sure of itself, so that no token's probability is as good as 0 or 1; saved in ``folder``."""
    model = AutoModelForCausalLM.from_pretrained(made_of, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(0.25)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(made_of).save_pretrained(folder)
    return model


def adapted(model: Any) -> Any:
    """The model with adapters on it that have learnt something."""
    with_adapters = wrap(copy.deepcopy(model), LoraSection(**LORA), seed=3)
    torch.manual_seed(4)
    with torch.no_grad():
        for name, weight in with_adapters.named_parameters():
            if "lora_B" in name:  # they start at 0, and the other half would have no gradient
                weight.normal_(std=0.05)
    return with_adapters


def adapters_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def noisy(model: Any, scale: float = 0.03) -> Any:
    """A reference model: the same with other weights."""
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(scale * torch.randn_like(weight))
    return other.requires_grad_(False)


def samples_of(model: Any, cases: Mapping[str, TrainerCommon]) -> dict[str, list[Sample]]:
    """Case -> the samples, as core gives them credit."""
    scored = episodes(model)
    return {
        name: assign_credit(scored, case.algorithm, constant_length=CONSTANT_LENGTH) for name, case in cases.items()
    }


def episodes(model: Any, seed: int = 0) -> list[Scored]:
    """Two groups of two attempts; in each a seer and two wolves speak, and leave one or two samples each.

    The samples have gaps in their masks, some begin with a turn that another sample trains, and some end with tokens
    that nobody generated.  Recorded log-probabilities are the model's own and noise, so that ratios are not 1.
    """
    rng = random.Random(seed)

    def tokens(low: int, high: int) -> list[int]:
        return [rng.randrange(3, VOCAB) for _ in range(rng.randint(low, high))]

    found = []
    for group, attempt in itertools.product(range(2), range(2)):
        episode, samples, credits = f"e{group}-{attempt}", [], []
        for agent, role in (("anna", "seer"), ("bob", "wolf"), ("carl", "wolf")):
            reward = rng.random()
            credits.append(Credit(agent=agent, role=role, policy="default", reward=reward))
            for _ in range(rng.randint(1, 2)):
                parts = [(tokens(3, 9), 0), (tokens(1, 6), rng.randrange(2)), (tokens(1, 4), 0), (tokens(1, 7), 1)]
                parts.append((tokens(0, 2), 0))
                ids = [t for part, _ in parts for t in part]
                mask = [m for part, m in parts for _ in part]
                samples.append(
                    Sample(
                        episode_id=episode,
                        group_id=f"g{group}",
                        agent=agent,
                        role=role,
                        input_ids=ids,
                        loss_mask=mask,
                        logprobs=[0.0] * len(ids),
                        policy_version=0,
                        reward=reward,
                    )
                )
        found.append((episode, f"g{group}", samples, credits))
    own = iter(logprobs_of_local(model, [s for _, _, samples, _ in found for s in samples]))
    scored = []
    for episode, group_id, samples, credits in found:
        recorded = []
        for s in samples:
            values = iter(next(own))
            recorded.append(replace(s, logprobs=[next(values) + rng.gauss(0, 0.2) if m else 0.0 for m in s.loss_mask]))
        scored.append(
            Scored(
                episode_id=episode,
                group_id=group_id,
                reward=0.0,
                samples=tuple(recorded),
                credits=tuple(credits),
                agents_named=True,
            )
        )
    return scored


# --- the two sides ------------------------------------------------------------------------------------------------


def logprobs_of_local(model: Any, samples: Sequence[Sample]) -> list[list[float]]:
    """Of each sample's trained tokens."""
    trainer = PolicyTrainer(model, settings(), temperature=TEMPERATURE, device="cpu")
    return [values.tolist() for values in trainer.logprobs(samples)]


def update_of_local(
    model: Any, samples: Sequence[Sample], case: TrainerCommon
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and the last step's gradient of the local backbone."""
    model = copy.deepcopy(model)
    reference = None if is_lora(model) else noisy(model)
    trainer = PolicyTrainer(model, case, temperature=TEMPERATURE, device="cpu", reference_model=reference)
    caught: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step

    def catch(position: int) -> Any:
        caught.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return step(position)

    trainer.optimizer.step = catch  # type: ignore[method-assign]
    return trainer.update(samples), caught


def updates_of_ranks(
    program: Path,
    folder: Path,
    *,
    backbone: str,
    gpus: int,
    cases: Mapping[str, Mapping[str, Any]],
    lora: tuple[Mapping[str, torch.Tensor], Mapping[str, Mapping[str, Any]]],
) -> dict[int, list[dict[str, Any]]]:
    """World size -> what each rank of an actor made of all cases; see `actor.main`.

    :param program: what ranks run; it imports `actor`.
    :param folder: where the model already is, in ``model``.
    :param gpus: of the experiment.
    :param cases: name -> what is passed to `Actor.train`.
    :param lora: adapters, and the cases of an experiment that trains them.
    """
    experiment: dict[str, Any] = {
        "backbone": backbone,
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train_batch_size": 3},
        "rollout": {"num_repeat": 3, "temperature": TEMPERATURE, "max_model_len": 100},
        "trainer_common": {
            "n_gpus_per_node": gpus,
            "micro_batch_tokens": MICRO_BATCH_TOKENS,
            "optim": {"grad_clip": 1e9},
        },
    }
    (folder / "all.yaml").write_text(json.dumps({"astuner": experiment}))
    experiment["model"] = {**experiment["model"], "lora": LORA}
    (folder / "lora.yaml").write_text(json.dumps({"astuner": experiment}))
    torch.save({"all.yaml": ({}, dict(cases)), "lora.yaml": tuple(map(dict, lora))}, folder / "cases.pt")
    running = []
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    for world in WORLDS:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank in range(world):
            command = [sys.executable, str(program), str(rank), str(world), str(port), str(folder)]
            log = (folder / f"{world}-{rank}.log").open("w")
            running.append((subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT), log))
    try:
        for process, log in running:
            assert process.wait(timeout=540) == 0, Path(log.name).read_text()[-4000:]
    finally:
        for process, log in running:
            process.kill()
            process.wait()
            log.close()
    return {
        world: [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(world)]
        for world in WORLDS
    }


# --- parity -------------------------------------------------------------------------------------------------------

METRICS = ("pg_loss", "loss", "grad_norm", "ratio/mean", "ratio/max", "clip_frac/low", "clip_frac/high")
SOMETIMES = ("kl/ref", "loss/gate", "rollout_is/weight")


def check_update(
    found: Mapping[str, Any], model: Any, samples: Sequence[Sample], case: TrainerCommon, *, also: Collection[str] = ()
) -> None:
    """Whether metrics and gradient are the local backbone's; and those of `plain`, which has one step of the paper's.

    :param found: what a rank made of the case.
    :param also: more metrics that this trainer logs.
    """
    metrics, gradients = update_of_local(model, samples, case)
    several = case.ppo_epochs > 1  # the second step starts from weights that differ by rounding
    for metric in (*METRICS, *also, *(m for m in SOMETIMES if m in metrics)):
        assert found["metrics"][metric] == pytest.approx(metrics[metric], rel=1e-3 if several else 2e-4, abs=1e-6), (
            metric
        )
    for metric in ("kl/mismatch_mean", "kl/mismatch_max"):  # before the update, however many steps it has
        assert found["metrics"][metric] == pytest.approx(metrics[metric], rel=1e-4), metric
    _assert_same(found["gradients"], gradients, tolerance=2e-3 if several else 2e-5)
    if not several:
        reference = copy.deepcopy(model).unload() if is_lora(model) else noisy(model)
        expected = plain.step_loss(model, reference, samples, case, constant_length=CONSTANT_LENGTH)
        assert found["metrics"]["loss"] == pytest.approx(expected.item(), abs=plain.LOSS_ROUNDING)
        _assert_same(found["gradients"], plain.gradients(model, expected), tolerance=2e-5)


def check_logprobs(found: Sequence[Mapping[str, Any]], model: Any, samples: Sequence[Sample]) -> None:
    """Whether the ranks' log-probabilities, together, are the local backbone's."""
    rows: dict[str, list[float]] = {}
    for rank in found:
        rows |= rank["logprobs"]
    assert len(rows) == len(samples)
    for row, values in enumerate(logprobs_of_local(model, samples)):
        assert rows[str(row)] == pytest.approx(values, abs=2e-5)


def _assert_same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], tolerance: float) -> None:
    assert theirs.keys() == ours.keys()
    a, b = (torch.cat([of[name].flatten() for name in ours]) for of in (theirs, ours))
    assert float(b.norm()) > 1e-3  # a comparison of zeros would show nothing
    assert float((a - b).norm() / b.norm()) < tolerance
    for name in ours:  # and no matrix is off
        scale = max(float(ours[name].norm()), 1e-3 * float(b.norm()))
        assert float((theirs[name] - ours[name]).norm()) < 20 * tolerance * scale, name
