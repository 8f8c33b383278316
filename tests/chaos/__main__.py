"""``python -m tests.chaos --hours 1 --seed 100``: round after round, each with the next seed."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.chaos.checking import problems, rows_of
from tests.chaos.known import NOT_HELD
from tests.chaos.running import Round


def main() -> int:
    asked = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    asked.add_argument("--hours", type=float, default=0.0, help="go on for so long; one round by default")
    asked.add_argument("--seed", type=int, default=0, help="of the first round")
    asked.add_argument("--ends", nargs="+", default=(), help="of the runs: 'kill', 'kill early', 'stop' or 'disk'")
    asked.add_argument("--all", action="store_true", help=f"also what is known not to hold: {', '.join(NOT_HELD)}")
    given = asked.parse_args()
    until, seed, bad = time.monotonic() + given.hours * 3600, given.seed, 0
    ends: Counter[str] = Counter()
    legs: Counter[str] = Counter()
    while True:
        began = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
        print(f"round {seed} in {folder}", flush=True)
        round_ = Round(seed, folder, () if given.all else NOT_HELD)
        try:
            round_.play(lambda text: print(text, flush=True), given.ends)
            found = problems(round_)
            ends.update(row["stop_reason"] for row in (rows_of(round_.run) if round_.count() else ()))
        finally:
            round_.end_what_is_left()
        legs.update(leg.ended_by or "to the end" for leg in round_.legs)
        print("\n".join(f"  PROBLEM {line}" for line in found) or "  all holds", f"({time.monotonic() - began:.0f} s)")
        if found:
            bad += 1
        else:
            shutil.rmtree(folder)
        seed += 1
        if time.monotonic() >= until:
            break
    print(f"\n{seed - given.seed} rounds, {bad} with problems; go on with --seed {seed}")
    for title, counts in (("ends of runs", legs), ("episodes in the logs", ends)):
        print(f"\n{title}")
        for name, many in counts.most_common():
            print(f"  {name:<22} {many:>7}")
    return int(bad > 0)


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[2])
    raise SystemExit(main())
