"""Losses and advantage estimators as a researcher writes them: found, checked, and named when they are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from astuner import ConfigError, PluginError, load_config
from astuner.contracts.objective import Compared, LossInput, TokenLoss, step_wide
from astuner.rollout.credit import estimate_advantages, find_estimator, find_loss, token_loss
from astuner.runs.preflight import Preflight
from astuner.testing import check_advantages, check_loss
from tests.advantages import episode_advantages
from tests.table import table

OWN = """
from astuner.contracts.objective import Compared, LossInput

def policy_gradient(given: LossInput):
    return -given.advantages * given.logprobs

def wrong(given):
    return given.nothing

def mean(given):
    return given.logprobs.mean()

def best_of_group(compared: Compared):
    return [float(r == max(compared.rewards)) for r in compared.rewards]

NUMBER = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path


def given(n: int = 2) -> LossInput:
    ones = torch.full((n,), -1.0)
    return LossInput(
        logprobs=ones,
        old_logprobs=ones,
        rollout_logprobs=ones,
        advantages=torch.ones(n),
        owner=torch.zeros(n, dtype=torch.long),
        clip_low=0.2,
        clip_high=0.2,
    )


def experiment(folder: Path, **algorithm: str) -> Path:
    keys = "".join(f"      {key}: {value}\n" for key, value in algorithm.items())
    file = folder / "e.yaml"
    head = "astuner:\n  backbone: local\n  model: {path: tiny-calculator}\n  trainer_common:\n    algorithm:\n"
    file.write_text(head + keys)
    return file


@table(
    ("algorithm", "says"),
    [
        ({"loss": "grpoo"}, "e.yaml:6:7: astuner.trainer_common.algorithm.loss: unknown loss 'grpoo'; did you"),
        ({"adv_estimator": "rlo"}, "adv_estimator: unknown advantage estimator 'rlo'; did you mean rloo?"),
        ({"loss": "nobody/grpo"}, "unknown loss 'nobody/grpo'"),
    ],
)
def test_an_unknown_name_is_said_with_its_place(algorithm: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(experiment(tmp_path, **algorithm))
    assert says in str(refused.value)


@table(
    ("algorithm", "says"),
    [
        ({"loss": "own.py->policy_gradien"}, "did you mean policy_gradient?"),
        ({"loss": "own.py->NUMBER"}, "'own.py->NUMBER' is 3; it must be a function"),
        ({"adv_estimator": "owm.py->best_of_group"}, "did you mean own.py?"),
    ],
)
def test_code_that_is_not_there_is_said_before_a_run(algorithm: dict[str, str], says: str, own: Path) -> None:
    looked = Preflight(experiment(own, **algorithm))
    looked.parts()
    (told,) = [text for text in looked.mistakes.told if "algorithm" in text or "own" in text]
    assert says in told
    assert "e.yaml:6:" in told


def test_ones_own_are_found_beside_the_experiment(own: Path) -> None:
    config = load_config(experiment(own, loss="own.py->policy_gradient", adv_estimator="own.py->best_of_group"))
    algorithm = config.astuner.trainer_common.algorithm
    loss = token_loss(algorithm.loss, find_loss(algorithm.loss, config.base_dir), given())
    assert loss.loss.tolist() == [1.0, 1.0]
    estimator = find_estimator(algorithm.adv_estimator, config.base_dir)
    assert episode_advantages(["a", "b", "a"], [1.0, 0.5, 0.0], estimator) == [1.0, 1.0, 0.0]
    check_loss(find_loss("own.py->policy_gradient", own))
    check_advantages(estimator)


def test_what_they_do_wrong_is_said_with_its_line(own: Path) -> None:
    with pytest.raises(PluginError, match=r"'own.py->wrong' raised AttributeError: .*nothing.* \(.*own.py:8 in wrong"):
        token_loss("own.py->wrong", find_loss("own.py->wrong", own), given())
    with pytest.raises(PluginError, match=r"own.py:10\) returned a tensor of shape \[\]; it must .* \[2\]"):
        token_loss("own.py->mean", find_loss("own.py->mean", own), given())
    with pytest.raises(PluginError, match="returned as ratio a tensor of shape"):
        token_loss("x", lambda g: TokenLoss(loss=g.logprobs, ratio=g.logprobs.sum()), given())
    for wrong in (lambda c: [1.0], lambda c: [float("nan")] * 2):
        with pytest.raises(PluginError, match="one finite number per reward"):
            estimate_advantages("x", wrong, Compared(rewards=(1.0, 0.0), groups=("a", "a")))


def test_a_step_wide_estimator_sees_the_whole_step() -> None:
    seen = []

    @step_wide
    def whole(compared: Compared) -> list[float]:
        seen.append(compared.groups)
        return list(compared.rewards)

    assert episode_advantages(["a", "b", "a"], [1.0, 2.0, 3.0], whole) == [1.0, 2.0, 3.0]
    assert seen == [("a", "b", "a")]


@table(
    ("loss", "says"),
    [
        (lambda g: g.advantages * g.logprobs, "must be negative for positive advantages"),
        (lambda g: -(g.logprobs - g.old_logprobs).exp() * g.advantages, "Use given.ratio"),
        (lambda g: -g.advantages * g.logprobs * len(g.logprobs), "depend on its own sample only"),
        (lambda g: -g.advantages * g.logprobs.detach(), "has no gradient"),
        (lambda g: -g.advantages.mul_(2) * g.logprobs, "changed an input tensor"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_told_so(loss: object, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_loss(loss)  # type: ignore[arg-type]


@table(
    ("estimator", "says"),
    [
        (lambda c: [-r for r in c.rewards], "the best attempt gets less"),
        (lambda c: [float(i) for i, _ in enumerate(c.rewards)], "in another order"),
    ],
)
def test_an_estimator_that_breaks_the_contract_is_told_so(estimator: object, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_advantages(estimator)  # type: ignore[arg-type]
