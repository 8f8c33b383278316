"""Trainer of the local backbone: updates weights from samples and writes crash-safe checkpoints."""
