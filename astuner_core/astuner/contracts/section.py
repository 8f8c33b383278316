"""What every section of an experiment file is made of."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from astuner.contracts import installed as installed  # before the first model is made


class Section(BaseModel):
    """A group of keys. Unknown keys are errors; the sentence under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)

    no_groups: ClassVar[str] = ""
    """Of a workflow's section: why its episodes are no attempts at one task, e.g. ``with it every episode is a game of
    its own``; training then refuses groups of several. Empty: they are."""


class OpenSection(Section):
    """A section that also holds one sub-section per plugin, checked by that plugin's own schema."""

    model_config = ConfigDict(extra="allow")
