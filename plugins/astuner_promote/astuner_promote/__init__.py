"""Promotion gate: measure a candidate (`gate`), keep promoted models (`keeping`), and write model cards (`card`)."""
