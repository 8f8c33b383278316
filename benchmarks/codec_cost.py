"""Cost of encoding a long conversation: only new messages (ASTuner), compared with the full history at every turn."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from astuner import Generation
from astuner.chat.codec import ChatCodec
from astuner.contracts.types import FinishReason
from benchmarks import records, templates
from benchmarks.report import Report, ms, us

TURNS = 60
SHOWN = (10, 20, 40, 60)
MOST_TOKENISED = 1.1
"""Goal: maximum of tokenized tokens per new token."""


def run(*, quick: bool) -> Report:
    repeats = 1 if quick else 7
    names = ("qwen2.5", "mistral-nemo") if quick else templates.NAMES
    report = Report(
        f"Rendering and tokenizing a conversation of {TURNS} turns",
        "A turn is a tool call of the model and the tool's result. Calls and results differ at every turn and in "
        "every repetition, so no cache can help. *ASTuner* is `Conversation.encode`, which splices the recorded "
        "tokens and encodes only new messages. *Naive* applies the tokenizer's `apply_chat_template` to the full "
        "history at every turn. Both get the same messages and alternate in one process with one thread. The chat "
        "templates are the real models' templates; the vocabulary is a byte-level BPE trained on this repository's "
        "text. CPU time, medians.",
    )
    found = {name: _measure(name, repeats) for name in names}
    _totals(report, found)
    _over_turns(report, found)
    _per_turn(report, found)
    return report


@dataclass
class _Side:
    """Cost of one way of encoding at every turn of a conversation."""

    tokens: list[int] = field(default_factory=list)
    """Tokenized tokens."""
    seconds: list[float] = field(default_factory=list)


@dataclass
class _Conversation:
    """One conversation, encoded both ways."""

    new: int = 0
    """Prompt tokens that the model did not write, each counted once."""
    ours: _Side = field(default_factory=_Side)
    naive: _Side = field(default_factory=_Side)
    accepting: float = 0.0
    """Seconds for parsing and recording the replies."""

    def side(self, name: str) -> _Side:
        return self.ours if name == "ours" else self.naive

    @property
    def ratio(self) -> float:
        """Return tokenized tokens per new token."""
        return sum(self.ours.tokens) / self.new


@dataclass
class _Found:
    """All repetitions of one template, both ways."""

    rounds: list[_Conversation]
    terse: _Conversation
    """Conversation with one-word results, in which an additional token per turn weighs most."""

    def tokens(self, side: str, turns: int) -> int:
        """Return the tokenized tokens up to this turn; repetitions differ by a few digits only."""
        return sum(self.rounds[0].side(side).tokens[:turns])

    def seconds(self, side: str, turns: int) -> float:
        """Return the CPU time up to this turn."""
        return statistics.median(sum(r.side(side).seconds[:turns]) for r in self.rounds)

    def stretch(self, side: str, first: int, last: int) -> float:
        """Return the mean CPU seconds of a turn from ``first`` to ``last``, counted from 1."""
        return statistics.median(statistics.fmean(r.side(side).seconds[first - 1 : last]) for r in self.rounds)


def _measure(name: str, repeats: int) -> _Found:
    tokenizer = templates.tokenizer(name)
    codec = ChatCodec(tokenizer)
    said = [_said(codec, tokenizer, turn) for turn in range(TURNS)]
    rounds = []
    for number in range(repeats + 1):  # the first one warms up
        found = _Conversation()
        gc.collect()
        _ours(found, codec, said, number)
        gc.collect()
        _naive(found, tokenizer, number, reasons=codec.template.reasons)
        rounds.append(found)
    terse = _Conversation()
    _ours(terse, codec, said, repeats + 1, terse=True)
    return _Found(rounds[1:], terse)


def _ours(
    found: _Conversation, codec: ChatCodec, said: Sequence[Sequence[int]], number: int, *, terse: bool = False
) -> None:
    """Run one conversation with a codec.

    :param said: Reply of the model at every turn.
    :param number: Number of the conversation; its texts differ from all other conversations.
    :param terse: Make each tool result a single number.
    :raises RuntimeError: A turn was not continued exactly, so the measurement is invalid.
    """
    conversation, before = codec.conversation(), 0
    messages: list[Mapping[str, Any]] = [*records.first_messages(number)]
    for turn in range(TURNS):
        counted, started = codec.template.tokens_encoded, time.process_time()
        encoded = conversation.encode(messages, records.TOOLS)
        found.ours.seconds.append(time.process_time() - started)
        found.ours.tokens.append(codec.template.tokens_encoded - counted)
        if (encoded.continues is None) != (turn == 0):
            raise RuntimeError(f"turn {turn + 1} starts a branch ({encoded.branch_reason})")
        found.new += len(encoded.prompt_ids) - before
        before = len(encoded.prompt_ids) + len(said[turn])

        generation = _generation(encoded.prompt_ids, said[turn])
        started = time.process_time()
        reply = conversation.accept(encoded, generation, turn)
        found.accepting += time.process_time() - started
        if not reply.get("tool_calls"):
            raise RuntimeError(f"turn {turn + 1}: the tool call was not parsed: {reply}")
        result = str(number * TURNS + turn) if terse else records.result(number, turn)
        messages += [reply, {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": result}]


def _naive(found: _Conversation, tokenizer: Any, number: int, *, reasons: bool) -> None:
    """Render and tokenize the complete history of the same conversation at every turn.

    :param reasons: Add reasoning to the replies.
    """
    history: list[Mapping[str, Any]] = [*records.first_messages(number)]
    for turn in range(TURNS):
        started = time.process_time()
        ids = tokenizer.apply_chat_template(history, tools=records.TOOLS, add_generation_prompt=True, return_dict=False)
        found.naive.seconds.append(time.process_time() - started)
        found.naive.tokens.append(len(ids))
        call, thought = records.call(turn), {"reasoning_content": _thought(turn)} if reasons else {}
        history += [
            {"role": "assistant", "content": "", **thought, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "name": "search", "content": records.result(number, turn)},
        ]


def _said(codec: ChatCodec, tokenizer: Any, turn: int) -> list[int]:
    """Return the model's reply: a call, with a sentence of reasoning if the family marks reasoning."""
    text = codec.template.write_reply("", [records.call(turn)], _thought(turn) if codec.template.reasons else "")
    return [*tokenizer.encode(text, add_special_tokens=False), codec.stop_token_ids[0]]


def _thought(turn: int) -> str:
    return f"Box {turn} is the next one to look at."


def _generation(prompt_ids: Sequence[int], said: Sequence[int]) -> Generation:
    return Generation(
        prompt_ids=tuple(prompt_ids),
        response_ids=tuple(said),
        logprobs=(-0.5,) * len(said),
        finish_reason=FinishReason.STOP,
        policy_version=0,
    )


def _totals(report: Report, found: Mapping[str, _Found]) -> None:
    worst = max(max(f.rounds[0].ratio, f.terse.ratio) for f in found.values())
    report.heading("Complete conversation")
    report.table(
        ("template", "new", "tokenized", "per new", "same, one-word results", "naive", "naive / ASTuner"),
        [
            (
                name,
                f.rounds[0].new,
                f.tokens("ours", TURNS),
                f"{f.rounds[0].ratio:.3f}",
                f"{f.terse.ratio:.3f}",
                f.tokens("naive", TURNS),
                f"{f.tokens('naive', TURNS) / f.tokens('ours', TURNS):.0f}x",
            )
            for name, f in found.items()
        ],
    )
    report.text(
        "*new* counts the prompt tokens that the model did not write, each once: the minimum to tokenize. At most "
        f"{worst:.3f} tokens are tokenized per new one (goal ≤ {MOST_TOKENISED:g}: "
        f"{'reached' if worst <= MOST_TOKENISED else 'MISSED'}). The part above 1 is the end token of each reply: it "
        "is encoded with the text that follows it and then dropped, because the model already wrote it."
    )


def _over_turns(report: Report, found: Mapping[str, _Found]) -> None:
    report.heading("As a conversation gets longer")
    report.table(
        ("tokens tokenized, naive / ASTuner", *(f"{n} turns" for n in SHOWN)),
        [(name, *(f"{f.tokens('naive', n) / f.tokens('ours', n):.1f}x" for n in SHOWN)) for name, f in found.items()],
    )
    report.table(
        ("CPU ms for all turns", *(f"ASTuner, {n}" for n in SHOWN), *(f"naive, {n}" for n in SHOWN), "naive / ASTuner"),
        [
            (
                name,
                *(ms(f.seconds("ours", n)) for n in SHOWN),
                *(ms(f.seconds("naive", n)) for n in SHOWN),
                f"{f.seconds('naive', TURNS) / f.seconds('ours', TURNS):.1f}x",
            )
            for name, f in found.items()
        ],
    )


def _per_turn(report: Report, found: Mapping[str, _Found]) -> None:
    stretches = ((2, 10), (21, 30), (51, TURNS))
    report.heading("Cost of one turn")
    report.table(
        (
            "CPU µs per turn",
            *(f"ASTuner, {a}–{b}" for a, b in stretches),
            "late / early",
            *(f"naive, {a}–{b}" for a, b in stretches),
            "late / early",
            "reading a reply",
        ),
        [
            (
                name,
                *(us(f.stretch("ours", *s)) for s in stretches),
                f"{_growth(f, 'ours'):.2f}x",
                *(us(f.stretch("naive", *s)) for s in stretches),
                f"{_growth(f, 'naive'):.2f}x",
                us(statistics.median(r.accepting for r in f.rounds) / TURNS),
            )
            for name, f in found.items()
        ],
    )
    most = max(_growth(f, "ours") for f in found.values())
    tokens = max(_token_growth(f) for f in found.values())
    report.text(
        f"Turns 51–{TURNS} tokenize at most {tokens:.2f}x of the tokens of turns 2–10 (their numbers have more "
        f"digits), and cost at most {most:.2f}x of their CPU time. Rendering and tokenizing a turn costs the same in "
        "a conversation of any length; the remaining growth comes from comparing the history's messages with the "
        "recorded ones and from copying its token IDs. Turns of the naive way grow with the conversation. *Reading a "
        "reply* is `Conversation.accept`: decoding, splitting off reasoning and calls, and recording; the naive way "
        "does not include this work."
    )


def _token_growth(found: _Found) -> float:
    tokens = found.rounds[0].ours.tokens
    return statistics.fmean(tokens[50:]) / statistics.fmean(tokens[1:10])


def _growth(found: _Found, side: str) -> float:
    return found.stretch(side, 51, TURNS) / found.stretch(side, 2, 10)
