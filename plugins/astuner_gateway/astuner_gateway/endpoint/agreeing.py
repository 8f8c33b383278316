"""Accept request fields that match what the model does anyway, which depends on the run.

A field matches if the answer is drawn from the same distribution with and without it: the prompt is the same, or the
reply cannot contain what the field forbids. Fields with any other value stay in the body, and the dialect rejects them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

_PARALLEL = "parallel_tool_calls"
_FIELDS = frozenset(["top_k", "chat_template_kwargs", "enable_thinking", "reasoning", "reasoning_effort"])
_FIELDS |= {"output_config", "tool_choice", "thinking", _PARALLEL}
"""Fields that `agree` checks; most requests have none of them."""


class Template(Protocol):
    """Part of `astuner.chat.template.ChatTemplate` that `agree` needs."""

    @property
    def calls(self) -> Any:
        """Format in which tool calls are written."""
        ...

    def mentions(self, variable: str) -> bool: ...

    def renders_alike(self, variables: Mapping[str, Any]) -> bool: ...


def agree(body: dict[str, Any], template: Template | None, sampling: Any) -> list[str]:
    """Remove the fields from a body that match what the model does anyway.

    :param body: Body in any dialect; changed in place.
    :param template: Chat template that writes the prompts; None if another program writes them.
    :param sampling: `astuner.contracts.types.SamplingParams` in use, or None.
    :returns: Names of the removed fields.
    """
    if _FIELDS.isdisjoint(body):
        return []
    agreed = []
    if body.get("top_k") is not None and _is_same(body["top_k"], getattr(sampling, "top_k", None)):
        agreed.append("top_k")
    if template is not None:
        agreed += [
            name for name in ("chat_template_kwargs", "enable_thinking") if _writes_the_same(body, name, template)
        ]
        if body.get(_PARALLEL) is False and _has_one_call(body, template):
            agreed.append(_PARALLEL)
        agreed += _inside(body, template)
    for name in agreed:
        body.pop(name, None)
    return agreed


def _inside(body: dict[str, Any], template: Template) -> list[str]:
    """Remove matching fields inside nested objects, which are copied first; return their paths."""
    agreed = []
    for part, name in (("reasoning", "effort"), ("output_config", "effort"), ("", "reasoning_effort")):
        holder = body.get(part) if part else body
        if isinstance(holder, dict) and _has_effort(holder.get(name), template):
            agreed.append(_without(body, part, name))
    choice, thinking = body.get("tool_choice"), body.get("thinking")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True and _has_one_call(body, template):
        agreed.append(_without(body, "tool_choice", "disable_parallel_tool_use"))
    if isinstance(thinking, dict) and thinking.get("type") == "enabled" and _thinks(template):
        agreed.append(_without(body, "thinking", "type"))
    return agreed


def _without(body: dict[str, Any], part: str, name: str) -> str:
    if not part:
        return name
    body[part] = {key: value for key, value in body[part].items() if key != name}
    return f"{part}.{name}"


def _writes_the_same(body: Mapping[str, Any], name: str, template: Template) -> bool:
    value = body.get(name)
    if name == "enable_thinking":
        return isinstance(value, bool) and template.renders_alike({name: value})
    return isinstance(value, dict) and template.renders_alike(value)


def _has_effort(value: Any, template: Template) -> bool:
    variable = "reasoning_effort"
    return isinstance(value, str) and template.mentions(variable) and template.renders_alike({variable: value})


def _thinks(template: Template) -> bool:
    return template.mentions("enable_thinking") and template.renders_alike({"enable_thinking": True})


def _has_one_call(body: Mapping[str, Any], template: Template) -> bool:
    """Return whether a reply can contain one tool call at most: no tools, no choice, or a format for one call."""
    choice = body.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return not body.get("tools") or kind == "none" or bool(template.calls.one_call)


def _is_same(value: Any, other: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and value == other
