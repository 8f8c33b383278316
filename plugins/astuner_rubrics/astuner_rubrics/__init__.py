"""Judges that use a model: with plain criteria, with rubrics, or by comparing attempts; and measures of judges."""
