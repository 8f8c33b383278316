"""The ``verl:`` section of an experiment file: VERL's own keys, spelled as VERL spells them.

What the keys mean is VERL's business: whether it has them, and which of them ASTuner must set itself,
`astuner_verl.native` knows.
"""

from __future__ import annotations

from astuner_ray.native.keys import EngineSection


class VerlSettings(EngineSection):
    """VERL's own keys, nested or dotted; they win over what ASTuner would have told VERL."""
