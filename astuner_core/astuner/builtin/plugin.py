"""The core as a plugin of itself."""

from __future__ import annotations

from astuner.hookspecs import Provider, hookimpl


@hookimpl
def register_task_readers() -> dict[str, Provider]:
    return {
        "jsonl": Provider(
            target="astuner.builtin.jsonl:JsonlTaskReader",
            summary="one JSON object per line",
            config="astuner.builtin.jsonl:JsonlConfig",
            aliases=("jsonl_dataset_file", "dataset_file"),
        ),
        "huggingface": Provider(
            target="astuner.builtin.huggingface:HuggingFaceTaskReader",
            summary="a Hugging Face data set: hub name, local folder, parquet",
            config="astuner.builtin.huggingface:HuggingFaceConfig",
            requires=("datasets",),
            install='pip install "astuner-core[huggingface]"',
            aliases=("huggingface_dat_repo",),
        ),
        "env_service": Provider(
            target="astuner.builtin.environments:EnvServiceTaskReader",
            summary="the tasks of an environment in the environment service",
            config="astuner.builtin.environments:EnvironmentTasksConfig",
            aliases=("TaskReaderEnvService", "astuner.task_reader.task_reader_base->TaskReaderEnvService"),
        ),
        "environment": Provider(
            target="astuner.builtin.environments:EnvironmentTaskReader",
            summary="the tasks of an environment that runs inside this process",
            config="astuner.builtin.environments:EnvironmentTasksConfig",
        ),
        "conversations": Provider(
            target="astuner.builtin.feedback.tasks:ConversationsTaskReader",
            summary="empty tasks, for training from users' conversations (--with feedback)",
            config="astuner.builtin.feedback.settings:ConversationsConfig",
        ),
    }


@hookimpl
def register_judges() -> dict[str, Provider]:
    return {
        "env_service": Provider(
            target="astuner.builtin.environments:EnvServiceJudge",
            summary="the score that the task's environment gives",
            aliases=(
                "EnvServiceJudge",
                "astuner.task_judge.env_service_as_judge->EnvServiceJudge",
                "ajet.task_judge.env_service_as_judge->EnvServiceJudge",
            ),
        ),
        "weighted": Provider(
            target="astuner.builtin.weighted:weighted",
            summary="a weighted sum of other judges",
            config="astuner.builtin.weighted:WeightedConfig",
        ),
    }


@hookimpl
def register_workflows() -> dict[str, Provider]:
    return {
        "program": Provider(
            target="astuner.builtin.program:ProgramWorkflow",
            summary="any program that speaks to an OpenAI- or Anthropic-style endpoint, in any language",
            config="astuner.builtin.program:ProgramConfig",
            requires=("aiohttp",),
            install='pip install "astuner-core[endpoint]"',
            aliases=("command",),
        ),
        "feedback": Provider(
            target="astuner.builtin.feedback.workflow:FeedbackWorkflow",
            summary="conversations of real users, rated by them (--with feedback)",
            config="astuner.builtin.feedback.settings:WorkflowConfig",
            requires=("aiohttp",),
            install='pip install "astuner-core[endpoint]"',
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
        "tensorboard": Provider(
            target="astuner.builtin.trackers:TensorboardSink",
            summary="event files in the run folder",
            requires=("tensorboard",),
            install='pip install "astuner-core[tensorboard]"',
        ),
        "wandb": Provider(
            target="astuner.builtin.trackers:WandbSink",
            summary="Weights & Biases",
            requires=("wandb",),
            install='pip install "astuner-core[wandb]"',
        ),
        "swanlab": Provider(
            target="astuner.builtin.trackers:SwanlabSink",
            summary="SwanLab",
            requires=("swanlab",),
            install='pip install "astuner-core[swanlab]"',
        ),
        "mlflow": Provider(
            target="astuner.builtin.mlflow_sink:MlflowSink",
            summary="MLflow: a server, or a database in one file",
            requires=("mlflow", "sqlalchemy", "alembic"),
            install='pip install "astuner-core[mlflow]"',
        ),
        "otel": Provider(
            target="astuner.telemetry.sink:OtelSink",
            summary="traces for an OpenTelemetry collector (astuner.telemetry.otlp_endpoint)",
            requires=("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
            install='pip install "astuner-core[otel]"',
        ),
        "studio": Provider(
            target="astuner.builtin.studio:StudioSink",
            summary="conversations for AgentScope Studio (astuner.telemetry.studio_url)",
        ),
    }


@hookimpl
def register_services() -> dict[str, Provider]:
    install = "pip install astuner-verl, or in an environment of its own: pip install astuner-trinity"
    return {
        "feedback": Provider(
            target="astuner.builtin.feedback.service:FeedbackService",
            summary="an OpenAI-style endpoint for an application, whose users' ratings are the rewards",
            config="astuner.builtin.feedback.settings:ServiceConfig",
            requires=("aiohttp",),
            install='pip install "astuner-core[endpoint]"',
        ),
        "ray": Provider(
            target="astuner.builtin.ray_service:RayService",
            summary="Ray on this machine: the cluster that runs already, or one for this run",
            requires=("ray",),
            install=install,
        ),
        "ray_cluster": Provider(
            target="astuner.builtin.ray_service:RayClusterService",
            summary="Ray on several machines that are given the same command (MASTER_ADDR, MASTER_PORT)",
            aliases=("ray-cluster",),
            requires=("ray",),
            install=install,
        ),
    }
