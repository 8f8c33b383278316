"""Run unmodified VERL without a GPU: a platform, an FSDP2 engine and a rollout server on transformers.

For tests, debugging VERL and small models.  Inactive unless ``VERL_PLATFORM=cpu``.  VERL finds `plugin` and ASTuner
finds `settings` through entry points; no module imports this package by name.
"""
