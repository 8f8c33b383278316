"""What astuner-flywheel offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_task_readers() -> dict[str, Provider]:
    return {
        "data_generation": Provider(
            target="astuner_flywheel.generation.entry:GeneratedTaskReader",
            summary="new tasks that a helper model makes from documents or from a few samples",
            config="astuner_flywheel.generation.config:DataGenerationConfig",
        ),
        "tracing": Provider(
            target="astuner_flywheel.tracing_reader:TracingTaskReader",
            summary="what users asked a deployed agent: AgentScope Studio, OTLP spans, chats, with feedback",
            config="astuner_flywheel.traces.settings:TracingConfig",
        ),
    }


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "data": Provider(
            target="astuner_flywheel.commands:app",
            summary="make tasks of documents, of a few samples, and of what users did",
        )
    }
