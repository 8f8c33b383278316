"""Conversion between messages and tokens.

`codec.ChatCodec` converts an OpenAI-style request to token IDs, and token IDs to an assistant message. Text written by
the model is never tokenized again: its recorded IDs become part of the next prompt.
"""
