"""Create, call, count and end instances, one process each; independent of HTTP."""
