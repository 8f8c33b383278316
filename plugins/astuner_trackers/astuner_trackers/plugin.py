"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_log_sinks() -> dict[str, Provider]:
    return {
        "tensorboard": Provider(
            target="astuner_trackers.trackers:TensorboardSink",
            summary="event files in the run folder",
            requires=("tensorboard",),
            install='pip install "astuner-trackers[tensorboard]"',
        ),
        "wandb": Provider(
            target="astuner_trackers.trackers:WandbSink",
            summary="Weights & Biases",
            requires=("wandb",),
            install='pip install "astuner-trackers[wandb]"',
        ),
        "swanlab": Provider(
            target="astuner_trackers.trackers:SwanlabSink",
            summary="SwanLab",
            requires=("swanlab",),
            install='pip install "astuner-trackers[swanlab]"',
        ),
        "mlflow": Provider(
            target="astuner_trackers.trackers:MlflowSink",
            summary="MLflow: a server, or a database in one file",
            requires=("mlflow", "sqlalchemy", "alembic"),
            install='pip install "astuner-trackers[mlflow]"',
        ),
        "otel": Provider(
            target="astuner_trackers.telemetry.sink:OtelSink",
            summary="traces for an OpenTelemetry collector (astuner.telemetry.otlp_endpoint)",
            requires=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
            install='pip install "astuner-trackers[otel]"',
        ),
        "studio": Provider(
            target="astuner_trackers.studio:StudioSink",
            summary="conversations for AgentScope Studio (astuner.telemetry.studio_url)",
        ),
    }


@hookimpl
def register_subscribers() -> dict[str, Provider]:
    return {
        "telemetry": Provider(
            target="astuner_trackers.telemetry.sink:Wanted",
            summary="the log sinks that the section astuner.telemetry asks for",
        )
    }


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "episode_context": Provider(
            target="astuner_trackers.telemetry.run_ids:EpisodeSpans",
            summary="spans of the agent's own framework become part of the episode's trace",
        ),
    }


@hookimpl
def register_config_keys() -> dict[str, Provider]:
    return {
        "telemetry": Provider(
            target="astuner_trackers.telemetry.settings:TelemetryKeys",
            summary="who else is told what a run does",
        )
    }
