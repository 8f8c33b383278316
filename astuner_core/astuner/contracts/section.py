"""What every section of an experiment file is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A group of keys. Unknown keys are errors; the sentence under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True, allow_inf_nan=False)


class OpenSection(Section):
    """A section that also holds one sub-section per plugin, checked by that plugin's own schema."""

    model_config = ConfigDict(extra="allow")
