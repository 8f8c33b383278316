"""AgentJet's spellings of this section, in today's words: taken over where they mean the same, else refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def todays(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section with older spellings replaced.

    :raises ValueError: an older key that has no equal here; says what to write.
    """
    new = dict(data)
    if "base_url" in new:
        url = str(new.pop("base_url"))
        if "sources" in new:
            raise ValueError("base_url is the older name of sources, which is set too; keep one of them")
        if url.startswith(("http://", "https://")):
            raise ValueError("base_url names a server, and sources are files; collect with: astuner data collect DB")
        new["sources"] = url.removeprefix("sqlite:///")
    for name in ("sources", "feedback"):
        if isinstance(new.get(name), str):
            new[name] = [new[name]]
    if isinstance(new.get("filters"), list):
        new["filters"] = dict(_filter(each) for each in new["filters"] if _is_on(each))
    return new


def _is_on(spec: Any) -> bool:
    return not isinstance(spec, Mapping) or spec.get("enabled", True) is not False


def _filter(spec: Any) -> tuple[str, dict[str, Any]]:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    params = dict(spec.get("params") or {}) if isinstance(spec, Mapping) else {}
    if kind == "deduplication":
        return "near_duplicates", {name: params[name] for name in ("threshold",) if name in params}
    if kind == "llm_evaluate":
        raise ValueError(
            "the filter llm_evaluate needs a helper model here: write filters: {llm_evaluate: {helper_model: NAME, "
            "rubric: TEXT}} and a section astuner.helper_models.NAME"
        )
    raise ValueError(f"there is no filter {kind!r}; there are filters: {{length, near_duplicates, llm_evaluate}}")
