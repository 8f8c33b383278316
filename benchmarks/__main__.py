"""``python -m benchmarks [NAME …] [--quick] [--write]``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.trained import Runs

# One thread per process, set before torch is imported: on models this small a second one costs more in waiting than it
# computes, and it would make every number depend on what else the machine does.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

HERE = Path(__file__).parent
BENCHMARKS = {
    "guard": "the hot ratios against the recorded ones, in some minutes; 1 where one is worse",
    "step_vs_trl": "a GRPO step of `local` against TRL's GRPOTrainer",
    "rollout_vs_hf": "tokens/s of the engine against transformers' generate and the machine's limit",
    "real_model_speed": "a real language model (ASTUNER_BENCHMARK_MODEL=FOLDER): steps against TRL's, generating",
    "rounding": "gain of a bfloat16 step, with stochastic and nearest rounding, compared with float32 (minutes)",
    "trainer_tokens": "what packing and prefix sharing save in an update",
    "engine_overhead": "CPU time per model call around an instant model",
    "agentscope_cost": "CPU time of AgentScope 2.x and 1.x per model call, per episode and per step",
    "codec_cost": "tokens tokenised and CPU time of encoding long conversations",
    "call_in_process": "CPU time that the core adds to a model call in the process",
    "call_overhead": "CPU time per model call over HTTP, compared with the proxies of other projects",
    "env_load": "64 parallel worlds: the environment service compared with agentscope-runtime's",
    "episode_log": "what the episode log costs, and how fast one of 100,000 episodes is opened and searched",
    "many_runs": "ten runs of 100,000 episodes each in the browser: compared, filtered, opened (minutes, 2 GB)",
    "collector": "what Python's garbage collector takes of a run, and what leaving out what is loaded saves",
    "sandbox_cost": "a run of the Python sandbox against starting an interpreter",
    "rubric_noise": "rubrics learned through a helper model that errs: agreement on held-out pairs, against votes",
    "asynchrony": "Trinity's synchronisation styles with agents that wait: throughput and learning curves (in"
    " .venv-trinity, half an hour)",
    "scale": "from one machine to a thousand: each term at small sizes, its growth, multiplied out (in .venv-verl)",
    "examples": "where the examples that learn end, five seeds each (hours)",
    "real_model": "a real language model on three tasks, three seeds each, with controls that must not learn (hours)",
    "gpu": "local, verl or trinity on GPUs: learning, mismatch, tokens/s, memory (ten minutes; --quick rehearses it)",
    "learning": "success on held-out tasks of 20 seeds, the recipe before, and ablations that must not learn (an hour)",
}
TRAINING = ("examples", "gpu", "learning", "real_model")
"""Whole training runs."""
NOT_BY_DEFAULT = ("guard", "asynchrony", "many_runs", "real_model_speed", "rounding", "scale", *TRAINING)
BY_DEFAULT = tuple(name for name in BENCHMARKS if name not in NOT_BY_DEFAULT)
ON_THE_CLOCK = ("env_load", "many_runs", "sandbox_cost")
"""Their work is in other processes, so that a busy machine spoils their numbers."""
_LOAD = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
"""Of the machine before anything is measured: what others do."""


def main(arguments: list[str] | None = None) -> int:
    asked_for = ", ".join(name for name in BENCHMARKS if name not in BY_DEFAULT)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Measure ASTuner; without NAME everything but {asked_for}.",
        epilog="\n".join(f"  {name:16} {what}" for name, what in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks")
    parser.add_argument("--quick", action="store_true", help="few repetitions: does it run, not what is the number")
    parser.add_argument("--write", action="store_true", help="keep the tables in benchmarks/NAME.md")
    keep = f"keep the training runs of {', '.join(TRAINING)} there, and go on with what is there"
    parser.add_argument("--runs", type=Path, metavar="DIR", help=keep)
    only = "of examples and real_model: only this one (repeatable), of real_model also none; of gpu: a backbone"
    parser.add_argument("--task", action="append", default=[], help=only)
    parser.add_argument("--seeds", type=int, metavar="N", help="of examples and real_model: only the first N seeds")
    settings = "of real_model: for every run (repeatable)"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=settings)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="training runs at once")
    parser.add_argument("--force", action="store_true", help="keep them although the machine is busy")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"no benchmark is called {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if options.quick and options.write:
        parser.error("--quick numbers are not worth keeping: leave out --quick or --write")
    names = options.names or BY_DEFAULT
    if options.write and not options.force and (os.cpu_count() or 1) < _LOAD and {*names} & {*ON_THE_CLOCK}:
        parser.error(
            f"{' and '.join(ON_THE_CLOCK)} measure on the clock, and the load here is {_LOAD:.1f} on {os.cpu_count()} "
            "cores: wait until it is quiet, leave out --write, or add --force"
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
            if name != "examples" or not options.task:  # some examples are no page, but may have pictures
                (HERE / f"{name}.md").write_text(text, encoding="utf-8")
            for file, draw in report.pictures.items():
                draw(HERE / file)
    return int(failed and not options.write)


if __name__ == "__main__":
    sys.exit(main())
