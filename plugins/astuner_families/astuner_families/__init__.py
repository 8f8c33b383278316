"""Formats of turns, reasoning and tool calls of model families other than ChatML."""
