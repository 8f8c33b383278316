"""What ``astuner doctor`` says about AgentScope; imports nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

from astuner.contracts.diagnosis import Finding, unmet

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
    try:
        version = metadata.version("agentscope")
    except metadata.PackageNotFoundError:
        yield Finding(
            level="warn",
            what="agentscope",
            detail="not installed; AgentScope workflows will not run",
            fix="pip install 'astuner-agentscope[agentscope1]'",
        )
        return
    problems = list(unmet("astuner-agentscope", "agentscope2" if version.startswith("2.") else "agentscope1"))
    if not problems:
        yield Finding(level="ok", what="agentscope", detail=version)
    for requirement, have in problems:
        name = next((n for n in BREAKS if requirement.startswith(n)), "")
        why = BREAKS.get(name, "agentscope needs it")
        yield Finding(
            level="fail", what="agentscope", detail=f"{requirement}: {have}; {why}", fix=f"pip install '{requirement}'"
        )
