"""Tasks from Hugging Face data sets."""
