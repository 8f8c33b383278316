"""Savings in an update from packing without padding and from computing shared prefixes once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from astuner import Sample
from astuner.config.schema import AlgorithmSection, Optim, TrainerCommon
from astuner_local.trainer.trainer import PolicyTrainer
from benchmarks.local_side import LEARNING_RATE, collect_samples
from benchmarks.measure import interleave
from benchmarks.models import SHAPES, make, parameters, shipped_folder
from benchmarks.report import Report, ms

CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LAYOUTS = {"packed": "never", "packed, shared prefixes once": "always", "packed, `prefix_sharing: auto`": "auto"}


def run(*, quick: bool) -> Report:
    import torch

    torch.set_num_threads(1)
    samples = collect_samples(shipped_folder(), groups=8, group_size=8)
    report = Report(
        "Training: tokens computed, and time per update",
        "One batch of the calculator agent (8 tasks x 8 episodes, two turns, sampled by `tiny-calculator`), every "
        "sample trained, one optimizer step (AdamW, clipped gradient), one thread, float32; larger models train on "
        "the same tokens. *Padded* is the usual layout: prompts padded on the left, completions on the right, "
        "transformers' forward pass with an attention mask, log-probabilities of the completion tokens, the same "
        "clipped loss. In turns, in one process; medians.",
    )
    shown = False
    for name in ("tiny",) if quick else SHAPES:
        sides: dict[str, Callable[[], object]] = {"padded": _naive(make(name), samples)}
        found: dict[str, dict[str, float]] = {}
        for layout, sharing in LAYOUTS.items():
            sides[layout] = _update(_trainer(make(name), sharing), samples, found.setdefault(layout, {}))
        times = interleave(sides, repeats=3 if quick else 12)
        if not shown:
            _tokens(report, samples, found)
            shown = True
        raw = sum(len(s.input_ids) for s in samples)
        base = times["padded"]
        report.heading(f"{parameters(make(name)) / 1e6:.2f} million weights")
        report.table(
            (
                "ms per update",
                "CPU",
                "CPU, best",
                "wall",
                "sample tokens/CPU s",
                "padded / it (CPU)",
                "padded / it (wall)",
            ),
            [
                (
                    layout,
                    ms(t.median_cpu),
                    ms(t.min_cpu),
                    ms(t.median_wall),
                    f"{raw / t.median_cpu:,.0f}",
                    f"{base.median_cpu / t.median_cpu:.2f}x",
                    f"{base.median_wall / t.median_wall:.2f}x",
                )
                for layout, t in times.items()
            ],
        )
    return report


def _tokens(report: Report, samples: Sequence[Sample], found: dict[str, dict[str, float]]) -> None:
    rectangle = _rectangle(samples)
    raw = sum(len(s.input_ids) for s in samples)
    trained = sum(s.trained_tokens for s in samples)
    computed = {layout: metrics["tokens/computed"] for layout, metrics in found.items()}
    report.heading("Tokens")
    report.table(
        ("layout", "tokens computed", "per trained token"),
        [
            ("padded", rectangle, f"{rectangle / trained:.2f}"),
            *((layout, f"{n:.0f}", f"{n / trained:.2f}") for layout, n in computed.items()),
        ],
    )
    unique = computed["packed, shared prefixes once"]
    report.text(
        f"{len(samples)} samples of {raw} tokens, {trained} of them trained; {unique:.0f} distinct prefixes, so "
        f"{raw / unique:.2f} sample tokens and {trained / unique:.2f} trained tokens per token computed."
    )


def _trainer(model: Any, sharing: Any) -> PolicyTrainer:
    config = TrainerCommon(
        algorithm=AlgorithmSection(
            loss_agg_mode="token-mean", clip_ratio_low=CLIP_LOW, clip_ratio_high=CLIP_HIGH, filter_zero_advantage=False
        ),
        optim=Optim(optimizer="adamw", lr=LEARNING_RATE),
    )
    return PolicyTrainer(model, config, temperature=1.0, device="cpu", prefix_sharing=sharing)


def _update(trainer: PolicyTrainer, samples: Sequence[Sample], found: dict[str, float]) -> Callable[[], object]:
    return lambda: found.update(trainer.update(samples))


def _rectangle(samples: Sequence[Sample]) -> int:
    prompts = [_prompt_length(s) for s in samples]
    return len(samples) * (max(prompts) + max(len(s.input_ids) - n for s, n in zip(samples, prompts, strict=True)))


def _prompt_length(sample: Sample) -> int:
    return list(sample.loss_mask).index(1)


def _naive(model: Any, samples: Sequence[Sample]) -> Callable[[], object]:
    """Run a padded update as most trainers implement it."""
    import torch

    prompts = [_prompt_length(s) for s in samples]
    left, right = max(prompts), max(len(s.input_ids) - n for s, n in zip(samples, prompts, strict=True))
    ids = torch.zeros(len(samples), left + right, dtype=torch.long)
    attention, mask = torch.zeros_like(ids), torch.zeros(len(samples), right)
    old = torch.zeros(len(samples), right)
    for row, (sample, n) in enumerate(zip(samples, prompts, strict=True)):
        rest = len(sample.input_ids) - n
        ids[row, left - n : left + rest] = torch.tensor(sample.input_ids)
        attention[row, left - n : left + rest] = 1
        mask[row, :rest] = torch.tensor(sample.loss_mask[n:], dtype=torch.float32)
        old[row, :rest] = torch.tensor(sample.logprobs[n:])
    advantage = torch.tensor([s.advantage for s in samples])[:, None]
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def update() -> None:
        output = model(input_ids=ids, attention_mask=attention, logits_to_keep=right + 1, use_cache=False)
        logits = output.logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[:, left:, None])[..., 0]
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
        loss = -(torch.min(ratio * advantage, clipped * advantage) * mask).sum() / mask.sum()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return update
