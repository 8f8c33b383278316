"""The optimizer that VERL makes moves weights as the local backbone's does, on one process and on two.

The workers build it as VERL's engine does: VERL's `build_optimizer`, schedule, clipping and checkpoints around a model
that FSDP 2 shards.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from astuner.config.schema import LoraSection, Optim, TrainerCommon
from astuner.contracts.errors import CheckpointError, ConfigError
from astuner_local.trainer.lora import wrap
from astuner_local.trainer.optim import PolicyOptimizer as LocalOptimizer
from astuner_ray.native.table import kwargs_for
from astuner_ray.training.before_update import BeforeUpdate, row_id
from astuner_ray.training.optim import PolicyOptimizer

VOCABULARY, TOTAL, UPDATES, SAVED_AFTER = 97, 6, 5, 2
CASES: dict[str, dict[str, Any]] = {
    f"{optimizer}-{scheduler}": {"optimizer": optimizer, "lr_scheduler": scheduler}
    for optimizer in ("adamw", "muon")
    for scheduler in ("constant", "linear", "cosine")
} | {
    "muon-lora": {"optimizer": "muon", "lr_scheduler": "linear"},
    "muon-untied-clipped": {"optimizer": "muon", "grad_clip": 1.0},
}


def settings(case: str) -> Optim:
    """Everything away from its default; the gradients are far above the clipped case's norm, and below the others'."""
    common = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.8, "betas": (0.85, 0.9), "grad_clip": 1e9}
    return Optim.model_validate({**common, "lr_warmup_steps": 2, "min_lr_ratio": 0.1, **CASES[case]})


def model_of(case: str) -> Any:
    """A Qwen2 of odd sizes: some weights cannot be cut evenly, and the adapters' first dimension not at all."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=57,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
        tie_word_embeddings="untied" not in case,
    )
    model = Qwen2ForCausalLM(config)
    return wrap(model, LoraSection(rank=1)) if "lora" in case else model


def gradients(model: Any, update: int) -> dict[str, torch.Tensor]:
    """What the update is given, by name."""
    generator = torch.Generator().manual_seed(update)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters() if p.requires_grad}


def rates_of_local(case: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and rates of the local backbone's updates."""
    model = model_of(case)
    optimizer = LocalOptimizer(model, settings(case), total_steps=TOTAL)
    rates = []
    for update in range(UPDATES):
        for name, grad in gradients(model, update).items():
            model.get_parameter(name).grad = grad
        rates.append(optimizer.step(update).lr)
    return {n: p.detach() for n, p in model.named_parameters()}, rates


class Sharded:
    """A model with what VERL's engine puts around it."""

    def __init__(self, case: str) -> None:
        from omegaconf import OmegaConf
        from torch.distributed.fsdp import fully_shard
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
        from verl.utils.config import omega_conf_to_dataclass
        from verl.utils.torch_functional import get_constant_schedule_with_warmup
        from verl.workers.config.optimizer import build_optimizer

        self.model = model_of(case)
        for layer in [m for m in self.model.modules() if type(m).__name__ == "Qwen2DecoderLayer"]:
            fully_shard(layer)
        fully_shard(self.model)
        optim = settings(case)
        native = OmegaConf.create(
            {
                "_target_": "verl.workers.config.FSDPOptimizerConfig",
                "lr": optim.lr,
                "weight_decay": optim.weight_decay,
                "clip_grad": optim.grad_clip,
                "optimizer": PolicyOptimizer.__name__,
                "optimizer_impl": PolicyOptimizer.__module__,
                "override_optimizer_config": kwargs_for(
                    optim, total_steps=TOTAL, updates_per_step=1, vocab_size=VOCABULARY
                ),
            }
        )
        self.config = omega_conf_to_dataclass(native)
        self.optimizer = build_optimizer(self.model.parameters(), self.config)
        self.scheduler = get_constant_schedule_with_warmup(self.optimizer, 0)
        contents = ["model", "optimizer", "extra"]
        self.checkpoints = FSDPCheckpointManager(
            self.model,
            self.optimizer,
            self.scheduler,
            checkpoint_config=OmegaConf.create({"save_contents": contents, "load_contents": contents}),
        )

    def update(self, grads: dict[str, torch.Tensor], *, step: int = 0) -> float:
        """Take one optimizer step as `optimizer_step` of VERL's engine does, and return the rate.

        :param step: Training step, from 0.
        """
        see_row_of(step + 1)
        from torch.distributed.tensor import distribute_tensor
        from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

        for name, grad in grads.items():
            weight = self.model.get_parameter(name)
            weight.grad = distribute_tensor(grad, weight.device_mesh, weight.placements, src_data_rank=None)
        fsdp2_clip_grad_norm_(self.model.parameters(), max_norm=self.config.clip_grad)
        self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(rate)

    def weights(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().full_tensor() for n, p in self.model.named_parameters()}


def see_row_of(step: int) -> None:
    """Show the process's loss a row of a training step, from 1."""
    one = torch.zeros(1, 1)
    rows = torch.tensor([row_id(step, 0)])
    BeforeUpdate(None).see(TrainerCommon(), rows=rows, logprobs=one, before=one, trained=one, rows_of_step=1)


def run_case(case: str, folder: Path) -> dict[str, Any]:
    """Take five updates with a step of zeros before the third; then resume from the checkpoint before that step."""
    whole = Sharded(case)
    rates = []
    for update in range(UPDATES):
        if update == SAVED_AFTER:
            whole.checkpoints.save_checkpoint(str(folder / case), global_step=update)
            before = whole.weights()
            whole.update({n: torch.zeros_like(g) for n, g in gradients(whole.model, 0).items()}, step=update - 1)
            unchanged = all(torch.equal(before[n], w) for n, w in whole.weights().items())
        rates.append(whole.update(gradients(whole.model, update), step=update))
    resumed = Sharded(case)
    resumed.checkpoints.load_checkpoint(str(folder / case))
    for update in range(SAVED_AFTER, UPDATES):
        resumed.update(gradients(resumed.model, update), step=update)
    return {
        "rates": rates,
        "unchanged": unchanged,
        "weights": whole.weights(),
        "resumed": resumed.weights(),
        "by_muon": sum(len(g["params"]) for g in whole.optimizer.param_groups if g["muon"]),
    }


def tiny_share() -> bool:
    """Whether a gradient is seen that one process alone has, and whose square is 0 in float32."""
    sharded = Sharded("adamw-constant")
    grads = {n: torch.zeros_like(g) for n, g in gradients(sharded.model, 0).items()}
    grads["model.norm.weight"][-1] = 1e-30
    sharded.update(grads)
    return bool(sharded.optimizer.state)


def worker(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    found: dict[str, Any] = {case: run_case(case, folder) for case in CASES}
    found["tiny share"] = tiny_share()
    if rank == 0:
        torch.save(found, folder / "found.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the workers found, by case."""
    folder = tmp_path_factory.mktemp("optim")
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(request.param), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(request.param)
    ]
    for process in workers:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    result: dict[str, Any] = torch.load(folder / "found.pt")
    return result


@pytest.mark.parametrize("case", CASES)
def test_weights_move_as_the_local_backbones_do(found: dict[str, Any], case: str) -> None:
    expected, rates = rates_of_local(case)
    assert found[case]["rates"] == rates
    moved = found[case]["weights"]
    assert moved.keys() == expected.keys()
    # Muon computes in bfloat16: where processes add the norm up in another order, the 8th bit may fall differently
    tolerance = 0.02 if case == "muon-untied-clipped" else 1e-6
    for name, start in model_of(case).named_parameters():
        distance = (expected[name] - start).norm()
        assert (distance > 0) == start.requires_grad
        assert (moved[name] - expected[name]).norm() <= tolerance * distance, name
    assert found[case]["by_muon"] == (0 if "adamw" in case else 14 if "lora" in case else 7)


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_zeros_changes_nothing(found: dict[str, Any], case: str) -> None:
    assert found[case]["unchanged"]


def test_a_gradient_that_one_process_has_is_a_gradient(found: dict[str, Any]) -> None:
    assert found["tiny share"]


@pytest.mark.parametrize("case", CASES)
def test_verls_checkpoint_continues_exactly(found: dict[str, Any], case: str) -> None:
    assert all(torch.equal(found[case]["resumed"][n], w) for n, w in found[case]["weights"].items())


# --- without processes ------------------------------------------------------------------------------------------


def plain(case: str = "muon-linear", model: Any = None, **changes: Any) -> PolicyOptimizer:
    """The optimizer of a model that is not sharded."""
    optim = settings(case).model_copy(update=changes)
    kwargs = kwargs_for(optim, total_steps=TOTAL, updates_per_step=1, vocab_size=VOCABULARY)
    weights = (model or model_of(case)).parameters()
    return PolicyOptimizer(weights, lr=optim.lr, weight_decay=optim.weight_decay, **kwargs)


def test_the_kwargs_are_plain_values_that_yaml_has() -> None:
    kwargs = kwargs_for(settings("muon-linear"), total_steps=6, updates_per_step=2, vocab_size=97)
    assert kwargs == {
        "optimizer": "muon",
        "betas": [0.85, 0.9],
        "momentum": 0.8,
        "lr_scheduler": "linear",
        "lr_warmup_steps": 2,
        "min_lr_ratio": 0.1,
        "total_steps": 12,
        "updates_per_step": 2,
        "vocab_size": 97,
    }


def test_embedding_and_head_are_told_by_their_rows_alone() -> None:
    """So a hidden matrix with as many rows is AdamW's, and one with as many columns stays Muon's."""
    shapes = ((VOCABULARY, 4), (VOCABULARY, 8), (4, VOCABULARY), (3, 3), (2, 3, 4), (VOCABULARY,))
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(shape)) for shape in shapes])
    muon, matrices, rest = plain(model=model).param_groups
    assert [tuple(p.shape) for p in muon["params"]] == [(4, VOCABULARY), (3, 3)]
    assert [tuple(p.shape) for p in matrices["params"]] == [(VOCABULARY, 4), (VOCABULARY, 8), (2, 3, 4)]
    assert [tuple(p.shape) for p in rest["params"]] == [(VOCABULARY,)]
    assert (muon["weight_decay"], matrices["weight_decay"], rest["weight_decay"]) == (0.1, 0.1, 0.0)


def test_what_cannot_be_trained_is_refused() -> None:
    optim = settings("adamw-cosine")
    with pytest.raises(ConfigError, match=r"lr_scheduler is cosine.*total_steps"):
        PolicyOptimizer(
            model_of("adamw-cosine").parameters(),
            lr=optim.lr,
            weight_decay=0.0,
            **kwargs_for(optim, total_steps=None, updates_per_step=1, vocab_size=VOCABULARY),
        )
    with pytest.raises(ValueError, match="vocab_size is 97"):
        plain(model=torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no trainable"):
        plain(model=model_of("muon-linear").requires_grad_(False))


def step_of_ones(optimizer: PolicyOptimizer, gradient: float = 1.0) -> float:
    """Take one optimizer step with equal gradients, and return the rate."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.full_like(weight, gradient)
    optimizer.step()
    return float(optimizer.param_groups[0]["lr"])


def test_a_resumed_run_has_its_own_settings() -> None:
    first = plain()
    step_of_ones(first)
    second = plain(weight_decay=0.3, betas=(0.5, 0.6))
    second.load_state_dict(first.state_dict())
    assert [g["weight_decay"] for g in second.param_groups] == [0.3, 0.3, 0.0]
    assert all(tuple(g["betas"]) == (0.5, 0.6) for g in second.param_groups)


def test_the_rate_follows_from_the_training_step() -> None:
    """Steps without a gradient, and updates of fewer optimizer steps, do not delay the schedule."""
    optim = settings("adamw-linear").model_copy(update={"lr": 1.0, "lr_warmup_steps": 0, "min_lr_ratio": 0.0})
    kwargs = kwargs_for(optim, total_steps=5, updates_per_step=2, vocab_size=VOCABULARY)
    optimizer = PolicyOptimizer(model_of("adamw-linear").parameters(), lr=1.0, weight_decay=0.0, **kwargs)
    rates: list[float] = []
    for step, gradients in {1: (1.0, 1.0), 2: (0.0,), 4: (1.0,), 5: (0.0, 1.0)}.items():
        see_row_of(step)
        rates += [step_of_ones(optimizer, gradient) for gradient in gradients]
    assert rates == pytest.approx(
        [1.0, 0.9, 0.9, 0.4, 0.4, 0.1]
    )  # the rate shown after a step of zeros is the last one


def test_the_state_of_another_optimizer_is_refused() -> None:
    state = plain("adamw-linear").state_dict()
    with pytest.raises(CheckpointError, match=r"state covers \d+ weights by AdamW and \d+ .*optim\.optimizer"):
        plain("muon-linear").load_state_dict(state)


if __name__ == "__main__":
    worker(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
