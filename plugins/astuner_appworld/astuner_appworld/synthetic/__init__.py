"""Build a data root with invented people, for tests and for trials without AppWorld's data."""
