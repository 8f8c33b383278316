"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import EnvironmentProvider, Provider, hookimpl


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
            step_timeout=120,
            evaluate_timeout=120,
            memory_mb=200,
        )
    }
