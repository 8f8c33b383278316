"""``python -m tests.checker RUN_DIR [--tokenizer DIR] [--samples FILE] [--json]``: 0 where every token is exact."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.checker.folder import Unreadable
from tests.checker.rules import KINDS, check


def main() -> int:
    asked = argparse.ArgumentParser(
        prog="python -m tests.checker",
        description="Whether the tokens that a run trained are those its model made.",
        epilog="What may be wrong: " + "; ".join(f"{kind}: {what}" for kind, what in KINDS.items()),
    )
    asked.add_argument("run", type=Path, help="a run's folder")
    asked.add_argument("--tokenizer", type=Path, help="a folder with tokenizer and chat template; else a checkpoint's")
    asked.add_argument("--samples", type=Path, help="what `astuner export RUN --to tokens --min-reward=-1e9` wrote")
    asked.add_argument("--json", action="store_true", help="one JSON document")
    given = asked.parse_args()
    try:
        report = check(given.run, given.tokenizer, given.samples)
    except Unreadable as error:
        print(error)
        return 2
    if given.json:
        said = [{"kind": one.kind, "where": one.where, "what": one.what} for one in report.problems]
        print(json.dumps({"problems": said, "counts": report.counts}, indent=2))
    else:
        print(*(f"{number:>10,} {what}" for what, number in report.counts.items()), sep="\n")
        print(*report.problems[:50] or ["no problem"], sep="\n")
        if len(report.problems) > 50:
            print(f"and {len(report.problems) - 50:,} more")
    return int(bool(report.problems))


if __name__ == "__main__":
    raise SystemExit(main())
