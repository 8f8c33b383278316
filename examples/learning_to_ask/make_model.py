"""Create the initial model of this example: ``python examples/learning_to_ask/make_model.py``.

The model is pretrained on conversations with a waiter who notes what it heard, asks random questions, then books what
it heard and makes up the rest. It learns to read wishes and to write notes, questions and bookings; when to ask is left
to the training. Only sentences of the training split are used.
"""

import random
from itertools import islice
from pathlib import Path
from typing import Any

from make_tasks import VALUES, tasks
from waiter import QUESTIONS, SYSTEM_PROMPT, Guest, booking, note

from astuner_local.tiny.make import make_talker

SHOWN, STEPS = 4000, 500


def conversation(task: dict[str, Any], rng: random.Random) -> list[dict[str, Any]]:
    """Return a conversation with random questions."""
    guest = Guest(task["wish"])
    said = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": task["main_query"]}]
    known = {part: value for part, value in task["wish"].items() if part not in task["missing"]}
    for part in rng.sample(list(QUESTIONS), len(QUESTIONS)):
        if rng.random() < 0.5:
            said.append({"role": "assistant", "content": note(known) + QUESTIONS[part]})
            known[part] = guest.answer(QUESTIONS[part])
            said.append({"role": "user", "content": known[part]})
    made_up = {part: rng.choice(values) for part, values in VALUES.items()}
    return [*said, {"role": "assistant", "content": note(known) + booking(made_up | known)}]


def make_model(folder: Path, steps: int = STEPS, count: int = SHOWN) -> float:
    """Make tokenizer and model in ``folder``; return the loss of the last step on the waiter's messages."""
    rng = random.Random(0)
    shown = [conversation(task, rng) for task in islice(tasks("train", seed=1), count)]
    return make_talker(folder, shown, steps=steps)


if __name__ == "__main__":
    make_model(Path(__file__).parent / "tiny_waiter")
