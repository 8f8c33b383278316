"""Shared parts of the backbones on Ray: cluster, workers, engine configuration and training."""
