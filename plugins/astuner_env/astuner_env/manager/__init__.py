"""Instances, each a process of its own: made, asked, counted, ended. Knows nothing of HTTP."""
