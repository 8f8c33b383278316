"""The section ``astuner.services.logview``."""

from __future__ import annotations

from pydantic import Field

from astuner.contracts.section import Section

DEFAULT_PORT = 8181


class LogViewConfig(Section):
    """Settings of the service `logview`."""

    port: int | None = Field(None, ge=0, le=65535)
    """Port on this machine. null uses 8181 or the next free port, 0 any free port."""
    browser: bool = False
    """Open the run in the browser when it begins."""
