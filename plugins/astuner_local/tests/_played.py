"""What the tiny model can do before anybody trains it, in a plain loop.

Two turns at most, token ids in and out, no agent framework; a tool call is answered by the calculator, and the answer
in ``\\boxed{}`` is compared with the problem's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from astuner_local.tiny.problems import Problem, evaluate
from astuner_local.tiny.transcripts import TOOLS, first_messages

_CALL = re.compile(
    r'<tool_call>\n\{"name": "calculator", "arguments": \{"expression": "(\d+) ([-+*/]) (\d+)"\}\}\n</tool_call>'
)
_ANSWER = re.compile(r"\\boxed\{([^{}]*)\}")
MAX_NEW_TOKENS = 40


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
