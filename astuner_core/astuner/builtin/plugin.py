"""The core as a plugin of itself."""

from __future__ import annotations

from astuner.contracts.hookspecs import Provider, hookimpl


@hookimpl
def register_task_readers() -> dict[str, Provider]:
    return {
        "jsonl": Provider(
            target="astuner.builtin.jsonl:JsonlTaskReader",
            summary="one JSON object per line",
            config="astuner.builtin.jsonl:JsonlConfig",
            aliases=("jsonl_dataset_file", "dataset_file"),
        ),
    }


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
        name: Provider(target=f"astuner.rollout.checks:{name}", summary=summary) for name, summary in summaries.items()
    }


@hookimpl
def register_backbones() -> dict[str, Provider]:
    return {
        "debug": Provider(
            target="astuner.builtin.debug:DebugBackbone",
            summary="a few tasks, one process, no training: step through with breakpoints",
        )
    }


@hookimpl
def register_log_sinks() -> dict[str, Provider]:
    return {
        "console": Provider(target="astuner.builtin.console:ConsoleSink", summary="progress for a person"),
        "jsonl": Provider(
            target="astuner.builtin.jsonl_sink:JsonlSink", summary="metrics.jsonl and run.log in the run folder"
        ),
    }
