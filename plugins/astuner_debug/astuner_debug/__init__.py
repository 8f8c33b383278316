"""Looked at by hand: an experiment's keys (``astuner config explain``), an episode (debug backbone, breakpoints,
``astuner chat``) or a machine (``astuner doctor``)."""
