"""The gate before a model is used: what is measured (`gate`), what is kept of it (`keeping`), what is said (`card`)."""
