"""Updates: what moves, what does not, and what is said about it."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astuner.config.schema import AlgorithmSection, LoraSection, Optim, TrainerCommon
from astuner.contracts.errors import CheckpointError, ConfigError, RunError
from astuner.contracts.types import Sample
from astuner.rollout.credit import Scored, assign_credit
from astuner_local.trainer import lora
from astuner_local.trainer.optim import PolicyOptimizer, _hidden_matrices
from astuner_local.trainer.trainer import Batch, PolicyTrainer, mini_batches
from tests.table import table

from ._samples import random_samples, with_
from ._tiny_models import tiny_model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(lr: float = 0.01, optimizer: str = "adamw", algorithm: Any = None, **changes: Any) -> TrainerCommon:
    return TrainerCommon.model_validate(
        {"optim": {"lr": lr, "optimizer": optimizer}, "algorithm": algorithm or {}, **changes}
    )


def trainer_of(model: Any, config: TrainerCommon, **options: Any) -> PolicyTrainer:
    return PolicyTrainer(model, config, **{"temperature": 1.0, "device": "cpu", **options})


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


# --- learning ---------------------------------------------------------------------------------------------------


@table("optimizer", ["adamw", "muon"])
def test_updates_raise_the_probability_of_what_was_rewarded(optimizer: str) -> None:
    model = tiny_model()
    trainer = trainer_of(model, settings(0.003, optimizer))
    samples = random_samples(model)

    def gain() -> float:
        return sum(s.advantage * float(lp.sum()) for s, lp in zip(samples, trainer.logprobs(samples), strict=True))

    before = gain()
    for _ in range(3):
        samples = [
            replace(s, logprobs=_spread(s, lp)) for s, lp in zip(samples, trainer.logprobs(samples), strict=True)
        ]
        metrics = trainer.update(samples)
        assert metrics["kl/mismatch_max"] < 1e-5
        assert metrics["ratio/mean"] == pytest.approx(1, abs=1e-5)
    assert gain() > before + 1


def _spread(sample: Sample, trained: Any) -> list[float]:
    values = iter(trained.tolist())
    return [next(values) if m else 0.0 for m in sample.loss_mask]


def test_the_same_samples_give_the_same_weights() -> None:
    ends = []
    for _ in range(2):
        model = tiny_model()
        trainer_of(model, settings(mini_batch_num=2, ppo_epochs=2)).update(random_samples(model))
        ends.append(weights(model))
    assert same(*ends)


def test_metrics_of_an_update() -> None:
    model = tiny_model()
    samples = random_samples(model, noise=0.3)
    metrics = trainer_of(model, settings(mini_batch_num=3, ppo_epochs=2)).update(samples)
    trained = sum(s.trained_tokens for s in samples)
    assert metrics["optimizer_steps"] == 6
    assert metrics["skipped_steps"] == metrics["nothing_learnable"] == 0
    assert metrics["tokens/trained"] == 2 * trained
    assert metrics["tokens/computed"] < metrics["tokens/raw"]
    assert 0.05 < metrics["kl/mismatch_mean"] < metrics["kl/mismatch_max"]
    assert 0 < metrics["clip_frac/low"] < 1
    assert 0 < metrics["clip_frac/high"] < 1
    assert 0 < metrics["entropy"] < math.log(61)
    assert metrics["ratio/max"] > 1.2
    assert metrics["lr"] == 0.01
    assert metrics["grad_norm"] > 0
    assert "kl/ref" not in metrics


def test_pg_loss_leaves_out_kl_and_entropy() -> None:
    model = tiny_model()
    reference = tiny_model(seed=1)
    samples = random_samples(model)
    plain = trainer_of(model, settings(lr=0.0)).update(samples)
    config = settings(lr=0.0, use_kl_loss=True, kl_loss_coef=0.5, entropy_coeff=0.1)
    full = trainer_of(model, config, reference_model=reference).update(samples)
    assert full["pg_loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert full["kl/ref"] > 0
    # one aggregation for all terms; here a mean over episodes, so only roughly the metrics' mean over tokens
    assert full["loss"] == pytest.approx(full["pg_loss"] + 0.5 * full["kl/ref"] - 0.1 * full["entropy"], rel=0.3)
    assert full["loss"] != pytest.approx(full["pg_loss"], rel=1e-3)
    assert full["logit_grad/policy"] == pytest.approx(plain["logit_grad/policy"], rel=1e-5)
    assert full["logit_grad/kl"] > 0 < full["logit_grad/entropy"]
    assert not {"logit_grad/kl", "logit_grad/entropy"} & set(plain)
    twice = trainer_of(model, settings(lr=0.0, ppo_epochs=2)).update(samples)
    assert twice["logit_grad/policy"] == pytest.approx(plain["logit_grad/policy"], rel=1e-5)  # a mean over the steps


# --- what carries no gradient -----------------------------------------------------------------------------------


def test_leaving_out_zero_advantages_changes_nothing() -> None:
    ends = []
    for keep in (False, True):
        model = tiny_model()
        samples = random_samples(model)
        samples[1:4] = with_(samples[1:4], advantage=0.0)
        config = settings(0.0, algorithm={"filter_zero_advantage": not keep}, mini_batch_num=2)
        trainer = trainer_of(model, config)
        metrics = trainer.update(samples)
        moments = {k: v for k, v in trainer.state_dict().items() if k.startswith("exp_avg/")}  # linear in gradients
        ends.append((metrics, moments))
    (filtered, ours), (unfiltered, theirs) = ends
    assert filtered["tokens/trained"] < unfiltered["tokens/trained"]
    assert filtered["loss"] == pytest.approx(unfiltered["loss"], rel=1e-4)
    for name, moment in ours.items():
        assert torch.allclose(moment, theirs[name], atol=1e-6)


def test_zero_advantages_are_trained_when_kl_or_entropy_asks_for_it() -> None:
    for changes in ({"use_kl_loss": True}, {"entropy_coeff": 0.1}):
        model = tiny_model()
        before = weights(model)
        samples = with_(random_samples(model), advantage=0.0)
        metrics = trainer_of(model, settings(**changes), reference_model=tiny_model(seed=1)).update(samples)
        assert metrics["nothing_learnable"] == 0
        assert not same(before, weights(model))


@table("case", ["empty", "zero advantage", "zero weight", "no trained tokens"])
def test_nothing_learnable_is_said_and_changes_nothing(case: str) -> None:
    model = tiny_model()
    before = weights(model)
    samples = random_samples(model)
    samples = {
        "empty": [],
        "zero advantage": with_(samples, advantage=0.0),
        "zero weight": with_(samples, token_weight=0.0),
        "no trained tokens": [replace(s, loss_mask=[0] * len(s.input_ids)) for s in samples],
    }[case]
    trainer = trainer_of(model, settings())
    metrics = trainer.update(samples)
    assert metrics["nothing_learnable"] == 1
    assert metrics["optimizer_steps"] == 0
    assert same(before, weights(model))


# --- mini-batches -----------------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
    st.integers(0, 99),
)
def test_mini_batch_weights_are_those_of_the_mini_batch_alone(
    episodes: list[list[int]], count: int, mode: str, seed: int
) -> None:
    """Two episodes a group; each number is the trained tokens of one sample of the episode."""

    def scored(which: list[int]) -> list[Scored]:
        made = []
        for e in which:
            samples = tuple(
                Sample(
                    episode_id=f"e{e}",
                    group_id=f"g{e // 2}",
                    agent="a",
                    input_ids=[0] * (n + 1),
                    loss_mask=[0] + [1] * n,
                    logprobs=[0.0] * (n + 1),
                    policy_version=0,
                    reward=e,
                )
                for n in episodes[e]
            )
            made.append(Scored(episode_id=f"e{e}", group_id=f"g{e // 2}", reward=e, samples=samples))
        return made

    algorithm = AlgorithmSection(loss_agg_mode=mode, norm_adv_by_std=False)  # type: ignore[arg-type]
    samples = assign_credit(scored(list(range(len(episodes)))), algorithm, constant_length=7)
    minis = mini_batches(samples, count, mode, random.Random(seed))
    assert len(minis) == min(count, len(episodes))
    assert sorted(i for m in minis for i in m.members) == list(range(len(samples)))
    for mini in minis:
        mine = sorted({int(samples[i].episode_id[1:]) for i in mini.members})
        assert len(mini.members) == sum(len(episodes[e]) for e in mine)  # no episode is split
        alone = {s.episode_id: s.token_weight for s in assign_credit(scored(mine), algorithm, constant_length=7)}
        for i in mini.members:
            assert samples[i].token_weight * mini.scale == pytest.approx(alone[samples[i].episode_id])


def test_groups_stay_together_where_there_are_enough() -> None:
    samples = random_samples(groups=4)
    for mini in mini_batches(samples, 2, "token-mean", random.Random(0)):
        groups = {samples[i].group_id for i in mini.members}
        assert {i for i, s in enumerate(samples) if s.group_id in groups} == set(mini.members)


# --- rollout correction -----------------------------------------------------------------------------------------


def test_with_a_correction_the_ratio_is_between_trainer_weights() -> None:
    config = {"algorithm": {"rollout_is": "token-truncate"}}
    model = tiny_model()
    samples = random_samples(model, noise=0.5)
    metrics = trainer_of(model, settings(lr=0.0, **config)).update(samples)
    assert metrics["ratio/max"] == metrics["ratio/mean"] == 1  # one step: not even a rounding error
    assert metrics["kl/mismatch_max"] > 0.5
    moving = trainer_of(model, settings(lr=0.02, ppo_epochs=2, **config)).update(samples)
    assert moving["ratio/max"] > 1.05  # the second pass is off the old weights
    still = trainer_of(model, settings(lr=0.0, ppo_epochs=2, **config)).update(samples)
    assert still["ratio/max"] == pytest.approx(1, abs=1e-5)


# --- what it says of the weights before ------------------------------------------------------------------------


def test_log_probabilities_before_an_update_are_those_of_the_weights_it_began_with() -> None:
    samples = random_samples(tiny_model(), noise=0.5, temperature=0.7)
    trainer = trainer_of(tiny_model(), settings(lr=0.05, ppo_epochs=2), temperature=0.7)
    expected = trainer.logprobs(samples)
    trainer.update(samples)
    assert sorted(trainer.before_update) == [i for i, s in enumerate(samples) if s.advantage]
    for i, found in trainer.before_update.items():
        np.testing.assert_allclose(found, expected[i], atol=1e-5)
        assert found.dtype == np.float32
    after = trainer.logprobs(samples)
    assert max(abs(after[i] - expected[i]).max() for i in trainer.before_update) > 0.05, "weights have moved"
    trainer.update(with_(samples, advantage=0.0))
    assert not trainer.before_update, "nothing was computed"


def test_without_a_correction_only_the_first_mini_batch_sees_the_weights_before() -> None:
    samples = random_samples(tiny_model(), groups=4)
    for correction, share in (("none", 0.5), ("token-truncate", 1.0)):
        config = settings(lr=0.05, mini_batch_num=2, algorithm={"rollout_is": correction})
        trainer = trainer_of(tiny_model(), config)
        expected = trainer.logprobs(samples)
        trainer.update(samples)
        assert 0 < len(trainer.before_update) <= share * len(samples)
        for i, found in trainer.before_update.items():
            np.testing.assert_allclose(found, expected[i], atol=1e-5)
    assert len(trainer.before_update) == len(samples)


# --- what is not finite -----------------------------------------------------------------------------------------


def test_steps_without_finite_gradients_change_nothing_and_three_in_a_row_end_the_run() -> None:
    model = tiny_model()
    trainer = trainer_of(model, settings())
    good = random_samples(model)
    bad = [replace(good[0], logprobs=[math.nan if m else 0.0 for m in good[0].loss_mask]), *good[1:]]
    before = weights(model)
    for _ in range(2):
        assert trainer.update(bad)["skipped_steps"] == 1
    assert same(before, weights(model))
    assert trainer.update(good)["skipped_steps"] == 0  # and the count starts over
    after = weights(model)
    assert not same(before, after)
    for _ in range(2):
        trainer.update(bad)
    with pytest.raises(RunError, match=r"3 consecutive optimizer steps.*episode-0-0.*optim\.lr"):
        trainer.update(bad)
    assert same(after, weights(model))


def test_infinite_gradients_are_skipped_too() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = PolicyOptimizer(model, Optim(lr=1.0))
    before = weights(model)
    model.weight.grad = torch.full((2, 2), torch.inf)
    assert not optimizer.step(0).applied
    assert same(before, weights(model))
    assert optimizer.steps == 0
    assert model.weight.grad is None


# --- settings that cannot be trained with -----------------------------------------------------------------------


def test_settings_that_cannot_be_trained_with() -> None:
    model = tiny_model()
    with pytest.raises(ConfigError, match="temperature"):
        PolicyTrainer(model, settings(), temperature=0.0, device="cpu")
    with pytest.raises(ConfigError, match="float16"):
        trainer_of(copy.deepcopy(model).half(), settings())
    with pytest.raises(ConfigError, match="lr_scheduler"):
        trainer_of(model, settings(optim={"lr_scheduler": "cosine"}))
    with pytest.raises(ValueError, match="reference"):
        trainer_of(model, settings(use_kl_loss=True))
    with pytest.raises(ValueError, match="reference"):
        trainer_of(model, settings()).reference_logprobs(Batch(random_samples()))
    with pytest.raises(ValueError, match="no trainable"):
        trainer_of(tiny_model().requires_grad_(False), settings())


# --- optimizer --------------------------------------------------------------------------------------------------


def test_bfloat16_models_move_at_small_learning_rates() -> None:
    """Without float32 masters, AdamW at 1e-6 leaves all but the smallest bfloat16 weights where they are."""
    direction = torch.where(torch.arange(64 * 64).reshape(64, 64) % 2 == 0, 1.0, -1.0)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    plain = copy.deepcopy(model)
    start = model.weight.detach().float()
    ours = PolicyOptimizer(model, Optim(lr=1e-6))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-6, weight_decay=0.0)
    for position in range(400):
        for m in (model, plain):
            (m.weight.float() * direction).sum().backward()
        ours.step(position)
        theirs.step()
        theirs.zero_grad()
    optimizer_state = ours.state_dict()
    master = optimizer_state["master/weight"]
    assert ((master - start) * -direction).mean().item() == pytest.approx(400e-6, rel=0.01)  # 400 steps of 1e-6
    assert ((model.weight.float() - start) * -direction).mean().item() == pytest.approx(400e-6, rel=0.1)
    assert ((plain.weight.float() - start) * -direction).mean().item() < 0.1 * 400e-6


def test_bfloat16_weights_are_their_masters_in_the_mean_from_the_first_step_on() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(2048, 1100, bias=False).to(torch.bfloat16)  # more than the random numbers in a row
    start = model.weight.detach().float()
    ours = PolicyOptimizer(model, Optim(lr=1e-6))
    (model.weight.float() * start.sign()).sum().backward()  # every weight's magnitude shrinks by 1e-6
    ours.step(0)
    master, weight = ours.state_dict()["master/weight"], model.weight.detach()
    nearest = master.to(torch.bfloat16)
    below = torch.where(nearest.abs() > master.abs(), (nearest.view(torch.int16) - 1).view(torch.bfloat16), nearest)
    above = (below.view(torch.int16) + 1).view(torch.bfloat16)
    assert ((weight == below) | (weight == above)).all()
    assert ((start - weight.float()) * start.sign()).mean().item() == pytest.approx(1e-6, rel=0.03)
    assert ((start - nearest.float()) * start.sign()).mean().item() < 0.5e-6  # what rounding to the nearest would do


def test_gradients_of_bfloat16_models_add_up_in_float32() -> None:
    model = torch.nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = PolicyOptimizer(model, Optim(lr=0.0, grad_clip=1e9))
    for gradient in (256.0, 1.0, 1.0):  # in bfloat16, 256 + 1 is 256
        (model.weight * gradient).sum().backward()
    assert optimizer.step(0).grad_norm == 258


def test_weights_are_written_in_place() -> None:
    model = tiny_model().to(torch.bfloat16)
    addresses = [p.data_ptr() for p in model.parameters()]
    view = model.model.layers[0].mlp.up_proj.weight.detach().view(-1)
    before = view.clone()
    trainer_of(model, settings(0.05)).update(random_samples())
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert not torch.equal(view, before)


def test_muon_moves_hidden_matrices_and_adamw_the_rest() -> None:
    for shape in ("qwen2", "llama-biased"):  # tied and untied head
        model = tiny_model(shape)
        hidden = _hidden_matrices(model)
        assert {n for n, _ in model.named_parameters() if "proj.weight" in n} == hidden
        trainer = trainer_of(model, settings(0.01, "muon"))
        trainer.update(random_samples(model))
        kinds = {key.partition("/")[2]: key.partition("/")[0] for key in trainer.state_dict() if "/" in key}
        assert {n for n, kind in kinds.items() if kind == "momentum_buffer"} == hidden


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_restored_trainer_goes_on_exactly(dtype: torch.dtype, optimizer: str) -> None:
    config = settings(0.01, optimizer, mini_batch_num=2)
    batches = [random_samples(seed=seed) for seed in range(4)]
    model = tiny_model().to(dtype)
    trainer = trainer_of(model, config)
    for batch in batches[:2]:
        trainer.update(batch)
    state = {k: v.clone() for k, v in trainer.state_dict().items()}
    saved = copy.deepcopy(model)
    for batch in batches[2:]:
        trainer.update(batch)
    resumed = trainer_of(saved, config)
    resumed.load_state_dict(state)
    for batch in batches[2:]:
        resumed.update(batch)
    assert same(weights(saved), weights(model))
    assert same(resumed.state_dict(), trainer.state_dict())


def test_the_state_of_another_model_or_optimizer_is_refused() -> None:
    def state(model: Any, *options: Any) -> dict[str, torch.Tensor]:
        trainer = trainer_of(model, settings(0.01, *options))
        trainer.update(random_samples())
        return trainer.state_dict()

    with pytest.raises(CheckpointError, match="optimizer"):
        trainer_of(tiny_model(), settings(0.01, "muon")).load_state_dict(state(tiny_model()))
    with pytest.raises(CheckpointError, match="shape"):
        trainer_of(tiny_model(), settings()).load_state_dict(state(tiny_model(intermediate_size=64)))
    with pytest.raises(CheckpointError, match="master"):
        trainer_of(tiny_model().to(torch.bfloat16), settings()).load_state_dict(state(tiny_model()))


# --- LoRA -------------------------------------------------------------------------------------------------------


def test_lora_trains_adapters_only_and_its_base_is_the_reference() -> None:
    base = tiny_model()
    before = weights(base)
    samples = random_samples(base, noise=0.0)
    model = lora.wrap(base, LoraSection(rank=3, alpha=6.0))
    trainer = trainer_of(model, settings(0.05, use_kl_loss=True))
    assert trainer.update(samples)["kl/ref"] == 0
    assert trainer.update(samples)["kl/ref"] > 1e-4
    after = weights(model.get_base_model())
    assert any("lora_B" in n and bool(p.any()) for n, p in after.items())
    for name, weight in before.items():
        kept = after.get(name, after.get(name.replace("proj.", "proj.base_layer.")))
        assert kept is not None
        assert torch.equal(kept, weight), name
    for sample, found in zip(samples, trainer.reference_logprobs(Batch(samples)), strict=True):
        recorded = [lp for lp, m in zip(sample.logprobs, sample.loss_mask, strict=True) if m]
        assert found.tolist() == pytest.approx(recorded, abs=2e-5)


def test_merging_adapters_gives_the_same_model() -> None:
    model = lora.wrap(tiny_model("llama"), LoraSection(rank=3))
    trainer_of(model, settings(0.05)).update(random_samples())
    merged = tiny_model("llama", seed=9)
    merged.load_state_dict(lora.merged_state_dict(model))
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-4)
        with model.disable_adapter():
            assert not torch.allclose(merged(ids).logits, model(ids).logits, atol=1e-2)


def test_adapters_start_the_same_for_the_same_seed_and_leave_the_random_stream_alone() -> None:
    torch.manual_seed(7)
    first = weights(lora.wrap(tiny_model(), LoraSection(rank=2), seed=1))
    state = torch.get_rng_state()
    model = tiny_model()
    torch.set_rng_state(state)
    second = weights(lora.wrap(model, LoraSection(rank=2), seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first, second)


def test_lora_settings_that_cannot_work() -> None:
    assert lora.wrap(model := tiny_model(), LoraSection()) is model
    with pytest.raises(ConfigError, match="target_modules"):
        lora.wrap(tiny_model(), LoraSection(rank=2, target_modules=["no_such_layer"]))
    with pytest.raises(ConfigError, match="vocabulary head"):
        lora.wrap(tiny_model("llama"), LoraSection(rank=2, target_modules=["q_proj", "lm_head"]))


def test_kl_penalties_for_the_reward() -> None:
    model, reference = tiny_model(), tiny_model(seed=1)
    samples = random_samples(model)
    config = settings(kl_loss_coef=0.5, kl_loss_type="k1", algorithm={"use_kl_in_reward": True})
    trainer = trainer_of(model, config, reference_model=reference)
    penalties = trainer.kl_penalties(samples)
    assert penalties.keys() == {(s.episode_id, s.agent) for s in samples}
    forked = [s for s in samples if s.episode_id == "episode-0-2"]
    assert len(forked) == 2
    expected = sum(sum(s.logprobs) for s in forked) - sum(
        float(r.sum()) for r in trainer.reference_logprobs(Batch(forked))
    )
    assert penalties["episode-0-2", forked[0].agent] == pytest.approx(0.5 * expected, rel=1e-4)


@table(
    ("scheduler", "warmup", "epochs", "has_gradient", "last"),
    [
        ("linear", 0, 1, "1111111111", 0.19),
        ("linear", 0, 1, "1010101011", 0.19),
        ("linear", 0, 1, "0000000001", 0.19),
        ("linear", 0, 1, "1111100001", 0.19),
        ("linear", 2, 1, "0010000001", 0.2125),
        ("cosine", 0, 1, "1010101011", 0.1220246),
        ("cosine", 0, 1, "0000000001", 0.1220246),
        ("linear", 0, 2, "1111111111", 0.1675),
        ("linear", 0, 2, "0101010101", 0.1675),
        ("linear", 0, 3, "1001001001", 0.16),
        ("constant", 0, 1, "0101010101", 1.0),
        ("constant", 4, 1, "0001", 1.0),
    ],
)
def test_the_schedule_ends_with_the_run_however_many_steps_have_a_gradient(
    scheduler: str, warmup: int, epochs: int, has_gradient: str, last: float
) -> None:
    model, peak, steps = tiny_model(), 1e-4, len(has_gradient)
    optim = {"lr": peak, "lr_scheduler": scheduler, "lr_warmup_steps": warmup, "min_lr_ratio": 0.1}
    trainer = trainer_of(model, settings(optim=optim, ppo_epochs=epochs), total_optimizer_steps=steps * epochs)
    good = random_samples(model)
    without = [replace(sample, advantage=0.0) for sample in good]
    numbers = [trainer.update(good if flag == "1" else without) for flag in has_gradient]
    assert [row["nothing_learnable"] for row in numbers] == [float(flag == "0") for flag in has_gradient]
    assert numbers[-1]["lr"] / peak == pytest.approx(last)
