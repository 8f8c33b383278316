"""verl and the local backbone train the same thing: the same samples give the same numbers and the same gradient."""

from __future__ import annotations

import copy
import itertools
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astuner.config.schema import TrainerCommon
from astuner.rollout.credit import Credit, Scored, assign_credit
from astuner.types import Sample
from astuner_local.trainer.trainer import PolicyTrainer

pytestmark = pytest.mark.timeout(600)  # three processes that import all of verl, on a busy machine

ACTOR = Path(__file__).with_name("actor_rank.py")
TEMPERATURE = 0.8
VOCAB = 500
MICRO_BATCH_TOKENS = 160
"""Several micro-batches for each optimizer step, and verl's padding rows (128 tokens) fit into one."""
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


CASES: dict[str, TrainerCommon] = {
    **{
        f"{a}-{b}": settings({"loss": a, "loss_agg_mode": b})
        for a, b in zip(LOSSES, itertools.cycle(AGGREGATIONS), strict=False)
    },
    "rewards-as-they-are": settings({"adv_estimator": "none"}),
    **{f"correction-{c}": settings({"rollout_is": c}) for c in CORRECTIONS},
    **{f"kl-{k}": settings(use_kl_loss=True, kl_loss_type=k) for k in ("k1", "k2", "k3", "low_var_kl")},
    "entropy": settings(entropy_coeff=0.2),
    "everything": settings(
        {"loss": "gspo", "rollout_is": "token-truncate", "loss_agg_mode": "token-mean"},
        use_kl_loss=True,
        entropy_coeff=-0.1,
    ),
    "kl-in-reward": settings({"use_kl_in_reward": True}, kl_loss_type="k3"),
    "two-steps": settings(optim={"lr": 1e-3, "grad_clip": 1e9}, ppo_epochs=2),
    "two-steps-corrected": settings({"rollout_is": "token-mask"}, optim={"lr": 1e-3, "grad_clip": 1e9}, ppo_epochs=2),
    "without-padding": settings(use_kl_loss=True, entropy_coeff=0.2),
}
NATIVE: dict[str, dict[str, Any]] = {"without-padding": {"use_remove_padding": True}}
"""What verl's worker is told beside the settings, by case."""


# --- what both train on -------------------------------------------------------------------------------------------


def noisy(model: Any, scale: float) -> Any:
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(scale * torch.randn_like(weight))
    return other.requires_grad_(False)


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
    trainer = PolicyTrainer(model, settings(), temperature=TEMPERATURE, device="cpu")
    own = iter(trainer.logprobs([s for _, _, samples, _ in found for s in samples]))
    scored = []
    for episode, group_id, samples, credits in found:
        recorded = []
        for s in samples:
            values = iter(next(own).tolist())
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


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    """The tiny model, made less sure of itself, so that no token's probability is as good as 0 or 1."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        model.model.norm.weight.mul_(0.25)
    return model


@pytest.fixture(scope="module")
def samples(model: Any) -> dict[str, list[Sample]]:
    scored = episodes(model)
    return {name: assign_credit(scored, case.algorithm, constant_length=24) for name, case in CASES.items()}


# --- the two sides ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def theirs(model: Any, samples: Any, tiny_model: Path, tmp_path_factory: Any) -> dict[int, list[dict[str, Any]]]:
    """What verl's actor made of all cases: world size -> its ranks' results."""
    folder = tmp_path_factory.mktemp("parity")
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder / "model")
    (folder / "experiment.yaml").write_text(
        f"""\
astuner:
  backbone: verl
  model: {{path: {folder / "model"}, dtype: float32}}
  data: {{train_batch_size: 3}}
  rollout: {{num_repeat: 3, temperature: {TEMPERATURE}, max_model_len: 100, max_response_length_in_one_turn: 32}}
  trainer_common:
    n_gpus_per_node: 1
    micro_batch_tokens: {MICRO_BATCH_TOKENS}
    optim: {{grad_clip: 1.0e9}}
"""
    )
    reference = dict(noisy(model, 0.03).named_parameters())
    cases = {
        name: {"settings": case, "samples": samples[name], "reference": reference, "native": NATIVE.get(name, {})}
        for name, case in CASES.items()
    }
    torch.save(cases, folder / "cases.pt")
    running = []
    for world in (1, 2):
        port = free_port()
        for rank in range(world):
            command = [sys.executable, str(ACTOR), str(rank), str(world), str(port), str(folder)]
            log = (folder / f"{world}-{rank}.log").open("w")
            running.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT), log))
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
        for world in (1, 2)
    }


def ours(model: Any, samples: list[Sample], case: TrainerCommon) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and the last step's gradient of the local backbone."""
    model = copy.deepcopy(model)
    reference = noisy(model, 0.03)
    trainer = PolicyTrainer(model, case, temperature=TEMPERATURE, device="cpu", reference_model=reference)
    caught: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step

    def catch() -> Any:
        caught.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        return step()

    trainer.optimizer.step = catch  # type: ignore[method-assign]
    return trainer.update(samples), caught


# --- parity -------------------------------------------------------------------------------------------------------

METRICS = ("pg_loss", "loss", "grad_norm", "entropy", "ratio/mean", "ratio/max", "clip_frac/low", "clip_frac/high")
SOMETIMES = ("kl/ref", "rollout_is/weight")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradient_are_the_local_backbones(
    name: str, world: int, model: Any, samples: Any, theirs: Any
) -> None:
    case, found = CASES[name], theirs[world][0][name]
    metrics, gradients = ours(model, samples[name], case)
    several = case.ppo_epochs > 1  # the second step starts from weights that differ by rounding
    for metric in (*METRICS, *(m for m in SOMETIMES if m in metrics)):
        assert found["metrics"][metric] == pytest.approx(metrics[metric], rel=1e-3 if several else 2e-4, abs=1e-6), (
            metric
        )
    if not several or case.algorithm.rollout_is != "none":
        for metric in ("kl/mismatch_mean", "kl/mismatch_max"):
            assert found["metrics"][metric] == pytest.approx(metrics[metric], rel=1e-4), metric
    assert_same(found["gradients"], gradients, tolerance=2e-3 if several else 2e-5)


def assert_same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor], tolerance: float) -> None:
    assert theirs.keys() == ours.keys()
    a, b = (torch.cat([of[name].flatten() for name in ours]) for of in (theirs, ours))
    assert float(b.norm()) > 1e-3  # a comparison of zeros would show nothing
    assert float((a - b).norm() / b.norm()) < tolerance
    for name in ours:  # and no matrix is off
        scale = max(float(ours[name].norm()), 1e-3 * float(b.norm()))
        assert float((theirs[name] - ours[name]).norm()) < 20 * tolerance * scale, name


@pytest.mark.parametrize("world", [1, 2])
def test_logprobs_of_the_trained_tokens_are_the_local_backbones(
    world: int, model: Any, samples: Any, theirs: Any
) -> None:
    mine = samples["entropy"]
    expected = PolicyTrainer(model, settings(), temperature=TEMPERATURE, device="cpu").logprobs(mine)
    found: dict[str, list[float]] = {}
    for rank in theirs[world]:
        found |= rank["entropy"]["logprobs"]
    assert len(found) == len(mine)
    for row, values in enumerate(expected):
        assert found[str(row)] == pytest.approx(values.tolist(), abs=2e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_kl_in_the_reward_is_the_local_backbones(world: int, model: Any, samples: Any, theirs: Any) -> None:
    mine, case = samples["kl-in-reward"], CASES["kl-in-reward"]
    trainer = PolicyTrainer(model, case, temperature=TEMPERATURE, device="cpu", reference_model=noisy(model, 0.03))
    found: dict[tuple[str, str], float] = {}
    for rank in theirs[world]:
        for row, reward in rank["kl-in-reward"]["rewards"].items():
            key = (mine[row].episode_id, mine[row].agent)
            found[key] = found.get(key, 0.0) + mine[row].reward - reward
    assert found == pytest.approx(trainer.kl_penalties(mine), rel=1e-4, abs=1e-5)
