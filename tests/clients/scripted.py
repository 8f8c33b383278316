"""`astuner` with a `local` backbone whose model says what a script says: ``python -m tests.clients.scripted run …``.

Only the draw is replaced: inside of the decoding batch each token becomes the script's next one, and its recorded
log-probability is the one that the weights give to it at the request's temperature.  Prompts, caches, limits, stop
strings, the trainer and its updates are those of any run.

``$CLIENT_SCRIPT`` is a JSON file: question -> the texts of an episode, one per model call.  The last is said again when
there are more calls.  In every other episode with a question "42" becomes "41" in the last text: rewards differ.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astuner.cli import main
from astuner.contracts.types import Generation, SamplingParams
from astuner_local.engine import batch, engine


@dataclass(frozen=True, kw_only=True)
class Scripted(SamplingParams):
    """A request's parameters, and what its reply will be."""

    tokens: tuple[int, ...] = ()


class Script:
    """Which text comes next, by session (an agent of an episode)."""

    def __init__(self, file: Path) -> None:
        self._texts: dict[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
        self._sessions: dict[str, tuple[str, bool, itertools.count[int]]] = {}
        self._episodes: Counter[str] = Counter()

    def text(self, session: str, prompt: str) -> str:
        """The reply to a prompt.

        :raises LookupError: the first prompt of a session holds none of the questions.
        """
        if session not in self._sessions:
            question = next((question for question in self._texts if question in prompt), None)
            if question is None:
                raise LookupError(f"no question of the script is in the prompt: …{prompt[-2000:]!r}")
            self._episodes[question] += 1
            self._sessions[session] = question, self._episodes[question] % 2 == 0, itertools.count()
        question, wrong, turns = self._sessions[session]
        texts = self._texts[question]
        turn = min(next(turns), len(texts) - 1)
        return texts[turn].replace("42", "41") if wrong and turn == len(texts) - 1 else texts[turn]


def follow(script: Script) -> None:
    """Make every local engine of this process say what the script says."""
    generate, start, advance = engine.LocalEngine.generate, batch.DecodeBatch.start, batch.DecodeBatch._advance
    begun: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
    """(batch, slot) -> length of the prompt, and the reply."""
    wanted: list[int] = []

    async def scripted(
        self: Any, prompt_ids: Sequence[int], sampling: SamplingParams, *, session: str = ""
    ) -> Generation:
        tokenizer = self._decode.func.__self__
        text = script.text(session, self._decode(list(prompt_ids)))
        tokens = (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
        own = {f.name: getattr(sampling, f.name) for f in fields(SamplingParams)}
        return await generate(self, prompt_ids, Scripted(**own, tokens=tokens), session=session)

    def started(self: Any, slot: int, prompt: Sequence[int], limit: int, sampling: Any, stop_ids: Any) -> None:
        begun[id(self), slot] = len(prompt), sampling.tokens
        start(self, slot, prompt, limit, sampling, stop_ids)

    def advanced(self: Any, rows: Any, logits: Tensor) -> list[tuple[int, int]]:
        at = (self._position.index_select(0, rows.rows) + 1).tolist()
        wanted[:] = [
            tokens[column - length]
            for (length, tokens), column in (
                (begun[id(self), slot], column) for slot, column in zip(rows.rows.tolist(), at, strict=True)
            )
        ]
        return advance(self, rows, logits)

    def forced(logits: Tensor, uniform: Tensor, rows: Any) -> tuple[Tensor, Tensor]:
        heat = 1 if rows.temperature is None else rows.temperature
        tokens = torch.tensor(wanted, device=logits.device)
        return tokens, torch.log_softmax(logits.float() / heat, -1).gather(-1, tokens[:, None])[:, 0]

    engine.LocalEngine.generate = scripted  # type: ignore[method-assign]
    batch.DecodeBatch.start = started  # type: ignore[method-assign]
    batch.DecodeBatch._advance = advanced  # type: ignore[method-assign]
    batch.sample = forced


if __name__ == "__main__":
    follow(Script(Path(os.environ["CLIENT_SCRIPT"])))
    main(sys.argv[1:])
