"""Run Trinity-RFT 0.6.0 without a GPU: a rollout engine and the hooks that install it.

For tests, debugging Trinity and small models.  Inactive unless ``TRINITY_PLATFORM=cpu``: ASTuner finds `settings`
through its entry point, and no module imports this package by name.
"""
