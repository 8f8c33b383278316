"""Checks of model output, by name; see `astuner_checks.named`."""
