"""Write the table of clients in `docs/frameworks.md` from the manifests and the results of the runs."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.clients.harness import FOUND, Client, clients
from tests.frameworks.harness import ROOT

PAGE = ROOT / "docs" / "frameworks.md"
PART = re.compile(r"(<!-- table of clients -->\n).*?(<!-- end of table -->)", re.DOTALL)
HEAD = ("client", "versions", "turns that continue exactly", "notes")


def _row(client: Client, found: dict[str, Any] | None) -> str:
    exact, breaks, cure = "not tested", "", client.cure and f"Fix: {client.cure}"
    if found is not None and "turns" in found:
        exact = f"{found['exact']} of {found['later']}"
        breaks = "; ".join(f"`{reason}`: {why}" for reason, why in client.branches.items())
    elif found is not None:
        exact = f"does not run: {found.get('failed') or found['not_run']}"
    notes = ". ".join(part.rstrip(".") for part in (breaks, client.notes, cure) if part)
    title = client.title if client.language == "Python" else f"{client.title} ({client.language})"
    cells = [title, client.version, exact, notes]
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def table() -> str:
    """Return the table as Markdown."""
    found = json.loads(FOUND.read_text(encoding="utf-8"))
    order = sorted(
        clients().values(), key=lambda client: (client.language != "Python", client.language, client.title.lower())
    )
    head = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    return "\n".join([*head, *(_row(client, found.get(client.name)) for client in order)])


def rewritten(page: str) -> str:
    """Return the page with the current table."""
    return PART.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", page)


def write() -> None:
    """Write the table to the page."""
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
