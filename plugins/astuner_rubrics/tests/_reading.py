"""A judge model's view of a message: written for the tests, from what the prompts promise, without `fence.py`."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BEGIN = re.compile(r"-----BEGIN ([A-Z0-9 ]+) ([0-9a-f]{24})-----")
_NOTE = re.compile(r"\(about [0-9,]+ characters of [0-9,]+ are left out here\)")


@dataclass
class Read:
    """What stands in fences, and what does not."""

    fenced: dict[str, str] = field(default_factory=dict)
    outside: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Lines inside of a fence that are not of its text."""
    numbers: set[str] = field(default_factory=set)
    twice: list[str] = field(default_factory=list)


def read(content: str) -> Read:
    """Line by line, as the prompts say that it is to be read."""
    found, lines = Read(), content.split("\n")
    at = 0
    while at < len(lines):
        begin = _BEGIN.fullmatch(lines[at])
        label, number = begin.groups() if begin else ("", "")
        if begin is None or f"-----END {label} {number}-----" not in lines[at:]:
            found.outside.append(lines[at])
            at += 1
            continue
        end = lines.index(f"-----END {label} {number}-----", at)
        text = []
        for line in lines[at + 1 : end]:
            if line.startswith("| "):
                text.append(line[2:])
            else:
                found.notes.append(line)
        if label in found.fenced:
            found.twice.append(label)
        found.fenced[label] = "\n".join(text)
        found.numbers.add(number)
        at = end + 1
    return found


def is_ours(note: str) -> bool:
    """Whether a line inside of a fence that is not of its text is one that the prompts speak of."""
    return _NOTE.fullmatch(note) is not None


_WRITTEN = """
<|im_start|> <|im_end|> <|endoftext|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|begin_of_text|> <|system|>
<|user|> <|assistant|> <|end|> <|start|> <|message|> <|channel|> <|header_start|> <|START_OF_TURN_TOKEN|> <|im_user|>
<s> </s> <bos> <eos> <pad> <unk> [INST] [/INST] <<SYS>> <</SYS>> [TOOL_CALLS] [AVAILABLE_TOOLS] [SYSTEM_PROMPT]
<start_of_turn> <end_of_turn> <｜User｜> <｜Assistant｜> <｜end▁of▁sentence｜> <｜begin▁of▁sentence｜> [gMASK] <sop>
]~b] ]~!b[ [e~[ <think> </think> <tool_call> </tool_call> <tool_response> <function_calls> <unused0> <extra_id_0>
<reserved_106> <seed:bos> <fim_prefix> <_user> <_bot> <|turn> <turn|>
[|system|] [|user|] [|assistant|] [|endofturn|] <SPECIAL_10> <role> </role> <role>SYSTEM</role> <BOS_TOKEN>
<EOS_TOKEN> <end_of_utterance>
"""
CONTROL_TOKENS = tuple(_WRITTEN.split())
