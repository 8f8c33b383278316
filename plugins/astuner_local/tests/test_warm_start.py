"""A warm start: what is learned from a file, what is measured of it, and where a run goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from astuner import ChatCodec, Sample, load_config, run
from astuner.contracts.errors import ConfigError, DataError
from astuner.testing import check_metrics
from astuner_local import warm_start
from astuner_local.plugin import locate_model
from astuner_local.tiny.problems import draw
from astuner_local.tiny.transcripts import TOOLS, transcript
from astuner_local.tiny.warmup import IGNORED, encode
from astuner_local.warm_start import read_conversations, warm_start_of

from .conftest import EXAMPLE

Overrides = Callable[..., list[str]]
TOKENIZER = AutoTokenizer.from_pretrained(str(locate_model("tiny-calculator")))


def shown(count: int = 16) -> list[dict[str, Any]]:
    rng = random.Random(0)
    return [{"messages": transcript(draw(rng, held_out=False), rng), "tools": TOOLS} for _ in range(count)]


def write(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def settings(file: Path, **more: Any) -> list[str]:
    return [f"local.warm_start.{key}={value}" for key, value in {"file": file, "steps": 2, **more}.items()]


def read(file: Path, *, longest: int = 256) -> list[Sample]:
    return read_conversations(file, ChatCodec(TOKENIZER), longest=longest, vocabulary=len(TOKENIZER))


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_what_the_assistant_says_is_learned_turn_by_turn(tmp_path: Path) -> None:
    samples = read(write(tmp_path / "shown.jsonl", shown()))
    for sample, row in zip(samples, shown(), strict=True):
        ids, labels = encode(TOKENIZER, row["messages"])
        assert list(sample.input_ids) == ids
        assert list(sample.loss_mask) == [int(label != IGNORED) for label in labels]


def test_a_reply_of_weight_0_is_part_of_a_prompt(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2", "weight": 0}]
    said = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (sample,) = read(write(tmp_path / "shown.jsonl", [{"messages": [*asked, *said]}]))
    learned = [token for token, mask in zip(sample.input_ids, sample.loss_mask, strict=True) if mask]
    assert TOKENIZER.decode(learned) == "4<|im_end|>"


def test_exact_tokens_are_taken_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path / "exact.jsonl", [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 0], "reward": 1.0}])
    (sample,) = read(file, longest=3)
    assert (sample.input_ids, sample.loss_mask) == ([5, 6, 7], [0, 1, 0])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"text": "no conversation"}, "'messages'"),
        ([], "list indices"),
        ({"messages": [{"role": "user", "content": "1 + 1?"}]}, "no assistant tokens"),
        (
            {"messages": [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "2"}]},
            "has no preceding call",
        ),
        ({"input_ids": [5, 6], "loss_mask": [1]}, "2 input_ids need a loss_mask"),
        ({"input_ids": [5, 6], "loss_mask": [1, 1]}, "no context to be predicted from"),
        ({"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 0, 1]}, "allowed are 3 tokens below"),
        ({"input_ids": [5, 1_000_000], "loss_mask": [0, 1]}, "up to 1000000"),
    ],
)
def test_a_line_that_cannot_be_learned_is_named(row: Any, why: str, tmp_path: Path) -> None:
    good = {"input_ids": [5, 6], "loss_mask": [0, 1]}
    file = write(tmp_path / "bad.jsonl", [good, row])
    with pytest.raises(DataError, match=r"bad\.jsonl:2: .*") as refused:
        read(file, longest=3)
    assert why in str(refused.value)


@pytest.mark.parametrize("weights", [[], ["astuner.model.lora.rank=4"], ["astuner.model.dtype=bfloat16"]])
def test_a_run_learns_from_the_file_and_then_from_episodes(
    weights: list[str], short: Overrides, tmp_path: Path
) -> None:
    file = write(tmp_path / "shown.jsonl", shown())
    run(EXAMPLE, short(*settings(file, lr=1e-3, conversations=16), *weights), backbone="local")
    found = rows(tmp_path / "run")
    check_metrics(found, backbone="local")
    warm = [row for row in found if "warm_start/loss" in row]
    assert [(row["step"], row["warm_start/lr"]) for row in warm] == [(1, 1e-3), (2, 1e-3)]
    assert warm[1]["warm_start/loss"] < warm[0]["warm_start/loss"]  # of the same conversations
    assert [row["step"] for row in found if "reward/mean" in row] == [3]
    assert [row["step"] for row in found if "val/success" in row] == [0, 2, 3]


def test_it_descends_on_the_cross_entropy(short: Overrides, tmp_path: Path) -> None:
    """One step on all conversations: its loss is the mean over the tokens that were said, and smaller afterwards."""
    given = shown(4)
    file = write(tmp_path / "shown.jsonl", given)
    model = AutoModelForCausalLM.from_pretrained(str(locate_model("tiny-calculator")))
    total, count = 0.0, 0
    for row in given:
        ids, labels = (torch.tensor([numbers]) for numbers in encode(TOKENIZER, row["messages"]))
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        total += float(torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum"))
        count += int((labels != IGNORED).sum())
    run(EXAMPLE, short(*settings(file, conversations=4, lr=1e-3)), backbone="local")
    first, second = [row for row in rows(tmp_path / "run") if "warm_start/loss" in row]
    assert first["warm_start/tokens"] == count
    assert first["warm_start/loss"] == pytest.approx(total / count, rel=1e-4)
    assert second["warm_start/loss"] < first["warm_start/loss"]


def test_a_run_that_goes_on_is_the_same_as_one_that_was_not_stopped(short: Overrides, tmp_path: Path) -> None:
    file = write(tmp_path / "shown.jsonl", shown())
    steps = "astuner.trainer_common.total_steps"
    whole = short(*settings(file), f"{steps}=4", "astuner.experiment_name=whole")
    run(EXAMPLE, whole, backbone="local")
    run(EXAMPLE, short(*settings(file), f"{steps}=3"), backbone="local")
    run(EXAMPLE, short(*settings(file), f"{steps}=4"), backbone="local", resume=True)
    ends = [{k: v for k, v in rows(tmp_path / name)[-2].items() if "time" not in k} for name in ("whole", "run")]
    assert [row["step"] for row in rows(tmp_path / "run") if "warm_start/loss" in row] == [1, 2]
    assert ends[0]["step"] == ends[1]["step"] == 4
    assert ends[0]["reward/mean"] == ends[1]["reward/mean"]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["astuner.trainer_common.use_kl_loss=true"], "use_kl_loss"),
        (["local.warm_start.steps=3"], "local.warm_start.steps is 3, but trainer_common.total_steps"),
        (["local.warm_start.file=nowhere.jsonl"], "nowhere.jsonl does not exist"),
    ],
)
def test_what_does_not_go_with_it_is_refused(more: list[str], why: str, short: Overrides, tmp_path: Path) -> None:
    file = write(tmp_path / "shown.jsonl", shown(1))
    config = load_config(EXAMPLE, short(*settings(file), *more), backbone="local")
    with pytest.raises((ConfigError, DataError), match=why):
        warm_start_of(config)


def test_conversations_are_drawn_in_turn() -> None:
    drawn = warm_start._draws(5, 3, seed=0)
    first = [place for _ in range(5) for place in next(drawn)]
    assert sorted(first) == sorted([*range(5)] * 3)
    again = warm_start._draws(5, 3, seed=0)
    assert first == [place for _ in range(5) for place in next(again)]
