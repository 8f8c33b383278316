"""Small things that every room needs and none is about."""
