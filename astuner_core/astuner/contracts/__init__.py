"""What flows through a run, and what plugins implement. Everything here is public; see `docs/plugins.md`."""
