"""The ways in which model families beside ChatML write turns, reasoning and tool calls."""
