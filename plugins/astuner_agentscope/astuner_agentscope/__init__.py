"""Provide the model in training as a model of AgentScope 1.x and 2.x, and an agent of the installed version."""

from astuner_agentscope.tool_agent import ToolAgent, make_tool_agent

__all__ = ["ToolAgent", "make_tool_agent"]
