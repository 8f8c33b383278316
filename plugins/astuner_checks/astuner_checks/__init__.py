"""Checks on what the model wrote, by name; see `astuner_checks.named`."""
