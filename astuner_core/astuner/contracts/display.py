"""Objects that notebooks show as HTML. The package astuner-report renders them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from astuner.contracts.events import Progressed


class Displayed:
    """Base class of objects with an HTML representation in notebooks (`astuner_report.notebook.to_html`)."""

    def _repr_html_(self) -> str | None:
        """Return the HTML, or None if astuner-report is not installed; IPython then shows the ``repr``."""
        try:
            from astuner import to_html
        except ImportError:
            return None
        return to_html(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class RunView(Displayed):
    """State of a run, for display: heading, bar, curve and tables. Empty fields are not shown."""

    name: str = ""
    status: str = ""
    """The verdict, the error, or ``running``."""
    progress: Progressed | None = None
    """The latest progress, for the bar."""
    rows: Sequence[Mapping[str, Any]] = ()
    """Rows of ``metrics.jsonl``, for the curve."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Label -> text."""

    def __repr__(self) -> str:
        heading = ": ".join(filter(None, (self.name, self.status))) or "reward curve"
        at = self.progress
        counts = f" {at.done}/{at.total}" if at and at.total else ""
        return heading + (f", step {at.step}/{at.total_steps}, {at.what}{counts}" if at else "")
