"""Data types of a run and the interfaces that plugins implement. All of it is public; see `docs/plugins.md`."""
