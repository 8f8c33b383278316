"""Tasks where there are few or none: from documents, from a few samples, and from what users did."""
