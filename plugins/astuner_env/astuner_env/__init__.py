"""Serve environments over HTTP, with one process per instance."""
