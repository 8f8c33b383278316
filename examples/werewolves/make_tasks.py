"""Create the deals, identical on every machine: ``python examples/werewolves/make_tasks.py``.

A task is a deal (the role of each player) and the player who opens the first day. Validation deals do not occur in
training. ``--roles`` creates games of another size.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

from werewolf_rules import MAX_DAYS, SEVEN, Game

DRAWS = 1000
HELD_OUT = 0.35
"""Share of the deals for validation."""


def deals(roles: Sequence[str], seed: int) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Return different orders of ``roles`` (all of them for a small game) for training and for validation."""
    rng = random.Random(seed)
    orders = list(dict.fromkeys(tuple(rng.sample(roles, len(roles))) for _ in range(DRAWS)))
    held_out = max(1, round(HELD_OUT * len(orders)))
    return orders[held_out:], orders[:held_out]


def rows(orders: Sequence[Sequence[str]], max_days: int) -> list[dict[str, object]]:
    """Return one task for each order and each opening player."""
    found: list[dict[str, object]] = []
    for order in orders:
        Game(order, max_days)  # raises an error for an invalid deal
        for first in range(1, len(order) + 1):
            short = "".join(role[0] for role in order)
            found.append(
                {
                    "task_id": f"{short}-{first}",
                    "query": f"Werewolves with {len(order)} players, deal {short}, player {first} opens",
                    "roles": list(order),
                    "first_speaker": first,
                    "max_days": max_days,
                }
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Write training and validation tasks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--roles", nargs="+", default=list(SEVEN), help="Roles of a game, in any order")
    parser.add_argument("--max-days", type=int, default=MAX_DAYS)
    parser.add_argument("--train", type=int, default=320, help="Maximum number of training tasks")
    parser.add_argument("--validation", type=int, default=256, help="Maximum number of validation tasks")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, orders in zip(("train", "validation"), deals(options.roles, options.seed), strict=True):
        tasks = rows(orders, options.max_days)
        random.Random(options.seed).shuffle(tasks)
        lines = [json.dumps(task) + "\n" for task in tasks[: getattr(options, name)]]
        (options.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
