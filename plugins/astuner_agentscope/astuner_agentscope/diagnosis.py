"""Check AgentScope for ``astuner doctor``, without importing it."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.contracts.diagnosis import Finding, fail, ok, unmet, version, warn

REASONS = {
    "agentscope": "ASTuner is not tested with this version",
    "mcp": "mcp 2.3 removed what agentscope 1.x imports first",
    "openai": "openai 3 breaks streamed answers of agentscope 1.x",
    "sqlalchemy": "sqlalchemy 2.1 does not install greenlet, which agentscope 1.x imports",
    "tqdm": "agentscope 1.x imports tqdm but does not declare it",
}
"""Reasons for the version bounds of the package."""


def findings() -> Iterator[Finding]:
    """Yield findings about the installed AgentScope version and its packages."""
    if (installed := version("agentscope")) is None:
        detail = "not installed; AgentScope workflows cannot run"
        yield warn(what="agentscope", detail=detail, fix="pip install astuner-agentscope")
        return
    extra = {"1": "agentscope1", "2": "agentscope2"}.get(installed.partition(".")[0], "")
    problems = dict(unmet("astuner-agentscope", extra))
    if not problems:
        yield ok(what="agentscope", detail=installed)
    for requirement, state in problems.items():
        reason = next((REASONS[name] for name in REASONS if requirement.startswith(name)), "agentscope needs it")
        yield fail(what="agentscope", detail=f"{requirement}: {state}; {reason}", fix=f"pip install '{requirement}'")
