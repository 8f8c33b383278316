"""Detect broken characters and control tokens of chat formats in model output.

Broken text has four signs, each sufficient: many replacement characters, many control characters, UTF-8 read as
Latin-1,
and letters of many scripts inside single words. Invariant: a few of them (a quoted broken name, a reply truncated
inside
a character) never count, and no alphabet does.

Special tokens of a family delimit turns. Inside a reply they mean that the model has lost the format. Text may also be
*about* them, so a token in quotation marks, in a code span or in a code block does not count. Invariant: one pass over
the text, for any content.
"""

from __future__ import annotations

import re
from collections.abc import Set

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTROL = frozenset(map(chr, {*range(32), 127} - {*b"\t\n\v\f\r\x1b"}))
"""Without tab, newline, form feed, and escape, which is used for terminal colors."""
_FOREIGN = re.compile(r"[^\x00-\x7f]+")
_MARKS = re.compile("[\u0300-\u036f\u0483-\u0489\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f]{20,}")
_LETTERS = re.compile(r"[^\W\d_]{2,}")
_SCRIPTS = tuple(
    re.compile(f"[{letters}]")
    for letters in (
        "A-Za-z\u00c0-\u024f\u1e00-\u1eff\u0370-\u03ff\u1f00-\u1fff",  # Latin; and Greek, used with it in formulas
        "\u0400-\u052f",  # Cyrillic
        "\u0530-\u058f",  # Armenian
        "\u0590-\u05ff",  # Hebrew
        "\u0600-\u06ff\u0750-\u077f",  # Arabic
        "\u0900-\u097f",  # Devanagari
        "\u0980-\u09ff",  # Bengali
        "\u0b80-\u0bff",  # Tamil
        "\u0c00-\u0c7f",  # Telugu
        "\u0e00-\u0e7f",  # Thai
        "\u10a0-\u10ff",  # Georgian
        "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f",  # Chinese, Japanese, Korean
    )
)

_MANY, _SHARE = 10, 0.1
_MIXED_WORDS, _SCRIPTS_MIXED, _MIXED_SHARE = 8, 4, 0.15


def find_garbage(text: str) -> str | None:
    """Return a description of broken text, or None."""
    used = set(text)
    if _REPLACEMENT in used and _is_much(broken := text.count(_REPLACEMENT), text):
        return f"{broken} characters that cannot be decoded"
    if used & _CONTROL and _is_much(control := sum(map(text.count, used & _CONTROL)), text):
        return f"{control} control characters"
    if text.isascii():
        return None
    if marks := _MARKS.search(text):
        return f"{len(marks[0])} combining marks on one letter"
    misread = [run for run in _FOREIGN.findall(text) if _is_misread(run.strip("«»"))]
    if _is_much(sum(map(len, misread)) // 2, text):
        return f"UTF-8 misread as Latin-1, such as {misread[0][:20]!r}"
    return _mixed_scripts(text, used)


def _is_much(count: int, text: str) -> bool:
    return count >= _MANY and count >= _SHARE * len(text)


def _is_misread(run: str) -> bool:
    """Return whether ``run`` is UTF-8 decoded as Latin-1 or Windows-1252."""
    for encoding in ("latin-1", "cp1252"):
        try:
            run.encode(encoding).decode("utf-8")
        except UnicodeError:
            continue
        return True
    return False


def _mixed_scripts(text: str, used: Set[str]) -> str | None:
    """Describe words that join letters of scripts that no language joins, as in random tokens, or return None."""
    if len(_scripts("".join(used))) < _SCRIPTS_MIXED:
        return None
    words = _LETTERS.findall(text)
    mixed = [(word, scripts) for word in words if not word.isascii() and len(scripts := _scripts(word)) > 1]
    joined = {script for _, scripts in mixed for script in scripts}
    if len(mixed) >= _MIXED_WORDS and len(joined) >= _SCRIPTS_MIXED and len(mixed) >= _MIXED_SHARE * len(words):
        return f"letters of {len(joined)} scripts within words, such as {mixed[0][0][:40]!r}"
    return None


def _scripts(text: str) -> set[int]:
    return {number for number, script in enumerate(_SCRIPTS) if script.search(text)}


# ---- control tokens --------------------------------------------------------------------------------------------------

_CONTROL_TOKEN = re.compile(
    r"<\|/?[A-Za-z][\w:.-]{2,60}\|>"  # Qwen, Llama 3 and 4, gpt-oss, Phi, GLM, Kimi, Cohere
    r"|<｜[^\s<>｜]{2,60}｜>"  # DeepSeek
    r"|<(?:start|end)_of_turn>"  # Gemma
    r"|\[/?INST\]|<</?SYS>>|\[/?(?:AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CALLS|SYSTEM_PROMPT)\]"  # Llama 2, Mistral
    r"|\[gMASK\]"  # ChatGLM
    r"|\[(?:UNUSED_TOKEN_|PAD)\d{3,6}\]|<(?:reserved_|unused|extra_id_)\d{1,6}>"  # never trained
    r"|(?:<(?:0x[0-9A-F]{2}|pad|unk|bos|eos)>[ ]?){3}"  # single ones may be words of a grammar; several are not
)
_END_OF_SEQUENCE = re.compile(r"(?<=[^\s\"'`>])</s>\s*\Z|</s>\s*<s>")
"""End tokens of Llama 2 and Mistral. In HTML, ``</s>`` closes ``<s>``."""

_QUOTES = frozenset("\"'`‘’“”«»「」『』")


def find_control_token(text: str) -> str | None:
    """Return a description of a control token written as text, or None."""
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
