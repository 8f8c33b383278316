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
        ),
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
