"""Base classes of the sections of an experiment file."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from astuner.contracts import installed as installed  # before the first model is made


class Section(BaseModel):
    """A group of keys. Unknown keys are errors; the docstring under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)

    no_groups: ClassVar[str] = ""
    """For a workflow's section: why the episodes of a group cannot be compared, e.g. ``every episode plays a different
    game``. Training then rejects groups of several episodes. Empty: they can be compared."""


class OpenSection(Section):
    """A section with additional subsections of plugins, which the plugins' schemas check."""

    model_config = ConfigDict(extra="allow")
