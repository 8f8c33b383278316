"""The section ``astuner.services.logview``."""

from __future__ import annotations

from pydantic import Field

from astuner.contracts.section import Section

DEFAULT_PORT = 8181


class LogViewConfig(Section):
    port: int | None = Field(None, ge=0, le=65535)
    """Where the viewer listens on this machine; null takes 8181, or the next one that is free, 0 any free one."""
    browser: bool = False
    """Open the run in the browser when it begins."""
