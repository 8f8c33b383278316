"""The ``trinity:`` section of an experiment file: Trinity's own keys, spelled as Trinity spells them.

What the keys mean is Trinity's business: whether it has them, and which of them ASTuner must set itself,
`astuner_trinity.native` knows.
"""

from __future__ import annotations

from astuner_ray.native.keys import EngineSection


class TrinitySettings(EngineSection):
    """Trinity's own keys, nested or dotted; they win over what ASTuner would have told Trinity."""
