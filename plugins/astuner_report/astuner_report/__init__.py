"""What a run came to: report, comparison, and the sentinel that watches it."""
