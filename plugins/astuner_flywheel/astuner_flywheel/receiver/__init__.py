"""The collector: receives OTLP spans and user feedback over HTTP, and stores both in a SQLite file."""
