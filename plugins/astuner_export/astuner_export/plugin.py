"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "export": Provider(
            target="astuner_export.export_command:app",
            summary="copy a trained model to a folder that anybody loads",
        )
    }
