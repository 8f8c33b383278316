"""From one machine to a thousand: measure each cost at small sizes, fit its growth, and extrapolate.

On a Ray backbone the machines generate and train. One process, the driver, hands out the episodes, receives them
complete, logs them and computes their advantages.  Resources of each machine (an endpoint, workers, engines) grow with
the machines; shared resources (the driver, its disk, the disk of the checkpoints) do not.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from astuner.contracts.types import Episode, WorkflowTask
from astuner_record.episode_log import EpisodeLogWriter
from astuner_record.episode_log.store import DATABASE
from benchmarks import templates
from benchmarks.call_overhead import TEMPLATE, TURNS
from benchmarks.clients import talk
from benchmarks.episode_log import PER_STEP, SHAPES, make_episode
from benchmarks.episodes import replies
from benchmarks.report import Report, us
from benchmarks.side import Side

MACHINES = (1, 4, 16, 64, 256, 1000)
GPUS_OF_ONE = 8
TOKENS_OF_ONE = 20_000
"""Tokens per second that the GPUs of a machine generate (assumed)."""
EPISODE = SHAPES["tools"]
"""Turns, tokens of each reply, new prompt tokens of each turn."""
PARAMETERS = 7e9
"""Parameters of the model whose checkpoint is counted (assumed)."""
BYTES_OF_ONE = 14
"""Bytes on disk per parameter: float32 weights, two moments of Adam in float32, the export in bfloat16."""
SAVE_SECONDS = 60.0
"""Maximum seconds for a checkpoint."""


@dataclass(frozen=True)
class Fit:
    """Power law ``cost * n ** power`` of seconds or bytes, by least squares of the logarithms."""

    cost: float
    power: float
    worst: float
    """Largest factor between a measured value and the fit."""

    @classmethod
    def of(cls, found: Mapping[float, float]) -> Fit:
        """Return the fit of the measurements.

        :param found: Size -> measured value, for two or more sizes.
        """
        x, y = [math.log(n) for n in found], [math.log(value) for value in found.values()]
        power = statistics.linear_regression(x, y)
        worst = max(abs(v - (power.slope * n + power.intercept)) for n, v in zip(x, y, strict=True))
        return cls(math.exp(power.intercept), power.slope, math.exp(worst))

    def __call__(self, n: float) -> float:
        return self.cost * float(n) ** self.power


def run(*, quick: bool) -> Report:
    report = Report(
        "From one machine to a thousand",
        "Each term is measured at the sizes of its row on one small machine, as the CPU time of the process that "
        "pays it (checkpoints: wall time), and a power law is fitted: the exponent is the growth of the total with "
        "the size, so 1.00 is linear; *off by* is the largest factor between a measured size and the fit. The "
        f"result is then extrapolated. An episode has {EPISODE[0]} turns of {EPISODE[2]} new and {EPISODE[1]} "
        "generated tokens.",
    )
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    try:
        terms = _terms(folder, quick)
    finally:
        shutil.rmtree(folder)
    report.heading("Terms")
    report.table(
        ("term", "sizes", "smallest, each", "largest, each", "exponent", "off by"),
        [term.row() for term in terms.values()],
    )
    _arithmetic(report, terms)
    return report


@dataclass(frozen=True)
class Term:
    """A cost that grows with a size."""

    what: str
    unit: str
    """Unit of the cost of one element; for MB/s, the throughput."""
    scale: float
    """Units per second or byte."""
    found: Mapping[float, float]
    """Size -> total seconds or bytes."""

    @property
    def fit(self) -> Fit:
        return Fit.of(self.found)

    def each(self, n: float) -> float:
        """Return the seconds or bytes of one element at size ``n``, by the fit."""
        return self.fit(n) / n

    def row(self) -> tuple[str, ...]:
        small, large = min(self.found), max(self.found)
        each = [self.found[n] / n for n in (small, large)]
        shown = [f"{1 / one / 1e6 if self.unit == 'MB/s' else one * self.scale:,.3g} {self.unit}" for one in each]
        sizes = f"{small:,.0f} to {large:,.0f}"
        return self.what, sizes, *shown, f"{self.fit.power:.2f}", f"{self.fit.worst:.2f}x"


def _terms(folder: Path, quick: bool) -> dict[str, Term]:
    repeats = 2 if quick else 5
    terms = {
        "http": Term("a model call over HTTP, by agents at once", "ms", 1e3, _http((4, 16, 64, 256), repeats)),
        "log": Term("logging an episode, by episodes", "µs", 1e6, _log(folder, (64, 256, 1024, 4096), repeats)[0]),
        "bytes": Term("bytes of the log, by tokens", "B", 1.0, _log(folder, (64, 256, 1024, 4096), 1)[1]),
        "seat": Term("choosing a worker for each of 1,000 episodes, by workers", "ms", 1e3, _seats(repeats)),
        "save": Term("a checkpoint, by bytes", "MB/s", 1.0, _save(folder, (8, 32, 128, 256), repeats)),
    }
    if importlib.util.find_spec("ray"):
        taken, moved = _ray(repeats)
        terms["taken"] = Term("taking an episode from a Ray worker, by episodes", "µs", 1e6, taken)
        terms["moved"] = Term("bytes put into Ray's store and got, by bytes", "MB/s", 1.0, moved)
    return terms


def _best(repeats: int, work: Callable[[], float]) -> float:
    """Return the median of the results of ``work``."""
    return statistics.median(work() for _ in range(repeats))


def _cpu(work: Callable[[], object]) -> float:
    gc.collect()
    started = time.process_time()
    work()
    return time.process_time() - started


def _http(sizes: Sequence[int], repeats: int) -> dict[float, float]:
    """Return concurrent agents -> CPU seconds of the endpoint's process for one call of each."""
    tokenizer, folder = templates.tokenizer(TEMPLATE), tempfile.mkdtemp(prefix="scale-tokenizer-")
    tokenizer.save_pretrained(folder)
    side = Side(sys.executable, "benchmarks.astuner_side", folder, json.dumps(replies(tokenizer, TURNS)), "")
    number = iter(range(10**9))

    def once(agents: int) -> float:
        episodes, before = side.ask("begin", episodes=agents), side.cpu()
        talk(episodes, turns=TURNS, first_number=next(number) * max(sizes))
        side.ask("settle")
        seconds = side.cpu() - before
        if (recorded := side.ask("end", calls=agents * TURNS)) != agents * TURNS:
            raise RuntimeError(f"{recorded} of {agents * TURNS} calls were recorded: the measurement is invalid")
        return seconds / TURNS

    try:
        once(16)  # imports
        return {n: _best(repeats, lambda n=n: once(n)) for n in sizes}
    finally:
        side.close()
        shutil.rmtree(folder)


def _log(folder: Path, sizes: Sequence[int], repeats: int) -> tuple[dict[float, float], dict[float, float]]:
    """Return episodes -> CPU seconds of writing them, and tokens -> bytes of the log."""
    pool = [make_episode(random.Random(n), "g", 0, EPISODE) for n in range(64)]
    seconds: dict[float, float] = {}
    size: dict[float, float] = {}
    for count in sizes:

        def once(count: int = count) -> float:
            where = Path(tempfile.mkdtemp(dir=folder)) / "episodes"
            log = EpisodeLogWriter(where)

            def write() -> None:
                for n in range(count):
                    log.episode(n // PER_STEP, _another(pool[n % len(pool)], n))
                log.close()

            spent = _cpu(write)
            tokens = count * EPISODE[0] * (EPISODE[1] + EPISODE[2])
            size[tokens] = sum(file.stat().st_size for file in where.glob(f"{DATABASE}*"))
            return spent

        seconds[count] = _best(repeats, once)
    return seconds, size


def _another(one: Episode, n: int) -> Episode:
    task: WorkflowTask = replace(one.workflow_task, episode_id=f"g{n // 8}-{n % 8}", group_id=f"g{n // 8}")
    return replace(one, workflow_task=task)


def _seats(repeats: int) -> dict[float, float]:
    """Return workers -> CPU seconds of choosing the least busy one 1,000 times, like `Fleet`."""

    class Seat:
        def __init__(self) -> None:
            self.running = random.randrange(8)

    def once(workers: int) -> float:
        seats = [Seat() for _ in range(workers)]
        return _cpu(lambda: [min(seats, key=lambda s: s.running) for _ in range(1000)])

    return {n: _best(repeats, lambda n=n: once(n)) for n in (8, 64, 512, 4096)}


def _save(folder: Path, megabytes: Sequence[int], repeats: int) -> dict[float, float]:
    """Return bytes -> wall seconds until they are on disk."""
    import torch

    def once(size: int) -> float:
        state = {"weights": torch.zeros(size * 2**18).normal_()}
        started = time.perf_counter()
        with (folder / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - started

    return {n * 2**20: _best(repeats, lambda n=n: once(n)) for n in megabytes}


def _ray(repeats: int) -> tuple[dict[float, float], dict[float, float]]:
    """Return episodes -> CPU seconds of the driver for requesting and receiving them, and bytes -> for put and get."""
    import numpy as np

    from astuner_ray.cluster import private_variables

    os.environ.update(private_variables())  # bind to loopback only
    import ray

    episode = make_episode(random.Random(0), "g", 0, EPISODE)

    class Worker:
        async def run(self, number: int) -> Episode:
            await asyncio.sleep(0)
            return episode

    variables = {"PYTHONPATH": str(Path(__file__).parents[1])}
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        logging_level="warning",
        runtime_env={"env_vars": variables},
    )
    try:
        worker = ray.remote(Worker).options(max_concurrency=64).remote()
        ray.get(worker.run.remote(0))

        async def episodes(count: int) -> None:
            at_once = asyncio.Semaphore(64)

            async def one(number: int) -> None:
                async with at_once:
                    await worker.run.remote(number)

            await asyncio.gather(*map(one, range(count)))

        def moved(size: int) -> float:
            block = np.random.default_rng(0).bytes(size)
            return _cpu(lambda: ray.get(ray.put(np.frombuffer(block, dtype=np.uint8))).sum())

        counts = (64.0, 256.0, 1024.0)
        taken = {n: _best(repeats, lambda n=n: _cpu(lambda: asyncio.run(episodes(int(n))))) for n in counts}
        return taken, {n * 2**20: _best(repeats, lambda n=n: moved(n * 2**20)) for n in (1, 4, 16, 64)}
    finally:
        ray.shutdown()


def _arithmetic(report: Report, terms: Mapping[str, Term]) -> None:
    calls, generated = EPISODE[0], EPISODE[0] * EPISODE[1]
    per_second = TOKENS_OF_ONE / generated
    tokens = EPISODE[0] * (EPISODE[1] + EPISODE[2])
    driver = {name: term.each(max(term.found)) for name, term in terms.items() if name in ("log", "taken")}
    rows = []
    for machines in MACHINES:
        episodes = per_second * machines
        # Fleet looks through all workers for each episode; there are eight a machine
        choosing = terms["seat"].fit(8 * machines) / 1000
        share = {**driver, "seat": choosing}
        rows.append(
            (
                f"{machines:,}",
                f"{episodes:,.0f}",
                f"{episodes * calls:,.0f}",
                f"{episodes * calls / machines * terms['http'].each(256):.2f}",
                f"{episodes * sum(share.values()):.2f}",
                f"{episodes * choosing:.2f}",
                f"{episodes * tokens * terms['bytes'].each(max(terms['bytes'].found)) / 1e6:,.1f}",
                f"{PARAMETERS * BYTES_OF_ONE / SAVE_SECONDS / 1e9:.1f}",
                f"{PARAMETERS * BYTES_OF_ONE / SAVE_SECONDS / (machines * GPUS_OF_ONE) / 1e6:,.1f}",
            )
        )
    report.heading("Multiplied out")
    report.table(
        (
            "machines",
            "episodes/s",
            "calls/s",
            "endpoint, cores of each machine",
            "driver, cores",
            "of that choosing workers",
            "log, MB/s",
            "checkpoint, GB/s in all",
            "MB/s of each GPU",
        ),
        rows,
    )
    report.text(
        f"Assumed, not measured: a machine generates {TOKENS_OF_ONE:,} tokens/s, so {per_second:.1f} episodes/s, and "
        f"has 8 workers; a checkpoint of {PARAMETERS / 1e9:g} billion parameters at {BYTES_OF_ONE} bytes each may "
        f"take {SAVE_SECONDS:g} s. Bytes per token and CPU times are the values of the largest measured size; "
        "choosing a worker follows its fit."
        + (
            ""
            if "taken" in terms
            else " Ray is not installed in this environment, so the cost of receiving an episode is not included."
        )
    )
    _ends(report, terms, per_second, driver)


def _ends(report: Report, terms: Mapping[str, Term], per_second: float, driver: Mapping[str, float]) -> None:
    """Report at which size one core of the driver is saturated."""

    def load(machines: float) -> float:
        return per_second * machines * (sum(driver.values()) + terms["seat"].fit(8 * machines) / 1000)

    full = next(n for n in range(1, 10**6) if load(n) >= 1)
    without = 1 / (per_second * sum(driver.values()))
    costs = " + ".join(f"{us(seconds)} µs {name}" for name, seconds in driver.items())
    report.heading("Where it stops growing")
    report.text(
        f"The driver is one process, and its Python runs on one core. An episode costs it {costs}, and choosing a "
        "worker, which grows with the number of workers and therefore of machines: the total grows quadratically. "
        f"One core is saturated at {full:,} machines, or {per_second * full:,.0f} episodes/s; without the choice of a "
        f"worker it would be {without:,.0f} machines."
    )
