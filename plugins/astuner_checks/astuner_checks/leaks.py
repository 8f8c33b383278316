"""Control tokens of the chat formats, written into the text.

A family's special tokens delimit turns; in the middle of a reply they mean that the model has lost the format.  Text
may also speak *about* them, so a token in quotation marks, in a code span or in a code block does not count.
Invariant: one pass over the text, whatever it holds.
"""

from __future__ import annotations

import re

from astuner.contracts.output_check import OutputView

_CONTROL_TOKEN = re.compile(
    r"<\|/?[A-Za-z][\w:.-]{2,60}\|>"  # Qwen, Llama 3 and 4, gpt-oss, Phi, GLM, Kimi, Cohere
    r"|<｜[^\s<>｜]{2,60}｜>"  # DeepSeek
    r"|<(?:start|end)_of_turn>"  # Gemma
    r"|\[/?INST\]|<</?SYS>>|\[/?(?:AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|SYSTEM_PROMPT)\]"  # Llama 2, Mistral
    r"|\[gMASK\]"  # ChatGLM
    r"|\[(?:UNUSED_TOKEN_|PAD)\d{3,6}\]|<(?:reserved_|unused|extra_id_)\d{1,6}>"  # never trained
    r"|(?:<(?:0x[0-9A-F]{2}|pad|unk|bos|eos)>[ ]?){3}"  # also words of a grammar: a row of them is not
)
_END_OF_SEQUENCE = re.compile(r"(?<=[^\s\"'`>])</s>\s*\Z|</s>\s*<s>")
"""Of Llama 2 and Mistral; in HTML, ``</s>`` closes what ``<s>`` opened."""

_QUOTES = frozenset("\"'`‘’“”«»「」『』")


def control_tokens(view: OutputView) -> str | None:
    """A control token of a chat format, written as text and not quoted."""
    for text in view.written:
        if found := find_control_token(text):
            return f"control_tokens: {found}"
    return None


def find_control_token(text: str) -> str | None:
    """What is wrong, or None."""
    if "<" not in text and "[" not in text:
        return None
    read, in_block, quotes, ticks = 0, False, 0, 0
    for match in _CONTROL_TOKEN.finditer(text):
        start, end = match.span()
        in_block ^= bool(text.count("```", read, start) % 2)
        line = max(read, text.rfind("\n", read, start) + 1)
        if line > read:
            quotes = ticks = 0
        quotes += text.count('"', line, start)
        ticks += text.count("`", line, start)
        read = end
        beside = _QUOTES.intersection(text[start - 1 : start] + text[end : end + 1])
        if not (in_block or quotes % 2 or ticks % 2 or beside):
            return _named(match[0])
    if "</s>" in text and (found := _END_OF_SEQUENCE.search(text)) and "<s>" not in text[: found.start()]:
        return _named(found[0])
    return None


def _named(token: str) -> str:
    return f"the control token {' '.join(token.split())} written as text"
