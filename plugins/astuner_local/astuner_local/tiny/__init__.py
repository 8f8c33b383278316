"""The tiny chat model that ships with the embedded backbone, and the script that makes it.

The model (0.13 million weights) writes well-formed tool calls from its first step but picks the arithmetic
operation at random, so an agent built on it starts at about one right answer in six, and reinforcement learning
has something real to teach within a minute on a CPU.  ``python -m astuner_local.tiny.make`` makes it again.
"""
