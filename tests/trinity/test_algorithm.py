"""What Trinity finds by our dotted paths, and makes of it; that the numbers are right is in `test_parity`."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from trinity.algorithm import ALGORITHM_TYPE
from trinity.common.config import AlgorithmConfig, Config
from trinity.common.config_validator import AlgorithmConfigValidator
from trinity.trainer.verl.losses import TrinityPolicyLoss, build_trinity_loss
from verl.utils import tensordict_utils as tu

from astuner.config.schema import TrainerCommon
from astuner_ray.training.before_update import ROW, row_id
from astuner_trinity import mailbox
from astuner_trinity.algorithm import TokenLoss
from astuner_trinity.session import Session

HERE = "astuner_trinity.algorithm"
ROWS, LENGTH = 3, 4
PLAIN = TrainerCommon.model_validate({"algorithm": {"loss": "rloo"}})
"""It clips nothing, so every trained token has a gradient."""
WITH_ALL = TrainerCommon(use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.2)


def told(settings: TrainerCommon, **more: Any) -> AlgorithmConfig:
    """Trinity's section as the table writes it, after a way through a file."""
    return AlgorithmConfig(
        policy_loss_fn=f"{HERE}.TokenLoss",
        policy_loss_fn_args=json.loads(json.dumps({"settings": settings.model_dump(mode="json")})),
        kl_loss_fn="none",
        kl_loss_fn_args={},
        entropy_loss_fn=f"{HERE}.Entropy",
        entropy_loss_fn_args={"entropy_coef": settings.entropy_coeff},
        **more,
    )


def loss_of(settings: TrainerCommon) -> TrinityPolicyLoss:
    return pickle.loads(pickle.dumps(build_trinity_loss(told(settings))))


def micro_batch(settings: TrainerCommon) -> tuple[dict[str, torch.Tensor], TensorDict]:
    """What VERL's engine calls a loss with: rows of one prompt token and ``LENGTH`` of the response."""
    generator = torch.Generator().manual_seed(0)

    def numbers() -> torch.Tensor:
        return torch.randn(ROWS, LENGTH, generator=generator)

    rows = {name: numbers() for name in ("rollout_log_probs", "old_log_probs", "advantages")}
    if settings.use_kl_loss:
        rows["ref_log_prob"] = numbers()
    data = TensorDict(
        {
            **rows,
            "token_weight": torch.tensor([0.5, 0.25, 0.0]),
            ROW: torch.tensor([row_id(4, 6), row_id(4, 2), row_id(4, 0)]),
            "response_mask": torch.tensor([[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool),
            "prompts": torch.ones(ROWS, 1, dtype=torch.int64),
            "responses": torch.ones(ROWS, LENGTH, dtype=torch.int64),
            "attention_mask": torch.ones(ROWS, 1 + LENGTH, dtype=torch.int64),
        },
        batch_size=ROWS,
    )
    tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=8.0, global_batch_size=2 * ROWS)
    output = {"log_probs": torch.randn(ROWS * (1 + LENGTH), generator=generator).requires_grad_()}
    output["entropy"] = torch.rand(ROWS * (1 + LENGTH), generator=generator).requires_grad_()
    return output, data


@pytest.fixture(autouse=True)
def handed_in(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What workers tell the run."""
    found: list[Any] = []
    monkeypatch.setattr(mailbox, "hand_in", lambda *news: found.append(news))
    return found


def test_the_run_is_told_the_log_probabilities_before_the_update_and_nothing_later(handed_in: list[Any]) -> None:
    loss, (output, data) = loss_of(PLAIN), micro_batch(PLAIN)
    for _ in range(2):  # two optimizer steps of one update
        loss(output, data)
    ((method, step, found),) = handed_in
    assert (method, step) == (Session.trainer_logprobs, 4)
    assert sorted(found) == [2, 6], "the row that fills the batch up is not there"
    values = output["log_probs"].detach().reshape(ROWS, 1 + LENGTH)
    assert found[6].tolist() == values[0, [0, 1, 3]].tolist()
    assert found[2].tolist() == values[1, [1]].tolist()
    loss_of(PLAIN.model_copy(update={"save_tokens": False}))(output, data)
    assert len(handed_in) == 1


@pytest.mark.parametrize("settings", [PLAIN, WITH_ALL], ids=["plain", "with all terms"])
def test_trinitys_wrapper_takes_the_loss_and_the_entropy(settings: TrainerCommon) -> None:
    output, data = micro_batch(settings)
    loss, metrics = loss_of(settings)(output, data)
    loss.backward()
    gradient = output["log_probs"].grad
    assert gradient is not None
    # the logits at a token give the next one's probability: of row 0, tokens 0, 1 and 3 are trained, of row 1 token 1
    assert gradient.reshape(ROWS, 1 + LENGTH).ne(0).nonzero().tolist() == [[0, 0], [0, 1], [0, 3], [1, 1]]
    assert {"actor/kl", "actor/entropy"} <= set(metrics)
    assert ("actor/kl/ref" in metrics) == ("actor/logit_grad/kl" in metrics) == settings.use_kl_loss
    assert "actor/logit_grad/policy" in metrics
    assert ("actor/logit_grad/entropy" in metrics) == bool(settings.entropy_coeff)
    of_entropy = output["entropy"].grad
    assert (of_entropy is not None) == bool(settings.entropy_coeff), "without a bonus it is for the log only"


def test_the_bonus_is_the_weighted_entropy_of_the_trained_tokens() -> None:
    output, data = micro_batch(WITH_ALL)
    with_bonus, metrics = loss_of(WITH_ALL)(output, data)
    output.pop("entropy")
    without, _ = loss_of(WITH_ALL.model_copy(update={"entropy_coeff": 0.0}))(output, data)
    entropy = micro_batch(WITH_ALL)[0]["entropy"].reshape(ROWS, 1 + LENGTH)[:, :-1]
    mask, weight = data["response_mask"], data["token_weight"]
    # twice, because VERL takes the mean of two processes
    assert (without - with_bonus).item() == pytest.approx(2 * 0.2 * ((entropy * mask).sum(1) @ weight).item(), rel=1e-5)
    assert metrics["actor/entropy"].aggregate() == pytest.approx(2 * float(entropy[mask].detach().sum()) / 8, rel=1e-5)


def test_a_batch_without_weights_is_no_batch() -> None:
    output, data = micro_batch(TrainerCommon())
    del data["token_weight"]
    with pytest.raises(KeyError, match="token_weight"):
        loss_of(TrainerCommon())(output, data)


def test_another_trainer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"trainer_type is tinker.*remove the key"):
        TokenLoss("tinker", settings=TrainerCommon().model_dump(mode="json"))


def test_trinity_fills_in_nothing_that_learns_differently() -> None:
    """Were a key of the section left out, the algorithm's defaults are ours and not those of Trinity's."""
    config = Config()
    config.algorithm = AlgorithmConfig(algorithm_type=f"{HERE}.EpisodeAlgorithm")
    AlgorithmConfigValidator().validate(config)
    filled = config.algorithm
    assert (filled.policy_loss_fn, filled.kl_loss_fn, filled.kl_penalty_fn, filled.entropy_loss_fn) == (
        f"{HERE}.TokenLoss",
        "none",
        "none",
        "none",
    )


@pytest.mark.parametrize(("name", "reference"), [("EpisodeAlgorithm", False), ("EpisodeAlgorithmWithReference", True)])
def test_the_trainer_gets_advantages_and_makes_a_reference_only_for_kl(name: str, reference: bool) -> None:
    algorithm = ALGORITHM_TYPE.get(f"{HERE}.{name}")
    assert algorithm.use_reference is reference
    assert not algorithm.use_critic
    assert not algorithm.compute_advantage_in_trainer
    assert algorithm.schema == "experience"
