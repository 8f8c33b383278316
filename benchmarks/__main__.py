"""Command line of the benchmarks: ``python -m benchmarks [NAME …] [--quick] [--write]``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.trained import Runs

# One thread per process, set before torch is imported: on models this small a second thread waits more than it
# computes, and results would depend on other load on the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HERE = Path(__file__).parent
BENCHMARKS = {
    "guard": "hot-path ratios compared with recorded ones (minutes); exit code 1 if one is worse",
    "step_vs_trl": "a GRPO step of `local` against TRL's GRPOTrainer",
    "rollout_vs_hf": "tokens/s of the engine against transformers' generate and the machine's limit",
    "real_model_speed": "a real language model (ASTUNER_BENCHMARK_MODEL=FOLDER): steps against TRL, generation",
    "rounding": "gain of a bfloat16 step, with stochastic and nearest rounding, compared with float32 (minutes)",
    "trainer_tokens": "savings of packing and prefix sharing in an update",
    "engine_overhead": "CPU time per model call with a model that answers immediately",
    "agentscope_cost": "CPU time of AgentScope 2.x and 1.x per model call, per episode and per step",
    "codec_cost": "tokens and CPU time of encoding long conversations",
    "call_in_process": "CPU time that the core adds to a model call in process",
    "call_overhead": "CPU time per model call over HTTP, compared with the proxies of other projects",
    "env_load": "64 parallel worlds: the environment service compared with agentscope-runtime's",
    "episode_log": "cost of the episode log; speed of opening and searching 100,000 episodes",
    "many_runs": "ten runs of 100,000 episodes each in the browser: compared, filtered, opened (minutes, 2 GB)",
    "collector": "cost of Python's garbage collector in a run, and savings of excluding loaded objects",
    "sandbox_cost": "a run in the Python sandbox against the start of an interpreter",
    "rubric_noise": "rubrics learned with a noisy helper model: held-out agreement by number of votes",
    "asynchrony": "Trinity's synchronization styles with slow agents: throughput and learning curves (in"
    " .venv-trinity, half an hour)",
    "scale": "from one machine to a thousand: costs at small sizes, fitted and extrapolated (in .venv-verl)",
    "examples": "final success of the examples that learn, five seeds each (hours)",
    "real_model": "a real language model on three tasks, three seeds each, with controls that must not learn (hours)",
    "gpu": "local, verl or trinity on GPUs: learning, mismatch, tokens/s, memory (ten minutes; --quick rehearses it)",
    "run_time": "predicted and actual time of ten small runs (ten minutes)",
    "learning": "held-out success of 20 seeds, the previous recipe, and controls that must not learn (an hour)",
}
TRAINING = ("examples", "gpu", "learning", "real_model")
"""Benchmarks that start complete training runs."""
NOT_BY_DEFAULT = ("guard", "asynchrony", "many_runs", "real_model_speed", "rounding", "run_time", "scale", *TRAINING)
BY_DEFAULT = tuple(name for name in BENCHMARKS if name not in NOT_BY_DEFAULT)
ON_THE_CLOCK = ("env_load", "many_runs", "run_time", "sandbox_cost")
"""Benchmarks that measure wall time, because their work is in other processes; a busy machine distorts them."""
_LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
"""Load average before the measurements: other work on the machine."""


def main(arguments: list[str] | None = None) -> int:
    asked_for = ", ".join(name for name in BENCHMARKS if name not in BY_DEFAULT)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measure ASTuner. Default: all benchmarks except {asked_for}.",
        epilog="\n".join(f"  {name:16} {what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Benchmarks to run.")
    parser.add_argument("--quick", action="store_true", help="Run few repetitions, to check that a benchmark works.")
    parser.add_argument("--write", action="store_true", help="Write the tables to benchmarks/NAME.md.")
    keep = f"Keep the training runs of {', '.join(TRAINING)} in DIR, and resume unfinished runs there."
    parser.add_argument("--runs", type=Path, metavar="DIR", help=keep)
    only = "Run only this task of examples or real_model (repeatable; real_model: or none), or this backbone of gpu."
    parser.add_argument("--task", action="append", default=[], help=only)
    parser.add_argument("--seeds", type=int, metavar="N", help="Run only the first N seeds of examples and real_model.")
    settings = "Override a key in every run of real_model (repeatable)."
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=settings)
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="Number of concurrent training runs. Default: 1."
    )
    parser.add_argument("--force", action="store_true", help="Write the tables even if the machine is busy.")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"unknown benchmark: {', '.join(unknown)}. Available: {', '.join(BENCHMARKS)}")
    if options.quick and options.write:
        parser.error("--quick results are not written: omit --quick or --write")
    names = options.names or BY_DEFAULT
    if options.write and not options.force and (os.cpu_count() or 1) < _LOAD and {*names} & {*ON_THE_CLOCK}:
        parser.error(
            f"{' and '.join(ON_THE_CLOCK)} measure wall time, and the load is {_LOAD:.1f} on {os.cpu_count()} cores: "
            "wait until the machine is idle, omit --write, or add --force"
        )
    kept = {name: Runs(options.runs / name if options.runs else None, options.jobs) for name in TRAINING}
    trains: dict[str, dict[str, Any]] = {name: {"runs": kept[name]} for name in TRAINING}
    trains["real_model"] |= {"tasks": options.task, "seeds": options.seeds, "settings": options.set}
    trains["examples"] |= {"tasks": options.task, "seeds": options.seeds}
    trains["gpu"] |= {"tasks": options.task}
    failed = False
    for name in names:
        started = time.perf_counter()
        report = importlib.import_module(f"benchmarks.{name}").run(quick=options.quick, **trains.get(name, {}))
        command = f"python -m benchmarks {name}" + (" --quick" if options.quick else "")
        text = report.markdown(command, time.perf_counter() - started)
        print(text, flush=True)
        failed |= report.failed
        if options.write:
            if name != "examples" or not options.task:  # a subset is not a page, but may have pictures
                (HERE / f"{name}.md").write_text(text, encoding="utf-8")
            for file, draw in report.pictures.items():
                draw(HERE / file)
    return int(failed and not options.write)


if __name__ == "__main__":
    sys.exit(main())
