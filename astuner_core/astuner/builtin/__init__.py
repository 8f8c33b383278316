"""Providers built into the core. They are registered through the same hooks as plugins and never imported by name."""
