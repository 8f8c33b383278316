"""One episode and many: recording, running, grouping, judging, and turning what happened into training samples."""
