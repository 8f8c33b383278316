"""Record a run token by token: the episode log, replay, and the token check."""
