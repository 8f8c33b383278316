"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl

_FAMILIES = {
    "qwen_xml": ("QWEN_XML", "Qwen3-Coder and Qwen3.5: ChatML whose calls have one tag per argument"),
    "llama3": ("LLAMA3", "Llama 3.1 and later: a call is one JSON object"),
    "mistral": ("MISTRAL", "Mistral, with a list of calls or with [ARGS]"),
    "deepseek": ("DEEPSEEK", "DeepSeek V3, V3.1 and R1"),
    "glm": ("GLM", "GLM-4.5 and later: one tag per argument"),
    "gpt_oss": ("GPT_OSS", "gpt-oss: a reply is a row of messages with channels (harmony)"),
    "gemma": ("GEMMA", "Gemma, which calls no tools"),
}


@hookimpl
def register_chat_families() -> dict[str, Provider]:
    return {
        name: Provider(target=f"astuner_families.families:{target}", summary=summary)
        for name, (target, summary) in _FAMILIES.items()
    }
