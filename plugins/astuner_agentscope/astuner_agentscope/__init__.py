"""The model in training as AgentScope 1.x and 2.x use one, and an agent of whichever is installed."""

from astuner_agentscope.tool_agent import ToolAgent, make_tool_agent

__all__ = ["ToolAgent", "make_tool_agent"]
