"""Load models by name (hub, checkpoint or folder), serve them, and evaluate them."""
