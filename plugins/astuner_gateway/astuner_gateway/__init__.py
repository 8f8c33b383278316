"""Serve models over HTTP: the episode endpoint, `astuner serve`, user feedback and the `program` workflow."""
