"""Runs unmodified VERL without a GPU: a platform, an FSDP2 engine and a rollout server on transformers.

For tests and for stepping through VERL; not for training anything but small models.  It does nothing unless
``VERL_PLATFORM=cpu``.  VERL finds `plugin` and ASTuner finds `settings` by entry points; nobody imports this package
by name.
"""
