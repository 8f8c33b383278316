"""What ``astuner doctor`` says about AgentScope; imports nothing of it."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.contracts.diagnosis import Finding, fail, ok, unmet, version, warn

BREAKS = {
    "agentscope": "ASTuner is not tested with this one",
    "mcp": "mcp 2.3 removed what agentscope 1.x imports first",
    "openai": "openai 3 makes every streamed answer of agentscope 1.x raise",
    "sqlalchemy": "sqlalchemy 2.1 no longer brings greenlet, without which agentscope 1.x does not import",
    "tqdm": "agentscope 1.x imports tqdm but does not declare it",
}
"""Why the bounds of the extras `agentscope1` and `agentscope2` exist."""


def findings() -> Iterator[Finding]:
    """Whether AgentScope is here, and everything that it needs."""
    if (have := version("agentscope")) is None:
        detail = "not installed; AgentScope workflows will not run"
        yield warn(what="agentscope", detail=detail, fix="pip install 'astuner-agentscope[agentscope1]'")
        return
    problems = list(unmet("astuner-agentscope", "agentscope2" if have.startswith("2.") else "agentscope1"))
    if not problems:
        yield ok(what="agentscope", detail=have)
    for requirement, there in problems:
        why = next((BREAKS[name] for name in BREAKS if requirement.startswith(name)), "agentscope needs it")
        yield fail(what="agentscope", detail=f"{requirement}: {there}; {why}", fix=f"pip install '{requirement}'")
