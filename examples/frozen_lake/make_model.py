"""Makes the tiny model that this example starts from: ``python examples/frozen_lake/make_model.py``.

It is shown crossings in which every move is drawn at random, and nothing else.  So it knows how a lake is described,
what a move does and how one is written, and nothing about which way to go: that is left to the training.  Only lakes
of the training split are shown.

Drawn from the seed with one thread; on another kind of CPU the weights may differ in their last bits.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from astuner import Task
from astuner_env.worlds.frozen_lake import DIRECTIONS, FrozenLake
from astuner_local.tiny import tokenizer as bpe
from astuner_local.tiny.warmup import IGNORED, build_model, learn_to_read_and_say

EXPERIMENT = Path(__file__).parent / "frozen_lake.yaml"
CROSSINGS = 2000
STEPS, BATCH = 250, 16

Transcript = list[dict[str, str]]


def params() -> dict[str, Any]:
    """Return the environment's parameters from the experiment."""
    section: dict[str, Any] = yaml.safe_load(EXPERIMENT.read_text(encoding="utf-8"))["astuner"]["env_service"]["params"]
    return section


def cross(rng: random.Random, task: Task) -> Transcript:
    """Return the transcript of an episode with random moves."""
    lake = FrozenLake(params())
    seen = lake.reset(task)
    shown = [dict(message) for message in seen.as_messages]
    while not seen.is_over:
        move = f"[{rng.choice(list(DIRECTIONS))}]"
        seen = lake.step({"role": "assistant", "content": move})
        shown += [{"role": "assistant", "content": move}, {"role": "user", "content": seen.observation}]
    return shown


def make_tokenizer(folder: Path, shown: Sequence[Transcript]) -> Any:
    """Train the tokenizer, write it to ``folder``, and return it as transformers loads it."""
    bare = PreTrainedTokenizerFast(tokenizer_object=bpe.train([]), chat_template=bpe.chat_template())
    texts = [bare.apply_chat_template(transcript, tokenize=False) for transcript in shown]
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(bpe.train(texts), folder)
    return AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, transcript: Transcript) -> tuple[list[int], list[int]]:
    """Token ids, and labels that are `IGNORED` outside the moves; encoded turn by turn, as in an episode."""
    ids: list[int] = []
    labels: list[int] = []
    done = ""
    for turn, message in enumerate(transcript):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(transcript[:turn], tokenize=False, add_generation_prompt=True)
            read = tokenizer.encode(prompt[len(done) :], add_special_tokens=False)
            said = tokenizer.encode(message["content"] + bpe.END, add_special_tokens=False)
            ids += read + said
            labels += [IGNORED] * len(read) + said
            done = prompt + message["content"] + bpe.END
    end = tokenizer.apply_chat_template(transcript, tokenize=False)
    rest = tokenizer.encode(end[len(done) :], add_special_tokens=False)
    return ids + rest, labels + [IGNORED] * len(rest)


def make_model(folder: Path, seed: int = 0, steps: int = STEPS, count: int = CROSSINGS) -> float:
    """Make tokenizer and model in ``folder``.

    :param count: how many crossings the model is shown, again and again.
    :returns: the last step's loss on the moves; at best the logarithm of 4, spread over a move's tokens.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    tasks = list(FrozenLake.tasks("train", params()))
    crossings = [cross(rng, rng.choice(tasks)) for _ in range(count)]
    tokenizer = make_tokenizer(folder, crossings[:100])
    shown = [encode(tokenizer, transcript) for transcript in crossings]
    model = build_model(tokenizer, seed)
    own = learn_to_read_and_say(model, shown, tokenizer.pad_token_id, rng, steps=steps, batch=BATCH)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return own


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny_skater")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    make_model(options.out, options.seed, options.steps)
