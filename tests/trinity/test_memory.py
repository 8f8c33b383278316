"""What the first lines of the examples say of GPUs and memory is what is computed for them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from astuner import load_config
from astuner_ray.native import facts
from astuner_trinity.facts import Facts

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "trinity").glob("*.yaml"))
SIZES = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
}
NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "tie_word_embeddings",
)
"""Of the `config.json` of Qwen2.5."""


def described(model: str, **_: Any) -> Mapping[str, Any]:
    return dict(zip(NAMES, SIZES[model.split("-")[1]], strict=True))


@pytest.fixture
def lines_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plan's lines of an experiment."""
    monkeypatch.setattr(facts, "model_config", described)

    def lines(path: Path, *overrides: str, gpus: int | None = None) -> Mapping[str, str]:
        return Facts.of(load_config(path, overrides, backbone="trinity"), gpus=gpus).memory_plan()

    return lines


def gib(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) GiB", text)]


def test_there_are_examples() -> None:
    assert {path.stem for path in EXAMPLES} == {"two_gpus", "eight_gpus", "long_context_small_gpus"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_what_is_computed_and_fits(path: Path, lines_of: Any) -> None:
    lines, text = lines_of(path), path.read_text()
    comment = " ".join(line.lstrip("# ") for line in text.partition("astuner:")[0].splitlines())
    state, activations, update = gib(lines["an update"])
    assert re.search(rf"update +{state} GiB .* \+ {activations} GiB .* = {update} GiB", comment)
    card = float(re.search(r"GPUs (?:with|of) (\d+) GiB", text)[1])  # type: ignore[index]  # or the test fails here
    assert update < 0.8 * card
    weights, *_, least = gib(lines["a rollout engine"])
    assert least < card
    assert re.search(rf"rollout +{0.9 * card:.1f} GiB .*: {weights} weights", comment)


@pytest.mark.parametrize(
    ("overrides", "gpus", "line"),
    [
        ((), 8, "8: 4 x 1 for rollouts, 4 for training"),
        (
            ("trinity.explorer.auxiliary_models=[{model_path: judge}]", "trinity.explorer.rollout_model.engine_num=3"),
            8,
            "8: 3 x 1 for rollouts, 1 for auxiliary models, 4 for training",
        ),
    ],
)
def test_who_has_how_many_gpus_is_said(overrides: tuple[str, ...], gpus: int, line: str, lines_of: Any) -> None:
    assert lines_of(EXAMPLES[0], *overrides, gpus=gpus)["GPUs"] == line


def test_a_model_that_is_described_in_other_words_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "model_config", lambda model, **_: {"vocab_size": 5, "n_layer": 2})
    assert list(Facts.of(load_config(EXAMPLES[0], backbone="trinity")).memory_plan()) == ["GPUs"]
