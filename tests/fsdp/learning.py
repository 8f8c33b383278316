"""The math agent's example learns: it is killed, continued, exported and evaluated, on either engine."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from astuner.testing import check_metrics
from astuner_record.episode_log import EpisodeLog, tokenizer_file

from .runs import MATH_AGENT, PLAIN, Run, astuner, running

STEPS = 40
SAVED = 10
"""A checkpoint every so many steps."""
GROUPS = ATTEMPTS = 8
"""In each step, and in each group."""


def learn(backbone: str, factory: pytest.TempPathFactory) -> Run:
    """The example, which learns in fewer steps; killed after a checkpoint, and continued."""
    folder = factory.mktemp("learning") / "run"
    more = [
        *PLAIN,
        # near the start, as the example is: without it a run of a dozen forgets the calculator before that pays
        "astuner.trainer_common.use_kl_loss=true",
        "astuner.trainer_common.optim.lr=4.0e-3",
        "astuner.trainer_common.optim.lr_warmup_steps=10",
        f"astuner.trainer_common.total_steps={STEPS}",
        f"astuner.trainer_common.test_freq={STEPS}",
        f"astuner.trainer_common.save_freq={SAVED}",
        "astuner.trainer_common.save_episodes=-1",
    ]
    with running(backbone, MATH_AGENT, folder, "--no-resume", *more) as first:
        first.until(lambda: max(first.steps(), default=0) > SAVED)
        assert first.resumable_at() == SAVED
        first.killed()
    with running(backbone, MATH_AGENT, folder, "--resume", *more) as run:
        assert run.ends() == 0, run.said()
    first.is_gone()
    return run


def check_learns(run: Run) -> None:
    """Better on tasks that it was not trained on, beyond the intervals of both measurements."""
    before, after = run.validations()[0], run.validations()[STEPS]
    assert before["val/success_ci_high"] < after["val/success_ci_low"], (before, after)


def check_went_on_where_it_had_saved(run: Run) -> None:
    assert sorted(run.steps()) == list(range(1, STEPS + 1))
    draws = [sorted(groups) for _, groups in sorted(run.groups().items())]
    assert draws == [[f"g{draw:07d}" for draw in range(GROUPS * step, GROUPS * (step + 1))] for step in range(STEPS)], (
        "none twice, none left out"
    )
    assert run.saved() == ["step-000020", "step-000030", "step-000040"], "the newest three"


def check_books(run: Run, backbone: str, *also: str) -> None:
    """What is sampled is what is trained, every token of it, and every step has its numbers.

    :param also: metrics of this backbone that are only sometimes there.
    """
    certificate = run.certificate()
    assert certificate["turns_going_on"] > 1000
    assert certificate["continued_exactly_share"] == 1
    assert certificate["tokens"]["trained_share"] == 1
    rows = run.steps().values()
    for name in also:
        assert all(name in row for row in rows), name
    check_metrics(run.metrics(), backbone=backbone)
    # the same probabilities on both sides, after every update and after the kill
    assert max(row["kl/mismatch_max"] for row in rows) < 1e-3
    assert max(row["kl/mismatch_mean"] for row in rows) < 1e-5, "above |ppo_kl|, the mean of the same with its signs"
    assert run.failures() == []
    check_log(run)


def check_log(run: Run) -> None:
    """Each episode of each step is in the log once, with its credit and with what the trainer computed of it."""
    with EpisodeLog(run.folder) as log:
        episodes = [log.read(found) for found in log.list(["split=train"])]
    steps = Counter(one.credit[0].step for one in episodes if one.credit)
    assert steps == {step: GROUPS * ATTEMPTS for step in range(1, STEPS + 1)}
    for one in episodes:
        for sample, credited in zip(one.samples(), one.credit, strict=True):
            assert credited.trainer_logprobs is not None, "each has a gradient, be it the KL loss alone"
            recorded = [p for p, trained in zip(sample.logprobs, sample.loss_mask, strict=True) if trained]
            assert credited.trainer_logprobs == pytest.approx(recorded, abs=1e-3)
    assert tokenizer_file(run.folder / "episodes", "default") is not None


def check_anybody_loads_the_export(backbone: str, run: Run, to: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    astuner(backbone, "export", MATH_AGENT, run.folder, f"--to={to}")
    tokenizer, model = AutoTokenizer.from_pretrained(to), AutoModelForCausalLM.from_pretrained(to)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 3?"}], add_generation_prompt=True, return_tensors="pt"
    )
    with torch.inference_mode():
        answer = model.generate(prompt["input_ids"], max_new_tokens=8, do_sample=False)
    assert answer.shape[1] > prompt["input_ids"].shape[1]


def check_eval_asks_the_trained_model(backbone: str, run: Run) -> None:
    """The most probable answers, which the first model has right in 5 % of the tasks and a trained one in a third."""
    greedy = ("astuner.rollout.val_kwargs.temperature=0", "--tasks=128", "--json")
    trained, first = (
        json.loads(astuner(backbone, "eval", MATH_AGENT, run.folder, f"--checkpoint={which}", *greedy))
        for which in ("latest", "base")
    )
    assert trained["ci_low"] > first["ci_high"], (trained, first)
