"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import EnvironmentProvider, Provider, hookimpl


@hookimpl
def register_workflows() -> dict[str, Provider]:
    return {
        "appworld": Provider(
            target="astuner_appworld.workflow:AppWorldWorkflow",
            summary="an AgentScope ReAct agent that talks with its task's environment, as AppWorld's does",
            requires=("agentscope",),
            install='pip install "astuner-appworld[agent]"',
        )
    }


@hookimpl
def register_task_readers() -> dict[str, Provider]:
    return {
        "appworld": Provider(
            target="astuner_appworld.reader:AppWorldTaskReader",
            summary="the tasks of AppWorld's splits",
            config="astuner_appworld.reader:AppWorldTasksConfig",
        )
    }


@hookimpl
def register_judges() -> dict[str, Provider]:
    return {
        "appworld": Provider(
            target="astuner_appworld.judge:AppWorldJudge",
            summary="AppWorld's own tests of the task: success, share of tests, or adjusted for doing nothing",
            config="astuner_appworld.judge:AppWorldJudgeConfig",
        )
    }


@hookimpl
def register_environments() -> dict[str, Provider]:
    return {
        "appworld": EnvironmentProvider(
            target="astuner_appworld.world.environment:AppWorldEnvironment",
            summary="AppWorld: nine everyday apps, used by writing Python",
            splits=("train", "dev", "test_normal", "test_challenge"),
            requires=("appworld",),
            install="astuner env setup appworld",
            python=">=3.11,<3.14",
            packages=("appworld==0.1.3.post1",),
            lent=("astuner_appworld",),
            preload=("astuner_appworld.world.environment:warm",),
            setup="astuner_appworld.setup:AppWorldSetup",
            create_timeout=120,
            step_timeout=240,  # `Limits.longest_step` must stay below it
            evaluate_timeout=120,
            memory_mb=200,
        )
    }
