"""What happened in a run, token by token: the episode log, replay, and the check of tokens."""
