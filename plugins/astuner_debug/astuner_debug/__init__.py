"""One episode, looked at by hand: breakpoints by tag, ``astuner chat``."""
