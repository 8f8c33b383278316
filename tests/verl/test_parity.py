"""verl and the local backbone train the same thing: the same samples give the same numbers and the same gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from astuner_local.trainer.trainer import PolicyTrainer

from ..fsdp import parity
from ..fsdp.actor import TEMPERATURE
from ..fsdp.parity import LORA_CASES

ACTOR = Path(__file__).with_name("actor_rank.py")
pytestmark = pytest.mark.timeout(600)  # three processes that import all of verl, on a busy machine

CASES = {
    **parity.CASES,
    "kl-in-reward": parity.settings({"use_kl_in_reward": True}, kl_loss_type="k3"),
    "without-padding": parity.settings(use_kl_loss=True, entropy_coeff=0.2),
}
NATIVE: dict[str, dict[str, Any]] = {"without-padding": {"use_remove_padding": True}}
"""What verl's worker is told beside the settings, by case."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def model(folder: Path, tiny_model: Path) -> Any:
    return parity.model_in(folder / "model", made_of=tiny_model)


@pytest.fixture(scope="module")
def adapted(model: Any) -> Any:
    return parity.adapted(model)


@pytest.fixture(scope="module")
def samples(model: Any, adapted: Any) -> Any:
    return parity.samples_of(model, CASES) | parity.samples_of(adapted, LORA_CASES)


@pytest.fixture(scope="module")
def theirs(model: Any, adapted: Any, samples: Any, folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What verl's actor made of all cases: world size -> its ranks' results."""

    def given(cases: Mapping[str, Any], reference: Any) -> dict[str, dict[str, Any]]:
        return {
            name: {"settings": case, "samples": samples[name], "reference": reference, "native": NATIVE.get(name, {})}
            for name, case in cases.items()
        }

    return parity.updates_of_ranks(
        ACTOR,
        folder,
        backbone="verl",
        gpus=1,
        cases=given(CASES, dict(parity.noisy(model).named_parameters())),
        lora=(parity.adapters_of(adapted), given(LORA_CASES, None)),
    )


@pytest.mark.parametrize("world", parity.WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradient_are_the_local_backbones(
    name: str, world: int, model: Any, samples: Any, theirs: Any
) -> None:
    parity.check_update(theirs[world][0][name], model, samples[name], CASES[name], also=["entropy"])


@pytest.mark.parametrize("world", parity.WORLDS)
def test_logprobs_of_the_trained_tokens_are_the_local_backbones(
    world: int, model: Any, samples: Any, theirs: Any
) -> None:
    parity.check_logprobs([rank["entropy"] for rank in theirs[world]], model, samples["entropy"])


@pytest.mark.parametrize("world", parity.WORLDS)
@pytest.mark.parametrize("name", LORA_CASES)
def test_with_adapters_too(name: str, world: int, adapted: Any, samples: Any, theirs: Any) -> None:
    parity.check_update(theirs[world][0][name], adapted, samples[name], LORA_CASES[name], also=["entropy"])


@pytest.mark.parametrize("world", parity.WORLDS)
def test_kl_in_the_reward_is_the_local_backbones(world: int, model: Any, samples: Any, theirs: Any) -> None:
    mine, case = samples["kl-in-reward"], CASES["kl-in-reward"]
    trainer = PolicyTrainer(model, case, temperature=TEMPERATURE, device="cpu", reference_model=parity.noisy(model))
    found: dict[tuple[str, str], float] = {}
    for rank in theirs[world]:
        for row, reward in rank["kl-in-reward"]["rewards"].items():
            key = (mine[row].episode_id, mine[row].agent)
            found[key] = found.get(key, 0.0) + mine[row].reward - reward
    assert found == pytest.approx(trainer.kl_penalties(mine), rel=1e-4, abs=1e-5)
