"""Running one of reasoning-gym's scorers: in a process of its own, for so long, and with nothing to do harm with.

Invariant: whatever a scorer does with an answer, running forever and taking all memory included, is the answer's
fault, and scores 0.  It is the scorer's only if the reference answer fares no better.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.child import ForkedChild
from astuner_sandbox.isolation.confine import Confinement

CPU_S = 5
"""Processor time for one answer; scorers take milliseconds."""
MEMORY_MB = 512
"""What a scorer may take beyond what this process has."""
TIMEOUT_S = 60
"""For a machine that has other things to do: the processor time is what ends a scorer that runs on."""


class ScorerBroken(RuntimeError):
    """The scorer fails on the reference answer too; says how."""


class ScorerFailed(ValueError):
    """The scorer gave no score for this answer; says why."""


def score(dataset: Any, answer: str, entry: Mapping[str, Any]) -> float:
    """The scorer's score.

    :raises ScorerFailed: it failed, at this answer.
    :raises ScorerBroken: it fails at any.
    :raises ForkFailed: it could not be started.
    """
    try:
        return _run(dataset, answer, entry)
    except ScorerFailed:
        try:
            _run(dataset, entry["answer"], entry)
        except ScorerFailed as e:
            raise ScorerBroken(f"the scorer fails with the reference answer, too: {e}") from e
        raise


def _run(dataset: Any, answer: Any, entry: Mapping[str, Any]) -> float:
    read = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    confinement = Confinement(read=read, cpu_s=CPU_S, memory_mb=_address_space_mb() + MEMORY_MB, file_mb=0)
    child = ForkedChild(_child, dataset, answer, entry, confinement=confinement)
    try:
        found = child.call("score", TIMEOUT_S)
    except TimeoutError:
        raise ScorerFailed(f"it did not end within {TIMEOUT_S} s") from None
    except (EOFError, ValueError) as e:
        raise ScorerFailed(f"it ended without a score: {e}") from None
    finally:
        child.kill()
    if "failed" in found:
        raise ScorerFailed(str(found["failed"]))
    return float(found["score"])


def _child(channel: Channel, dataset: Any, answer: Any, entry: Mapping[str, Any]) -> None:
    channel.recv()
    try:
        number = float(dataset.score_answer(answer, entry=entry))
        if not math.isfinite(number):
            raise ValueError(f"it gave {number}")
    except Exception as e:  # text of a kind that the scorer's author did not think of
        channel.send({"failed": f"{type(e).__name__}: {e}"[:300]})
    else:
        channel.send({"score": number})


def _address_space_mb() -> int:
    """Of this process. Without ``/proc``, a guess that is large enough."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except FileNotFoundError:
        return 1 << 16
    return pages * 4096 >> 20
