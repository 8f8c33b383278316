"""``astuner env``: install, diagnose, serve and try environments.

Invariant: listing and help import no environment and no server.
"""

from __future__ import annotations

import typer

from astuner_env.cli import manage, running

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    help="Install, diagnose, serve and try environments.",
)
app.command("list")(manage.list_environments)
app.command("setup")(manage.setup)
app.command("doctor")(manage.doctor)
app.command("serve")(running.serve)
app.command("try")(running.try_)
