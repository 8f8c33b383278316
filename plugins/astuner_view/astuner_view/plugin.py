"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "view": Provider(
            target="astuner_view.cli:app",
            summary="show runs, episodes and tokens in the browser",
        )
    }


@hookimpl
def register_services() -> dict[str, Provider]:
    return {
        "logview": Provider(
            target="astuner_view.service:LogView",
            summary="the viewer, for as long as the run lasts",
            config="astuner_view.settings:LogViewConfig",
        )
    }
