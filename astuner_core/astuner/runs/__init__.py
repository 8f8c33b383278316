"""Runs: from an experiment file to a finished run folder."""
