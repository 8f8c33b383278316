"""Models by name: from the hub, a checkpoint or a folder; loaded they answer, and are measured."""
