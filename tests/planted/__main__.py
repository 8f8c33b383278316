"""Record planted runs: ``python -m tests.planted [--seeds 1 2 3] [--only NAME ...] [--minutes N]``.

Runs that are recorded already are skipped, so the command can be stopped and started again. One run trains at a time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from astuner import run
from astuner.contracts.errors import AstunerError, Interrupted
from astuner.support.json_lines import read_jsonl
from tests.planted import agent
from tests.planted.faults import FAULTS, HEALTHY, Fault, behaviour

HERE = Path(__file__).parent
RECORDED = HERE.parents[1] / "plugins" / "astuner_report" / "tests" / "data" / "planted"
SEEDS = (1, 2, 3)
HEALTHY_SEED = 11
NOT_READ = ("time", "engine/", "throughput/", "energy/", "tokens/computed", "tokens/raw", "perf/", "rollout/seconds")


SHORTER = ("astuner.trainer_common.total_steps=40", "astuner.trainer_common.test_freq=20")
"""Overrides of all seeds but the first, which has 60 steps."""


def wanted(seeds: Sequence[int]) -> Iterator[tuple[str, Fault | None, Sequence[str], int]]:
    """Yield name, fault, overrides and seed of every run, the first seed of all faults first."""
    for number, seed in enumerate(seeds):
        for name, fault in FAULTS.items():
            yield f"{name}_{seed}", fault, [*(SHORTER if seed > 1 else ()), *fault.overrides], seed
        if not number:
            for name, overrides in HEALTHY.items():
                yield f"healthy-{name}_{HEALTHY_SEED}", None, overrides, HEALTHY_SEED


def train(fault: Fault | None, overrides: Sequence[str], seed: int, folder: Path) -> list[dict[str, Any]]:
    """Train one run and return the rows of its ``metrics.jsonl``; a run that ends with an error keeps its rows."""
    given = [f"astuner.seed={seed}", f"astuner.experiment_dir={folder}", "astuner.experiment_name=run"]
    given += overrides
    agent.current = behaviour(fault, seed, _episodes(given))
    try:
        with fault.patch(seed) if fault else nullcontext():
            run(HERE / "base.yaml", given, backbone="local", resume="never")
    except Interrupted:
        raise
    except AstunerError as error:
        print(f"    ended: {error}"[:300], flush=True)
    return read_jsonl(folder / "run" / "metrics.jsonl")


def _episodes(given: Sequence[str]) -> int:
    keys = {"train_batch_size": 8, "num_repeat": 4, "total_steps": 60}
    for override in given:
        key, _, value = override.partition("=")
        if (name := key.rpartition(".")[2]) in keys:
            keys[name] = int(value)
    return keys["train_batch_size"] * keys["num_repeat"] * keys["total_steps"]


def compressed(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the rows without times and speeds, with six digits."""
    lines = []
    for row in rows:
        kept = {
            n: float(f"{v:.6g}") if isinstance(v, float) else v for n, v in row.items() if not n.startswith(NOT_READ)
        }
        lines.append(json.dumps(kept, separators=(",", ":")) + "\n")
    return gzip.compress("".join(lines).encode(), mtime=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--into", type=Path, default=RECORDED)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    arguments.into.mkdir(parents=True, exist_ok=True)
    for name, fault, overrides, seed in wanted(arguments.seeds):
        path = arguments.into / f"{name}.jsonl.gz"
        if path.exists() or (arguments.only and name.rpartition("_")[0] not in arguments.only):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            rows = train(fault, overrides, seed, Path(folder))
            alarms = [a["rule"] for a in read_jsonl(Path(folder) / "run" / "alarms.jsonl")]
        if rows:
            path.write_bytes(compressed(rows))
        print(f"RECORDED {name}: {len(rows)} rows, {time.monotonic() - began:.0f} s, alarms {alarms}", flush=True)


if __name__ == "__main__":
    main()
