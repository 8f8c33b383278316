"""The trainer of the embedded backbone: samples in, better weights out, and checkpoints that survive anything."""
