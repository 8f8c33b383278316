"""Create the tiny model of this example: ``python examples/rubrics/make_model.py --out tiny_clerk``.

It is trained on replies with random parts only. It writes well-formed replies but cannot match them to questions, which
is left to the training. Held-out questions are not used.

The weights depend on the seed. On other kinds of CPU they may differ in the last bits.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from desk import SYSTEM_PROMPT, Question, anyhow, questions
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from astuner_local.tiny import tokenizer as bpe
from astuner_local.tiny.warmup import IGNORED, build_model, learn_to_read_and_say

STEPS, BATCH, SHOWN = 300, 16, 2000


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]


def make_tokenizer(folder: Path, shown: list[tuple[Question, str]]) -> Any:
    """Train the tokenizer, write it to ``folder``, and return it as transformers loads it."""
    bare = PreTrainedTokenizerFast(tokenizer_object=bpe.train([]), chat_template=bpe.chat_template())
    texts = [
        bare.apply_chat_template([*messages(q.text), {"role": "assistant", "content": reply}], tokenize=False)
        for q, reply in shown
    ]
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(bpe.train(texts), folder)
    return AutoTokenizer.from_pretrained(folder)


def encode(tokenizer: Any, question: Question, reply: str) -> tuple[list[int], list[int]]:
    """Return token IDs, and labels that are `IGNORED` outside of the reply."""
    prompt = tokenizer.apply_chat_template(messages(question.text), tokenize=False, add_generation_prompt=True)
    read = tokenizer.encode(prompt, add_special_tokens=False)
    said = tokenizer.encode(reply + bpe.END, add_special_tokens=False)
    return read + said, [IGNORED] * len(read) + said


def make_model(folder: Path, seed: int = 0, steps: int = STEPS) -> float:
    """Create tokenizer and model in ``folder``, and return the last step's loss on the replies."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    asked = questions(held_out=False)
    replies = [(question, anyhow(question, rng)) for question in rng.choices(asked, k=SHOWN)]
    tokenizer = make_tokenizer(folder, replies[:300])
    shown = [encode(tokenizer, question, reply) for question, reply in replies]
    model = build_model(tokenizer, seed)
    loss = learn_to_read_and_say(model, shown, tokenizer.pad_token_id, rng, steps=steps, batch=BATCH)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tiny_clerk"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    make_model(options.out, options.seed, options.steps)
