"""Episodes: running, recording, grouping and judging them, and converting them to training samples."""
