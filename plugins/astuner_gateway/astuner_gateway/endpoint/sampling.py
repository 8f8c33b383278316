"""Select whether the sampling parameters of the run or of a request apply (``astuner.endpoint.sampling``).

Only parameters that change how tokens are drawn are overruled. Parameters on which an agent relies when it reads the
answer (``logit_bias``, a schema, ``stop``) are honored or rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner.contracts.types import DEFAULT_ROLE, Split
from astuner_gateway.endpoint import fields
from astuner_gateway.endpoint.access import Pass

_FACTOR = fields.number(-(2**31), 2**31)
_READERS: dict[str, fields.Reader] = {
    "temperature": fields.number(0, 100),
    "top_p": fields.number(0, 1),
    "seed": fields.number(-(2**63), 2**63 - 1, whole=True),
    "top_k": fields.number(-(2**31), 2**31, whole=True),
    **dict.fromkeys(("min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"), _FACTOR),
}
_OFF = {name: field.harmless for name, field in fields.not_honoured("openai").items()}
_MANNERS = {
    f"{part}.{name}".lstrip("."): (part, name, fields.not_honoured(table)[name].harmless)
    for table, part, names in (
        ("openai_chat", "", "reasoning_effort verbosity"),
        ("openai_responses.reasoning", "reasoning", "effort"),
        ("openai_responses.text", "text", "verbosity"),
        ("anthropic_messages.output_config", "output_config", "effort"),
    )
    for name in names.split()
}
"""Reasoning effort and verbosity, which some clients always send: path -> object, field, values without effect."""


def runs_own(holder: Pass) -> Mapping[str, Any] | None:
    """Return the run's sampling for an agent that trains; None for any other agent, which may choose its own."""
    settings = holder.tuner.config.astuner
    names = (holder.role,) if holder.role else (holder.agent_name, DEFAULT_ROLE)
    entry = next((settings.agents[name] for name in names if name in settings.agents), None)
    if entry is not None and (entry.model == "external" or not entry.train):
        return None
    is_training = holder.tuner.workflow_task.split is Split.TRAIN
    how = settings.rollout if is_training else settings.rollout.val_kwargs
    return {"temperature": how.temperature, "top_p": how.top_p, "top_k": how.top_k}


def overrule(body: dict[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Remove the sampling parameters of a request from its body.

    :returns: Names of the parameters that differ from the run's.
    :raises ApiError: 400, a value is not valid for its field.
    """
    given = {name: read(body.pop(name), name) for name, read in _READERS.items() if body.get(name) is not None}
    overruled = [name for name, value in given.items() if value not in (own.get(name), *_OFF.get(name, ()))]
    for path, (part, name, harmless) in _MANNERS.items():
        asked = body.get(part) if part else body
        if isinstance(asked, dict) and isinstance(asked.get(name), str) and asked[name] not in harmless:
            del asked[name]
            overruled.append(path)
    return overruled
