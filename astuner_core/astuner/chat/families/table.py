"""The families that ASTuner reads.

Adding one means adding a line here and, if its calls are written in a way of their own, a reader.
"""

from __future__ import annotations

from astuner.chat.families.harmony import read_reply
from astuner.chat.families.json_calls import (
    read_deepseek_bare,
    read_deepseek_fenced,
    read_llama,
    read_mistral_args,
    read_mistral_list,
)
from astuner.chat.families.style import CallStyle, Family
from astuner.chat.families.xml_calls import read_glm, read_qwen
from astuner.chat.tool_calls import ReadCalls, Tools, read_tool_calls


def _read_hermes(text: str, tools: Tools) -> ReadCalls:
    return read_tool_calls(text)


def _read_nothing(text: str, tools: Tools) -> ReadCalls:
    return text, [], []


HERMES = CallStyle("Hermes tool calls", _read_hermes)
QWEN_XML = CallStyle("Qwen3.5's XML tool calls", read_qwen)
GLM_XML = CallStyle("GLM's XML tool calls", read_glm)
LLAMA = CallStyle("Llama's JSON tool calls", read_llama, one_call=True)
MISTRAL_LIST = CallStyle("Mistral's list of tool calls", read_mistral_list, short_ids=True)
MISTRAL_ARGS = CallStyle("Mistral's [ARGS] tool calls", read_mistral_args, short_ids=True)
DEEPSEEK_FENCED = CallStyle("DeepSeek V3's tool calls", read_deepseek_fenced)
DEEPSEEK_BARE = CallStyle("DeepSeek V3.1's tool calls", read_deepseek_bare)
HARMONY = CallStyle.of_replies("harmony tool calls", read_reply, one_call=True, one_text=True)
NO_CALLS = CallStyle("no tool calls", _read_nothing)


_TAGGED = (HERMES, QWEN_XML, GLM_XML)

FAMILIES = (
    Family("ChatML", "<|im_start|>assistant", closes=("<|im_end|>",), stops=("<|im_end|>",), styles=_TAGGED),
    Family(
        "Llama 3",
        "<|start_header_id|>assistant<|end_header_id|>",
        closes=("<|eot_id|>", "<|eom_id|>"),
        stops=("<|eot_id|>", "<|eom_id|>"),
        styles=(LLAMA, *_TAGGED),
    ),
    Family(
        "Mistral",
        "",
        asked="[/INST]",
        closes=("</s>",),
        stops=("</s>",),
        styles=(MISTRAL_LIST, MISTRAL_ARGS),
    ),
    Family(
        "DeepSeek",
        "<｜Assistant｜>",
        closes=("<｜end▁of▁sentence｜>",),
        stops=("<｜end▁of▁sentence｜>",),
        styles=(DEEPSEEK_FENCED, DEEPSEEK_BARE),
    ),
    Family(
        "GLM",
        "<|assistant|>",
        follows=("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
        styles=(GLM_XML,),
    ),
    Family(
        "gpt-oss",
        "<|start|>assistant",
        closes=("<|end|>", "<|return|>", "<|call|>"),
        stops=("<|return|>", "<|call|>"),
        styles=(HARMONY,),
        channels=read_reply,
    ),
    Family("Gemma", "<start_of_turn>model", closes=("<end_of_turn>",), stops=("<end_of_turn>",)),
)
"""Every family that ASTuner reads by itself."""
