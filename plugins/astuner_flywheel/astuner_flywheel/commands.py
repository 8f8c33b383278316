"""``astuner data``: tasks from documents, from a few samples, and from what users did.

Invariant: help and listing import neither a server nor a parser of documents.
"""

from __future__ import annotations

import typer

from astuner_flywheel.collect_command import collect
from astuner_flywheel.generate_command import generate
from astuner_flywheel.import_command import import_

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    no_args_is_help=True,
    help="Make tasks of documents, of a few samples, and of what users did.",
)
app.command("generate")(generate)
app.command("collect")(collect)
app.command("import")(import_)
