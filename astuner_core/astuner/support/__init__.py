"""General-purpose helpers shared by all packages."""
