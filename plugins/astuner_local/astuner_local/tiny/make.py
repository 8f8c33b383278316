"""Create the tiny model and the example's tasks: ``python -m astuner_local.tiny.make --out DIR``.

Everything is drawn from the seed with one thread, so two runs on one machine write the same files; on another type of
CPU the weights may differ in their last bits, but not the tokenizer and the tasks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Tokenizer

from astuner_local.tiny import tokenizer as bpe
from astuner_local.tiny.problems import Problem, distinct, draw
from astuner_local.tiny.transcripts import TOOLS, transcript
from astuner_local.tiny.warmup import build_model, encode, learn_to_read_and_say, warm_up
from astuner_models.pretrained import load_pretrained

STEPS = 600
TOKENIZER_TRANSCRIPTS = 300
TRAIN_TASKS, HELD_OUT_TASKS = 2000, 256


def make_tokenizer(folder: Path, seed: int) -> Any:
    """Train the tokenizer, write it to ``folder``, and return it as loaded by transformers."""
    rng = random.Random(seed)
    shown = [transcript(draw(rng, held_out=False), rng) for _ in range(TOKENIZER_TRANSCRIPTS)]
    return _tokenizer_of(folder, shown, TOOLS)


def _tokenizer_of(
    folder: Path, shown: Sequence[Sequence[dict[str, Any]]], tools: Sequence[dict[str, Any]] | None
) -> Any:
    bare: Any = Qwen2Tokenizer()
    bare.chat_template = bpe.chat_template()
    texts = [bare.apply_chat_template(conversation, tools=tools, tokenize=False) for conversation in shown]
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(bpe.train(texts), folder)
    return load_pretrained(AutoTokenizer, folder)


def make_model(folder: Path, seed: int) -> None:
    """Create tokenizer and warmed-up model in ``folder``."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(folder, seed)
    model = build_model(tokenizer, seed)

    def report(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step}/{STEPS} loss {loss:.3f}", file=sys.stderr)

    warm_up(model, tokenizer, steps=STEPS, seed=seed, report=report)
    _save(model, folder)


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def make_talker(
    folder: Path,
    shown: Sequence[Sequence[dict[str, Any]]],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    seed: int = 0,
    steps: int,
) -> float:
    """Create in ``folder`` a tokenizer and a model trained only on these conversations.

    :returns: The last step's loss on the assistant's tokens.
    """
    torch.set_num_threads(1)
    tokenizer = _tokenizer_of(folder, shown[:TOKENIZER_TRANSCRIPTS], tools)
    model = build_model(tokenizer, seed)
    encoded = [encode(tokenizer, conversation, tools) for conversation in shown]
    loss = learn_to_read_and_say(model, encoded, tokenizer.pad_token_id, random.Random(seed), steps=steps)
    _save(model, folder)
    return loss


def make_tasks(folder: Path, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Write ``train.jsonl`` and ``heldout.jsonl`` in GSM8K's layout; return the problems of both."""
    train = list(distinct(TRAIN_TASKS, seed, held_out=False))
    held_out = list(distinct(HELD_OUT_TASKS, seed, held_out=True))
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", train), ("heldout", held_out)):
        lines = [json.dumps(p.as_gsm8k()) + "\n" for p in problems]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return train, held_out


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m astuner_local.tiny.make", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Write the model to this folder.")
    parser.add_argument("--tasks-out", type=Path, help="Write train.jsonl and heldout.jsonl to this folder.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out is None and options.tasks_out is None:
        parser.error("add --out DIR, --tasks-out DIR, or both")
    if options.tasks_out:
        make_tasks(options.tasks_out, options.seed)
    if options.out:
        make_model(options.out, options.seed)
        print(f"wrote {options.out}; measure it: astuner eval FILE --checkpoint base astuner.model.path={options.out}")


if __name__ == "__main__":
    main()
