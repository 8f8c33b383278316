"""Trinity and the local backbone train the same thing: the same samples give the same numbers and the same gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import verl

from ..fsdp import parity
from ..fsdp.parity import LORA_CASES

ACTOR = Path(__file__).with_name("actor_rank.py")
CASES = parity.CASES
pytestmark = pytest.mark.timeout(600)  # three processes that import all of verl, on a busy machine


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
    """What Trinity's actor made of all cases: world size -> its ranks' results."""

    def given(cases: Mapping[str, Any], reference: Any) -> dict[str, dict[str, Any]]:
        return {
            name: {"settings": case, "samples": samples[name], "reference": reference} for name, case in cases.items()
        }

    return parity.updates_of_ranks(
        ACTOR,
        folder,
        backbone="trinity",
        gpus=2,
        cases=given(CASES, dict(parity.noisy(model).named_parameters())),
        lora=(parity.adapters_of(adapted), given(LORA_CASES, None)),
    )


@pytest.mark.parametrize("world", parity.WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_loss_metrics_and_gradient_are_the_local_backbones(
    name: str, world: int, model: Any, samples: Any, theirs: Any
) -> None:
    case = CASES[name]
    also = ["entropy"] if case.entropy_coeff else []
    parity.check_update(theirs[world][0][name], model, samples[name], case, also=also)


@pytest.mark.parametrize("world", parity.WORLDS)
def test_logprobs_of_the_trained_tokens_are_the_local_backbones(
    world: int, model: Any, samples: Any, theirs: Any
) -> None:
    parity.check_logprobs([rank["entropy"] for rank in theirs[world]], model, samples["entropy"])


@pytest.mark.parametrize("world", parity.WORLDS)
@pytest.mark.parametrize("name", LORA_CASES)
def test_with_adapters_too(name: str, world: int, adapted: Any, samples: Any, theirs: Any) -> None:
    case = LORA_CASES[name]
    also = ["entropy"] if case.entropy_coeff else []
    parity.check_update(theirs[world][0][name], adapted, samples[name], case, also=also)
    sent = theirs[world][0][name]["sent"]
    if not case.optim.lr:  # nothing has moved: engines get the model with the adapters in it
        merged = copy.deepcopy(adapted).merge_and_unload().state_dict()
        assert sent.keys() == merged.keys()
        assert all(torch.allclose(sent[name], weight, atol=1e-6) for name, weight in merged.items())


def test_adapters_have_to_be_merged_here() -> None:
    """When this fails, verl does it itself: write its ``model.lora.merge``, and remove `astuner_trinity.merged`."""
    engine = Path(verl.__file__).with_name("workers") / "engine" / "fsdp" / "transformer_impl.py"
    assert "_merged_lora_per_tensor_param" not in engine.read_text()
