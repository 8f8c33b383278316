"""Makes the tiny model that this example starts from: ``python examples/countdown/make_model.py``.

It is shown games in which every expression is drawn at random, and nothing else. So it writes expressions and has seen
what they are worth, and knows nothing about which one a target asks for. Only training numbers are shown.
"""

import argparse
import random
from pathlib import Path
from typing import Any

from game import SYSTEM, TRIES, told
from make_tasks import EXPRESSIONS, tasks

from astuner_local.tiny.make import make_talker


def game(task: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """What somebody who tries anything says and is told, also behind the target."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": task["main_query"]}]
    for expression in rng.sample(EXPRESSIONS, TRIES):
        said = expression.format(*task["numbers"])
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told(said, task["numbers"])}]
    return messages


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_player")
    rng = random.Random(0)
    shown = [game(task, rng) for task in rng.choices(tasks("train"), k=6000)]
    make_talker(parser.parse_args().out, shown, steps=800)
