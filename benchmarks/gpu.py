"""The same experiments on GPUs with `local`, and with `verl` and `trinity` on vLLM, read from the files of the runs.

All inputs come with the repository or with packages: the weights of SmolLM2-135M, which learns, and random weights in
the shapes of larger models, which only take time and memory.  Without a GPU, ``--quick`` runs it on a tiny model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import Shape
from benchmarks.report import Report
from benchmarks.trained import FRESH, REPOSITORY, Command, Runs, Trained, run_astuner, run_folder, train

WORDS = REPOSITORY / "benchmarks/words.yaml"
LONG_ANSWERS = REPOSITORY / "benchmarks/long_answers.yaml"
REHEARSED = REPOSITORY / "examples/math_agent/math_agent.yaml"
"""Replacement of the word problems without a GPU: the shipped model solves some of its tasks."""
SEED = 310
NEEDED = {"local": "astuner_local", "verl": "transfer_queue", "trinity": "trinity"}
"""Backbone -> a module that only this backbone's dependencies provide."""
FULL, LORA = "all weights", "LoRA of rank 32"
ADAPTERS = (
    "astuner.model.lora.rank=32",
    "astuner.model.lora.alpha=64",
    "astuner.model.lora.target_modules=all-linear",
    "astuner.trainer_common.optim.lr=1.0e-4",
)
WARM = 2
"""Steps that are not measured, because they compile kernels and allocate memory."""


SHAPES = {
    "SmolLM2-1.7B": Shape(2048, 24, 32, 32, 8192),
    "Qwen2.5-7B": Shape(3584, 28, 28, 4, 18944),
}
"""Shapes of these models, with SmolLM2's vocabulary and tokenizer (its vocabulary is a third of Qwen2.5's)."""


@dataclass
class Measured:
    """One run."""

    backbone: str
    how: str
    run: Trained
    plan: Mapping[str, str]
    """Plan that ``--dry-run`` printed."""
    gpu_gib: float
    """Peak GPU memory in GiB, minus the memory in use before the run; 0 without a GPU."""
    certificate: Mapping[str, Any] = field(default_factory=dict)

    def of_steps(self, name: str) -> list[float]:
        """Return a metric of the measured steps."""
        steps = [row for row in self.run.rows if "time/train" in row and not row.get("nothing_learnable")]
        return [row[name] for row in steps[WARM:] if name in row]

    def mismatch(self) -> tuple[str, str]:
        """Return mean and maximum, in nats."""
        mean, largest = self.of_steps("kl/mismatch_mean"), self.of_steps("kl/mismatch_max")
        return f"{median(mean):.2g}", f"{max(largest):.2g}"

    def rate(self, tokens: str, seconds: str) -> float:
        """Return tokens per second, as the median over steps."""
        pairs = zip(self.of_steps(tokens), self.of_steps(seconds), strict=True)
        return median(n / s for n, s in pairs)


def run(*, quick: bool, runs: Runs = FRESH, tasks: Sequence[str] = ()) -> Report:
    """Run the backbones that are installed.

    :param tasks: ``local``, ``verl``, ``trinity``. Default: all that this machine supports.
    """
    import torch

    here = [backbone for backbone, module in NEEDED.items() if importlib.util.find_spec(module)]
    if torch.cuda.device_count() == 1 and "trinity" in here:
        here.remove("trinity")  # which has GPUs for rollouts and others for training
    if unknown := {*tasks} - {*here}:
        raise SystemExit(f"{', '.join(sorted(unknown))} cannot run here; available: {' and '.join(here)}")
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    if not card and not quick:
        raise SystemExit("torch found no GPU; python -m benchmarks gpu --quick rehearses it on the CPU")
    if not card:
        for engine in ("VERL", "TRINITY"):
            os.environ.setdefault(f"{engine}_PLATFORM", "cpu")
    chosen = [b for b in here if not tasks or b in tasks]
    report = Report(
        f"On a GPU: {card or 'a rehearsal without one'}",
        "One GPU, `astuner run` from the command line, in a separate process with a fresh run folder; all figures "
        "are read from the files of the runs. On `verl` vLLM generates, trainer and engine share the GPU, and vLLM "
        "sleeps during an update; on `trinity` trainer and engine have a GPU each. bfloat16, except for the weights "
        "that the optimizer updates. flash-attn: "
        f"{'installed' if importlib.util.find_spec('flash_attn') else 'not installed'}.",
    )
    with tempfile.TemporaryDirectory() as temporary:
        root = runs.folder.resolve() if runs.folder else Path(temporary)
        _learning(report, [m for b in chosen for m in _word_problems(b, root, quick)])
        _speed(report, [m for b in chosen for m in _long_answers(b, root, quick)])
    return report


def _word_problems(backbone: str, root: Path, quick: bool) -> Iterator[Measured]:
    """Train the example and evaluate its test tasks; with vLLM, kill the run of all weights midway and resume it."""
    steps, experiment = (4, REHEARSED) if quick else (40, WORDS)
    fewer = {"data.max_validation_tasks": 8, "data.train_batch_size": 4, "trainer_common.total_steps": steps}
    fewer |= {"trainer_common.test_freq": steps, "trainer_common.save_freq": steps // 2}
    settings = [f"astuner.{key}={value}" for key, value in fewer.items()] if quick else []
    for how, more in ((FULL, ()), (LORA, ADAPTERS)):
        cut = steps // 2 if backbone != "local" and how == FULL else None
        command = Command((str(experiment), "--backbone", backbone, *settings, *more, *_engine(backbone)))
        yield _measured(backbone, how, command, run_folder(root, f"words {backbone} {how}", SEED), cut)


def _long_answers(backbone: str, root: Path, quick: bool) -> Iterator[Measured]:
    """Measure steps of 64 answers of equal length, from random weights."""
    for name, how, more in (("SmolLM2-1.7B", FULL, ()), ("Qwen2.5-7B", LORA, ADAPTERS)):
        fewer = {"data.train_batch_size": 2, "rollout.max_response_length_in_one_turn": 8}
        model = {} if quick else {"model.path": _model(name, root)}
        settings = [f"astuner.{key}={value}" for key, value in {**model, **(fewer if quick else {})}.items()]
        command = Command((str(LONG_ANSWERS), "--backbone", backbone, *settings, *more, *_engine(backbone)))
        yield _measured(backbone, f"{name}, {how}", command, run_folder(root, f"long {backbone} {name}", SEED), None)


def _engine(backbone: str) -> Sequence[str]:
    """Return overrides for a backbone in addition to the experiment."""
    if backbone == "local" or os.environ.get(f"{backbone.upper()}_PLATFORM"):
        return ()
    if backbone == "trinity":
        return ("astuner.trainer_common.n_gpus_per_node=2",)
    return ("astuner.trainer_common.n_gpus_per_node=1", "verl.actor_rollout_ref.rollout.gpu_memory_utilization=0.4")


def _measured(backbone: str, how: str, command: Command, folder: Path, cut: int | None) -> Measured:
    """Run a command and return its measurements.

    :param cut: Step after which the run is killed; the same command then resumes it.
    """
    print(f"{backbone}, {how}: started", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    home = folder.with_name(f"{folder.name}.home")
    said = run_astuner(["run", *command.arguments, "--run-dir", str(folder), "--dry-run", "--json"], home)
    with _memory() as used:
        if cut is not None and not folder.exists():
            _killed_after(cut, command, folder, home)
        trained = train(SEED, command, folder)
    certificate = json.loads((folder / "certificate.json").read_text())
    print(f"{backbone}, {how}: {trained.seconds:.0f} s", file=sys.stderr, flush=True)
    return Measured(backbone, how, trained, json.loads(said)["plan"], max(used) - used[0], certificate)


def _killed_after(step: int, command: Command, folder: Path, home: Path) -> None:
    """Start the run and kill it without warning once it can resume from ``step``."""
    arguments = ["run", *command.arguments, "--seed", str(SEED), "--run-dir", str(folder)]
    environ = {**os.environ, "ASTUNER_HOME": str(home)}
    process = subprocess.Popen([sys.executable, "-m", "astuner", *arguments], env=environ, stdout=subprocess.DEVNULL)
    while not any(folder.glob(f"resume/**/global_step_{step}/astuner.json")):
        if process.poll() is not None:
            raise RuntimeError(f"{folder}: the run ended with {process.returncode} before it was killed: see run.log")
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def _memory() -> Iterator[list[float]]:
    """Record GiB in use on the first GPU twice per second; the first entry is the use before the block."""
    found, over = [_gpu_gib()], threading.Event()

    def look() -> None:
        while not over.wait(0.5):
            found.append(_gpu_gib())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _gpu_gib() -> float:
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
        return float(subprocess.run(asked, capture_output=True, text=True, check=True).stdout) / 1024
    except FileNotFoundError:  # no GPU: a rehearsal
        return 0.0


def _model(name: str, root: Path) -> Path:
    """Return a folder with random weights in the shape ``name``, creating it once."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from astuner_smollm2.cache import model_folder

    folder, shape = root / name, SHAPES[name]
    if not folder.exists():
        source = model_folder("smollm2-135m")
        config = AutoConfig.from_pretrained(source)
        config.hidden_size, config.num_hidden_layers, config.intermediate_size = shape.hidden, shape.layers, shape.mlp
        config.num_attention_heads, config.num_key_value_heads = shape.heads, shape.kv_heads
        config.head_dim, config.initializer_range = shape.hidden // shape.heads, 0.02
        torch.manual_seed(0)
        with torch.device("cuda"):
            build: Any = AutoModelForCausalLM.from_config  # not annotated
            model = build(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
        del model
        torch.cuda.empty_cache()
    return folder


def _learning(report: Report, found: Sequence[Measured]) -> None:
    report.heading("SmolLM2-135M learns the word problems")
    report.text(
        f"`examples/word_problems`, one seed, {found[0].run.before.tasks} test problems that no recipe was chosen by, "
        "one greedy answer each, with Wilson's 95 % interval. With vLLM the run of all weights was killed (`kill "
        "-9`) midway and resumed with the same command; its seconds cover its steps and validations. Mismatch: "
        "absolute difference between the trainer's and the rollout's log-probabilities of the generated tokens, with "
        "the same weights; mean and maximum."
    )
    report.table(
        ("run", "before", "after", "s", "s/step", "mismatch", "largest", "clipped", "trained"),
        [
            (
                f"{m.backbone}, {m.how}",
                m.run.before,
                m.run.after,
                f"{m.run.seconds:.0f}",
                f"{median(m.of_steps('time/step')):.2f}",
                *m.mismatch(),
                f"{median(m.of_steps('clip_frac')):.2%}",
                f"{m.certificate['tokens']['trained_share']:.0%}",
            )
            for m in found
        ],
    )


def _speed(report: Report, found: Sequence[Measured]) -> None:
    report.heading("Long answers of larger models")
    report.text(
        "Random weights in the shapes of these models with SmolLM2's 49,152 words, bfloat16: 8 tasks x 8 answers of "
        "512 tokens, `micro_batch_tokens` 8192, activation checkpointing. Medians of the steps after the first "
        f"{WARM}. *Used* is the peak that `nvidia-smi` showed for the first GPU, including CUDA and vLLM (on `verl` "
        "0.4 of the GPU); *trainer* is torch's peak as VERL logs it."
    )
    report.table(
        ("run", "s/step", "generated tokens/s", "trained tokens/s", "mismatch", "largest", "used GiB", "trainer GiB"),
        [
            (
                f"{m.backbone}, {m.how}",
                f"{median(m.of_steps('time/step')):.1f}",
                f"{m.rate('tokens/generated', 'time/rollout'):,.0f}",
                f"{m.rate('tokens/raw', 'time/train'):,.0f}",
                *m.mismatch(),
                f"{m.gpu_gib:.1f}",
                f"{max(m.of_steps('perf/gpu_memory_gb'), default=0) * 1e9 / 2**30:.1f}" if m.backbone == "verl" else "",
            )
            for m in found
        ],
    )
    report.text("What the plan (`--dry-run`) had said of memory:")
    lines = [(m, name, line) for m in found for name, line in m.plan.items() if "memory" in name or "GPU" in name]
    report.text("\n".join(f"- {m.backbone}, {m.how}: *{name}*: {line}" for m, name, line in lines))
