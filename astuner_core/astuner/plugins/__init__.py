"""Finding what an experiment names: plugins, what they register, and the user's own code."""
