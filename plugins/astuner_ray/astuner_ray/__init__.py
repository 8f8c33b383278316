"""What the backbones on Ray share: cluster, workers, native configuration, training."""
