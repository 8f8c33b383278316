"""The model as AgentScope 1.x and 2.x want it."""
