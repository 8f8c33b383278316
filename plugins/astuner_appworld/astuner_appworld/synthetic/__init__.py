"""A data root of invented people, for tests and for trying things out without AppWorld's own data."""
