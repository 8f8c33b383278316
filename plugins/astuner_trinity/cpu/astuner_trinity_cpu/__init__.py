"""Runs Trinity-RFT 0.6.0 without a GPU: a rollout engine, and the hooks that put it in place.

For tests and for stepping through Trinity; not for training anything but small models.  It does nothing unless
``TRINITY_PLATFORM=cpu``: ASTuner finds `settings` by its entry point, and nobody imports this package by name.
"""
