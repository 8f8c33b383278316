"""Log-probabilities, losses and gradients against two independent witnesses.

The first is `tests.fsdp.plain`: the transformers forward, one sample at a time, formulas written out token by token.
The second is TRL's own ``GRPOTrainer._compute_loss``.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch

from astuner.config.schema import TrainerCommon
from astuner.contracts.types import Sample
from astuner_local.trainer.trainer import Batch, PolicyTrainer
from tests.fsdp import plain
from tests.fsdp.plain import LOSS_ROUNDING, OWN, TEMPERATURE

from ._samples import random_samples
from ._tiny_models import tiny_model

LOSSES = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_plus_plus", OWN)
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CORRECTIONS = ("none", "token-truncate", "token-mask", "sequence-truncate", "sequence-mask")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def noisy_copy(model: Any) -> Any:
    other = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(0.03 * torch.randn_like(p))
    return other.requires_grad_(False)


# --- ours -------------------------------------------------------------------------------------------------------


def our_gradients(model: Any, samples: list[Sample], config: TrainerCommon, **options: Any) -> tuple[dict, dict]:
    """Metrics and gradients of one update, caught before the optimizer uses them."""
    trainer = PolicyTrainer(model, config, temperature=TEMPERATURE, device="cpu", **options)
    caught: dict[str, torch.Tensor] = {}
    step = trainer.optimizer.step

    def catch(position: int) -> Any:
        for name, p in model.named_parameters():
            if p.grad is not None:
                caught[name] = p.grad.clone()
        return step(position)

    trainer.optimizer.step = catch  # type: ignore[method-assign]
    return trainer.update(samples), caught


def assert_same_gradients(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5):
    assert ours.keys() == theirs.keys()
    flat_ours = torch.cat([ours[n].flatten() for n in ours])
    flat_theirs = torch.cat([theirs[n].flatten() for n in ours])
    assert float(flat_theirs.norm()) > 1e-4  # a comparison of zeros would show nothing
    assert float((flat_ours - flat_theirs).norm() / flat_theirs.norm()) < tolerance
    for name in ours:  # and no single weight is off
        scale = max(float(theirs[name].abs().max()), 1e-3 * float(flat_theirs.abs().max()))
        assert float((ours[name] - theirs[name]).abs().max()) < 20 * tolerance * scale, name


def frozen(**changes: Any) -> TrainerCommon:
    algorithm = changes.pop("algorithm", {})
    return TrainerCommon.model_validate({"optim": {"lr": 0.0, "grad_clip": 1e9}, "algorithm": algorithm, **changes})


CASES = [
    # every loss under every aggregation, with the KL estimators and corrections spread over them, then each of those
    # with every loss
    *itertools.product(LOSSES, AGGREGATIONS, ("",), ("none",)),
    *itertools.product(LOSSES, ("seq-mean-token-mean",), ("k1", "k2", "k3", "low_var_kl"), ("none",)),
    *itertools.product(LOSSES, ("token-mean",), ("k3",), CORRECTIONS[1:]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "aggregation", "kl", "correction"), CASES)
def test_loss_and_gradients_equal_the_naive_ones(loss: str, aggregation: str, kl: str, correction: str) -> None:
    model = tiny_model("qwen2")
    reference = noisy_copy(model)
    config = frozen(
        algorithm={
            "loss": loss,
            "loss_agg_mode": aggregation,
            "clip_ratio_low": 0.05,
            "clip_ratio_high": 0.08,
            "rollout_is": correction,
            "rollout_is_threshold": 1.05,
        },
        use_kl_loss=bool(kl),
        kl_loss_type=kl or "k3",
        kl_loss_coef=0.3,
        entropy_coeff=0.2 if kl == "k2" else 0.0,
    )
    samples = random_samples(model, temperature=TEMPERATURE, noise=0.2, groups=2, algorithm=config.algorithm)
    metrics, ours = our_gradients(model, samples, config, reference_model=reference)
    expected = plain.step_loss(model, reference, samples, config)
    assert metrics["loss"] == pytest.approx(expected.item(), abs=LOSS_ROUNDING)
    assert_same_gradients(ours, plain.gradients(model, expected))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen2", "qwen3", "llama-biased"])
@pytest.mark.parametrize("budget", [None, 40])
@pytest.mark.parametrize("sharing", ["never", "auto", "always"])
def test_layouts_have_the_naive_gradients(shape: str, budget: int | None, sharing: str) -> None:
    model = tiny_model(shape)
    samples = random_samples(model, temperature=TEMPERATURE)
    config = frozen(micro_batch_tokens=budget, activation_checkpointing=budget is not None)
    metrics, ours = our_gradients(model, samples, config, prefix_sharing=sharing)
    if sharing != "never" and budget is None:
        assert metrics["tokens/computed"] < 0.8 * metrics["tokens/raw"]
    assert_same_gradients(ours, plain.gradients(model, plain.step_loss(model, None, samples, config)))


def test_logprobs_equal_those_of_transformers() -> None:
    model = tiny_model("qwen3")
    samples = random_samples(model, temperature=TEMPERATURE, noise=0.0, groups=4)
    trainer = PolicyTrainer(model, frozen(micro_batch_tokens=64), temperature=TEMPERATURE, device="cpu")
    for sample, found in zip(samples, trainer.logprobs(samples), strict=True):
        expected = [lp for lp, trained in zip(sample.logprobs, sample.loss_mask, strict=True) if trained]
        assert found.tolist() == pytest.approx(expected, abs=2e-5)


# --- TRL --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def make_trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds a real GRPOTrainer around a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("trl", reason="the second witness; make test installs it")
        from datasets import Dataset
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

    vocabulary = {f"t{i}": i for i in range(61)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="t0")), pad_token="t0", eos_token="t1"
    )

    def make(model: Any, **arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = GRPOConfig(
                output_dir=str(tmp_path_factory.mktemp("trl")),
                temperature=TEMPERATURE,
                use_cpu=True,
                report_to=[],
                per_device_train_batch_size=2,
                num_generations=2,
                gradient_checkpointing=False,
                bf16=False,
                use_bias_correction_kl=False,  # DeepSeek-V3.2 multiplies the KL by the ratio; GRPO does not
                **arguments,
            )
            return GRPOTrainer(
                model=model,
                reward_funcs=lambda completions, **_: [0.0] * len(completions),
                args=config,
                train_dataset=Dataset.from_dict({"prompt": ["t2", "t3"]}),
                processing_class=tokenizer,
            )

    return make


def trl_inputs(samples: list[Sample], reference: list[Any] | None) -> dict[str, torch.Tensor]:
    """TRL's padded layout: a one-token prompt, everything else a completion whose tool mask is our loss mask."""
    width = max(len(s.input_ids) for s in samples) - 1
    rows = {k: torch.zeros(len(samples), width) for k in ("ids", "mask", "tools", "old", "ref")}
    for i, s in enumerate(samples):
        n = len(s.input_ids) - 1
        rows["ids"][i, :n] = torch.tensor(list(s.input_ids[1:]), dtype=torch.float)
        rows["mask"][i, :n] = 1
        rows["tools"][i, :n] = torch.tensor(list(s.loss_mask[1:]), dtype=torch.float)
        rows["old"][i, :n] = torch.tensor(list(s.logprobs[1:]))
        if reference is not None:
            rows["ref"][i, :n][rows["tools"][i, :n] > 0] = torch.from_numpy(reference[i])
    inputs = {
        "prompt_ids": torch.tensor([[s.input_ids[0]] for s in samples]),
        "prompt_mask": torch.ones(len(samples), 1, dtype=torch.long),
        "completion_ids": rows["ids"].long(),
        "completion_mask": rows["mask"].long(),
        "tool_mask": rows["tools"].long(),
        "old_per_token_logps": rows["old"],
        "advantages": torch.tensor([s.advantage for s in samples]),
        "num_items_in_batch": rows["tools"].sum(),
    }
    return inputs | ({"ref_per_token_logps": rows["ref"]} if reference is not None else {})


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize(
    ("loss", "aggregation", "theirs"),
    [
        ("grpo", "seq-mean-token-mean", {"loss_type": "grpo"}),
        ("dr_grpo", "seq-mean-token-sum-norm", {"loss_type": "dr_grpo", "max_completion_length": 16}),
        ("dapo", "token-mean", {"loss_type": "dapo"}),
        ("cispo", "token-mean", {"loss_type": "cispo", "epsilon_high": 1.08}),  # TRL writes the bound itself
        ("gspo", "seq-mean-token-mean", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ],
)
def test_loss_and_gradients_equal_trl(make_trl: Any, loss: str, aggregation: str, theirs: dict, beta: float) -> None:
    model = tiny_model("qwen2", pad_token_id=0)
    reference = noisy_copy(model)
    config = frozen(
        algorithm={
            "loss": loss,
            "loss_agg_mode": aggregation,
            "clip_ratio_low": 1.0 if loss == "cispo" else 0.05,  # TRL's CISPO has no lower bound
            "clip_ratio_high": 0.08,
        },
        use_kl_loss=beta > 0,
        kl_loss_coef=beta,
    )
    samples = random_samples(model, temperature=TEMPERATURE, noise=0.2, repeats=2, algorithm=config.algorithm)
    trainer = PolicyTrainer(model, config, temperature=TEMPERATURE, device="cpu", reference_model=reference)
    of_reference = trainer.reference_logprobs(Batch(samples)) if beta else None
    metrics, ours = our_gradients(model, samples, config, reference_model=reference)

    trl_model = copy.deepcopy(model)
    trl = make_trl(trl_model, **{"epsilon": 0.05, "epsilon_high": 0.08, **theirs})
    trl.beta = beta  # set late, since TRL would load a reference model by name; ours is in the inputs
    trl_model.eval()
    expected = trl._compute_loss(trl_model, trl_inputs(samples, of_reference))
    assert metrics["loss"] == pytest.approx(expected.item(), abs=LOSS_ROUNDING)
    assert_same_gradients(ours, plain.gradients(trl_model, expected))
