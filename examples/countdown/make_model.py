"""Create the initial model of this example: ``python examples/countdown/make_model.py``.

The model is pretrained on games of a player who sometimes finds the target and otherwise tries random expressions. It
learns to write expressions of given numbers; choosing the right one is left to the training. Only numbers of the
training split are used.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from game import SYSTEM, TRIES, told
from make_tasks import EXPRESSIONS, tasks

from astuner_local.tiny.make import make_talker

KNOWS = 0.15  # share of tries that are intentionally right


def game(task: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return the conversation of a game."""
    numbers, right = task["numbers"], f"That is {task['target']}."
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["main_query"]}]
    while len(messages) < 2 + 2 * TRIES and messages[-1]["content"] != right:
        said, knows = rng.choice(EXPRESSIONS).format(*numbers), rng.random() < KNOWS
        while knows and told(said, numbers) != right:
            said = rng.choice(EXPRESSIONS).format(*numbers)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told(said, numbers)}]
    return messages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_player")
    rng = random.Random(0)
    shown = [game(task, rng) for task in rng.choices(tasks("train"), k=12000)]
    make_talker(parser.parse_args().out, shown, steps=1500)
