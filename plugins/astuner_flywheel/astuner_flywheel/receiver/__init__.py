"""The collector: takes OTLP spans and users' feedback over HTTP, and keeps both in one SQLite file."""
