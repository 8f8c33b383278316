"""Makes the tiny model and the example's tasks: ``python -m astuner_local.tiny.make --out DIR``.

Everything is drawn from the seed with one thread, so two runs on one machine write the same files; on another
kind of CPU the weights may differ in their last bits, the tokenizer and the tasks do not.  What the model can do before
anybody trains it is played with a plain loop: two turns at most, token ids in and out, no agent framework; a tool call
is answered by the calculator, and the answer in ``\\boxed{}`` is compared with the problem's.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen2Tokenizer

from astuner_local.tiny import tokenizer as bpe
from astuner_local.tiny.problems import Problem, distinct, draw, evaluate
from astuner_local.tiny.transcripts import TOOLS, first_messages, transcript
from astuner_local.tiny.warmup import build_model, warm_up

STEPS = 600
TOKENIZER_TRANSCRIPTS = 300
TRAIN_TASKS, HELD_OUT_TASKS = 2000, 256
_CALL = re.compile(
    r'<tool_call>\n\{"name": "calculator", "arguments": \{"expression": "(\d+) ([-+*/]) (\d+)"\}\}\n</tool_call>'
)
_ANSWER = re.compile(r"\\boxed\{([^{}]*)\}")
MAX_NEW_TOKENS = 40


def make_tokenizer(folder: Path, seed: int) -> Any:
    """Train the tokenizer, write it to ``folder``, and return it as transformers loads it."""
    rng = random.Random(seed)
    bare: Any = Qwen2Tokenizer()
    bare.chat_template = bpe.chat_template()
    texts = [
        bare.apply_chat_template(transcript(draw(rng, held_out=False), rng), tools=TOOLS, tokenize=False)
        for _ in range(TOKENIZER_TRANSCRIPTS)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    bpe.save(bpe.train(texts), folder)
    return AutoTokenizer.from_pretrained(folder)


def make_model(folder: Path, seed: int, steps: int = STEPS) -> tuple[Any, Any]:
    """Make tokenizer and warmed-up model in ``folder``; returns both."""
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(folder, seed)
    model = build_model(tokenizer, seed)

    def report(step: int, loss: float) -> None:
        if step % 50 == 0:
            print(f"step {step}/{steps} loss {loss:.3f}", file=sys.stderr)

    warm_up(model, tokenizer, steps=steps, seed=seed, report=report)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return model, tokenizer


def make_tasks(folder: Path, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Write ``train.jsonl`` and ``heldout.jsonl`` in GSM8K's layout; returns the problems of both."""
    train = list(distinct(TRAIN_TASKS, seed, held_out=False))
    held_out = list(distinct(HELD_OUT_TASKS, seed, held_out=True))
    folder.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", train), ("heldout", held_out)):
        lines = [json.dumps(p.as_gsm8k()) + "\n" for p in problems]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return train, held_out


@dataclass(frozen=True)
class Played:
    """How one problem went."""

    well_formed: bool
    """One valid tool call with both numbers of the problem, then a boxed answer."""
    success: bool
    prompt_tokens: int
    generated_tokens: int


def play(model: Any, tokenizer: Any, problems: Sequence[Problem], *, temperature: float, seed: int = 0) -> list[Played]:
    """Play every problem once, all of them in one batch.

    :param temperature: of the sampling; 0 is greedy.
    """
    torch.manual_seed(seed)
    render = partial(tokenizer.apply_chat_template, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    prompts = [render(first_messages(problem.question)) for problem in problems]
    calls = _complete(model, tokenizer, prompts, temperature)
    expressions = [_CALL.fullmatch(text.removesuffix(tokenizer.eos_token)) for text, _ in calls]
    replies = [
        evaluate(int(m[1]), m[2], int(m[3])) if m and (m[2] != "/" or int(m[3])) else "error" for m in expressions
    ]
    continued = [
        f"{prompt}{text}\n<|im_start|>user\n<tool_response>\n{reply}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        for prompt, (text, _), reply in zip(prompts, calls, replies, strict=True)
    ]
    answers = _complete(model, tokenizer, continued, temperature)
    played = []
    for problem, prompt, call, expression, answer in zip(problems, prompts, calls, expressions, answers, strict=True):
        box = _ANSWER.fullmatch(answer[0].removesuffix(tokenizer.eos_token))
        operands = {str(problem.left), str(problem.right)}
        played.append(
            Played(
                well_formed=bool(expression and box and {expression[1], expression[3]} == operands),
                success=bool(expression and box and box[1] == problem.answer),
                prompt_tokens=len(tokenizer.encode(prompt)),
                generated_tokens=call[1] + answer[1],
            )
        )
    return played


def _complete(model: Any, tokenizer: Any, prompts: Sequence[str], temperature: float) -> list[tuple[str, int]]:
    """The continuation of each prompt, and its length in tokens (the end token included)."""
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, add_special_tokens=False)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    with torch.inference_mode():
        ids = model.generate(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            **sampling,
        )[:, batch.input_ids.shape[1] :]
    rows = [[token for token in row if token != tokenizer.pad_token_id] for row in ids.tolist()]
    return [(tokenizer.decode(row), len(row)) for row in rows]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m astuner_local.tiny.make", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the model to this folder")
    parser.add_argument("--tasks-out", type=Path, help="write train.jsonl and heldout.jsonl to this folder")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out is None and options.tasks_out is None:
        parser.error("nothing to make: give --out DIR, --tasks-out DIR, or both")
    if options.tasks_out:
        make_tasks(options.tasks_out, options.seed)
    if options.out:
        model, tokenizer = make_model(options.out, options.seed)
        problems = list(distinct(HELD_OUT_TASKS, options.seed, held_out=True))
        for temperature in (1.0, 0.0):
            played = play(model, tokenizer, problems, temperature=temperature)
            print(
                f"held-out at temperature {temperature:g}: success {fmean(p.success for p in played):.3f}, "
                f"well-formed {fmean(p.well_formed for p in played):.3f}, "
                f"{fmean(p.prompt_tokens for p in played):.1f} prompt tokens, "
                f"{fmean(p.generated_tokens for p in played):.1f} generated tokens"
            )


if __name__ == "__main__":
    main()
