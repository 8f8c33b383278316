"""The families, as data. Adding one means adding one here, naming it in `plugin`, and perhaps a reader."""

from __future__ import annotations

from astuner.contracts.chat_family import HERMES, CallStyle, Family
from astuner_families.harmony import read_reply
from astuner_families.json_calls import (
    read_deepseek_bare,
    read_deepseek_fenced,
    read_llama,
    read_mistral_args,
    read_mistral_list,
)
from astuner_families.xml_calls import read_glm, read_qwen

_QWEN_TAGS = CallStyle("Qwen3.5's XML tool calls", read_qwen)
_GLM_TAGS = CallStyle("GLM's XML tool calls", read_glm)

QWEN_XML = Family(
    "ChatML",
    "<|im_start|>assistant",
    closes=("<|im_end|>",),
    stops=("<|im_end|>",),
    styles=(_QWEN_TAGS, _GLM_TAGS),
)
LLAMA3 = Family(
    "Llama 3",
    "<|start_header_id|>assistant<|end_header_id|>",
    closes=("<|eot_id|>", "<|eom_id|>"),
    stops=("<|eot_id|>", "<|eom_id|>"),
    styles=(CallStyle("Llama's JSON tool calls", read_llama, one_call=True), HERMES, _QWEN_TAGS, _GLM_TAGS),
)
MISTRAL = Family(
    "Mistral",
    "",
    asked="[/INST]",
    closes=("</s>",),
    stops=("</s>",),
    styles=(
        CallStyle("Mistral's list of tool calls", read_mistral_list, short_ids=True),
        CallStyle("Mistral's [ARGS] tool calls", read_mistral_args, short_ids=True),
    ),
)
DEEPSEEK = Family(
    "DeepSeek",
    "<｜Assistant｜>",
    closes=("<｜end▁of▁sentence｜>",),
    stops=("<｜end▁of▁sentence｜>",),
    styles=(
        CallStyle("DeepSeek V3's tool calls", read_deepseek_fenced),
        CallStyle("DeepSeek V3.1's tool calls", read_deepseek_bare),
    ),
)
GLM = Family(
    "GLM",
    "<|assistant|>",
    follows=("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
    stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    styles=(_GLM_TAGS,),
)
GPT_OSS = Family(
    "gpt-oss",
    "<|start|>assistant",
    closes=("<|end|>", "<|return|>", "<|call|>"),
    stops=("<|return|>", "<|call|>"),
    styles=(CallStyle.of_replies("harmony tool calls", read_reply, one_call=True, one_text=True),),
    channels=read_reply,
)
GEMMA = Family("Gemma", "<start_of_turn>model", closes=("<end_of_turn>",), stops=("<end_of_turn>",))
