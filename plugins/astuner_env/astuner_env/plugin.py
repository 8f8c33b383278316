"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import EnvironmentProvider, Provider, hookimpl


@hookimpl
def register_environments() -> dict[str, Provider]:
    return {
        "frozen_lake": EnvironmentProvider(
            target="astuner_env.worlds.frozen_lake:FrozenLake",
            summary="gymnasium's FrozenLake in words: cross the ice without falling into a hole",
            splits=("train", "validation", "test"),
            requires=("gymnasium",),
            install='pip install "astuner-env[gymnasium]"',
            preload=("astuner_env.worlds.frozen_lake:warm",),
            memory_mb=40,
        ),
        "reasoning_gym": EnvironmentProvider(
            target="astuner_env.worlds.reasoning:ReasoningGym",
            summary="reasoning-gym's procedural tasks, one answer each",
            splits=("train", "validation", "test"),
            requires=("reasoning_gym",),
            install='pip install "astuner-env[reasoning-gym]"',
            preload=("astuner_env.worlds.reasoning:warm",),
            memory_mb=120,
        ),
        "textarena": EnvironmentProvider(
            target="astuner_env.worlds.arena:TextArena",
            summary="TextArena's games, for one player or several",
            splits=("train", "validation", "test"),
            requires=("textarena",),
            install='pip install "astuner-env[textarena]"',
            preload=("astuner_env.worlds.arena:warm",),
            memory_mb=80,
        ),
    }


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "env": Provider(
            target="astuner_env.cli:app",
            summary="install, diagnose, serve and try environments",
        )
    }


@hookimpl
def register_task_readers() -> dict[str, Provider]:
    return {
        "env_service": Provider(
            target="astuner_env.readers:EnvServiceTaskReader",
            summary="the tasks of an environment in the environment service",
            config="astuner_env.readers:EnvironmentTasksConfig",
        ),
        "environment": Provider(
            target="astuner_env.readers:EnvironmentTaskReader",
            summary="the tasks of an environment that runs inside this process",
            config="astuner_env.readers:EnvironmentTasksConfig",
        ),
    }


@hookimpl
def register_judges() -> dict[str, Provider]:
    return {
        "env_service": Provider(
            target="astuner_env.readers:EnvServiceJudge",
            summary="the score that the task's environment gives",
        ),
    }


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "environments": Provider(
            target="astuner_env.part:Environments",
            summary="environments in the environment service, and classes for the older one",
        ),
    }
