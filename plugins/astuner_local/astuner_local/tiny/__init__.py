"""The tiny chat model that ships with the local backbone, and the script that creates it.

The model (0.13 million weights) writes well-formed tool calls from its first step but selects the arithmetic operation
at random, so an agent built on it starts with about one correct answer in six, and reinforcement learning improves it
within a minute on a CPU.  ``python -m astuner_local.tiny.make`` creates it again.
"""
