"""Create tasks from documents, from a few samples, and from conversations with users."""
