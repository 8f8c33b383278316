"""Judges that ask a model: plainly, by rubrics, or by comparing attempts; and how good a judge is."""
