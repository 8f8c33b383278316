"""The environment service: every instance of an environment is a process of its own, behind a small HTTP interface."""
