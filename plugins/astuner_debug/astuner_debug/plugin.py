"""What this plugin offers, described without importing it."""

from __future__ import annotations

from astuner import Provider, hookimpl


@hookimpl
def register_commands() -> dict[str, Provider]:
    return {
        "chat": Provider(
            target="astuner_debug.chat_command:app",
            summary="talk to the model of an experiment",
        )
    }


@hookimpl
def register_parts() -> dict[str, Provider]:
    return {
        "debugger": Provider(
            target="astuner_debug.breakpoints:Breakpoints",
            summary='stops at bp("TAG") in an agent\'s code',
        )
    }
