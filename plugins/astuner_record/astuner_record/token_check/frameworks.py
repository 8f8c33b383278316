"""Which agent frameworks a workflow uses, and their versions: what is imported when it has run."""

from __future__ import annotations

import sys
from importlib import metadata

FRAMEWORKS = {
    "agentscope": "agentscope",
    "agents": "openai-agents",
    "langgraph": "langgraph",
    "langchain": "langchain",
    "pydantic_ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
    "crewai": "crewai",
    "autogen_agentchat": "autogen-agentchat",
    "llama_index": "llama-index-core",
    "google.adk": "google-adk",
    "camel": "camel-ai",
    "litellm": "litellm",
    "openai": "openai",
    "anthropic": "anthropic",
}
"""Module -> distribution. Frameworks first, then the clients that they use."""


def frameworks_in_use() -> list[str]:
    """``name version`` of those whose module is imported and whose distribution is installed."""
    found = []
    for module, distribution in FRAMEWORKS.items():
        if module in sys.modules:
            try:
                found.append(f"{distribution} {metadata.version(distribution)}")
            except metadata.PackageNotFoundError:  # some other module of that name, e.g. the user's own `agents`
                continue
    return found
