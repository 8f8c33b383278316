"""Neutralize untrusted text before a model reads it.

Text of users, agents, documents and data sets may contain control tokens of a chat template, forged marker lines
(`-----END …`) and invisible characters. A server that tokenizes such text unchanged may treat it as a new turn. A
control token is an exact string, so a space after its first character disables it and keeps it readable.

Invariant: no visible text is lost except repeated empty lines and stacked marks, and the cost grows linearly with the
length of the text. Callers also mark where the text begins and ends, and state that it is data.
"""

from __future__ import annotations

import re
import unicodedata

_LINE_ENDS = re.compile("\r\n|[\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029]")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0e-\x1f\x7f]")
# Bounded repetitions only: an attacker may write text that makes unbounded patterns slow.
_HIDDEN = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0")  # letters and marks without a visible glyph
_VARIATION = re.compile("[\ufe00-\ufe0f\U000e0100-\U000e01ef]")  # select a glyph of the preceding letter
_MOST_MARKS = 3  # combining marks on one letter; natural text needs no more
_LOOK_ALIKES = str.maketrans(
    "‹〈⟨❮❰〈＜﹤«›〉⟩❯❱〉＞﹥»｜│┃∣ǀ❘¦‐‑‒–—―−－﹣▁аеорсухіѕԁјһӏΑΒΕΖΗΙΚΜΝΟΡΤΥΧАВЕКМНОРСТУХЅІ",
    "<<<<<<<<<>>>>>>>>>|||||||---------_aeopcyxisdjhlABEZHIKMNOPTYXABEKMHOPCTYXSI",
)
_NAMES = (
    r"s|bos|eos|pad|unk|mask|cls|sep|sys|inst|system|user|human|assistant|bot|developer|tool|function|think|thinking|"
    r"thought|reasoning|tool_?calls?|tool_?responses?|tool_?results?|tools|function_?calls?|function_?results?|invoke|"
    r"available_?tools|system_?prompt|start_of_turn|end_of_turn|start_of_image|end_of_image|gmask|sop|eop|"
    r"_user|_bot|_system|_end|unused_?\d+|reserved_?\d+|extra_?id_?\d+|fim_[a-z]+|seed:[a-z_:]+|antml:[a-z_]+|"
    r"control_?\d+|special_?\d+|role|[a-z]{2,5}_token|end_of_utterance"
)
_GAP = r"\s{0,8}"
_CONTROL = (  # a space is inserted after the first character of each match: control tokens are exact strings
    re.compile(rf"[<\[](?={_GAP}\|)|\|(?={_GAP}[>\]])"),  # <|im_start|>, <｜User｜>, <|turn>, <turn|>, [|system|]
    re.compile(rf"<(?=<{{0,2}}{_GAP}/?{_GAP}(?:{_NAMES})\b[^<>\n]{{0,200}}>)", re.IGNORECASE),  # <s>, </think>
    re.compile(rf"\[(?={_GAP}/?{_GAP}(?:{_NAMES}){_GAP}\])", re.IGNORECASE),  # [INST], [gMASK], [TOOL_CALLS]
    re.compile(r"\](?=~!?b[\[\]])|\[(?=e~\[)", re.IGNORECASE),  # ]~b], ]~!b[, [e~[
    re.compile(rf"-(?=-{{0,8}}{_GAP}(?:BEGIN|END)\b)", re.IGNORECASE),  # marker lines, in any dashes
)


def neutralise(text: str) -> str:
    """Return the text without invisible characters, and with a space inside every control token of a chat template.

    Letters of other scripts that resemble Latin letters are kept; control tokens written with them are broken as well.
    """
    visible = _visible(_LINE_ENDS.sub("\n", text))
    folded = visible
    if not visible.isascii():  # map characters one to one, so that positions match those in the text
        letters = visible.translate(_LOOK_ALIKES)
        folded = "".join(n if len(n := unicodedata.normalize("NFKC", c)) == 1 else c for c in letters)
    breaks = sorted({match.start() + 1 for pattern in _CONTROL for match in pattern.finditer(folded)})
    parts = [visible[a:b] for a, b in zip([0, *breaks], [*breaks, len(visible)], strict=True)]
    return re.sub(r"\n{4,}", "\n\n\n", " ".join(parts))


def _visible(text: str) -> str:
    if text.isascii():
        return _CONTROL_CHARACTERS.sub("", text)
    kept, marks = [], 0
    for c in text:
        category = unicodedata.category(c)
        if c in "\n\t":
            kept.append(c)
        elif category == "Cs":
            kept.append("\ufffd")  # a lone surrogate, which cannot be encoded
        elif category[0] == "C" or category in ("Zl", "Zp") or c in _HIDDEN or _VARIATION.fullmatch(c):
            continue
        elif category[0] == "M":
            marks += 1
            if marks <= _MOST_MARKS:
                kept.append(c)
            continue
        else:
            kept.append(c)
        marks = 0
    return "".join(kept)
