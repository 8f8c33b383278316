"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_output_checks() -> dict[str, Provider]:
    summaries = {
        "nonsense": "control_tokens, garbled and repetition together",
        "control_tokens": "control tokens of a chat format, written as text and not quoted",
        "garbled": "broken characters, letters of many scripts within words",
        "repetition": "the same words, letters or lines over and over",
        "wrong_toolcall": "a tool call that cannot be read",
        "unknown_tool": "a call to a tool that was not offered",
        "wrong_arguments": "a call that lacks a required argument, or gives one of the wrong JSON type",
        "format_type_1": "anything but a thought and then one block of Python",
        "non_ascii": "never fires; known to older experiments, where it made nonsense spare other alphabets",
    }
    return {
        name: Provider(target=f"astuner_checks.named:{name}", summary=summary) for name, summary in summaries.items()
    }
