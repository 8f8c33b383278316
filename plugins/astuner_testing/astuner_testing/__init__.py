"""What an author of plugins uses: the checks and fakes of `astuner.testing`, and ``astuner new``."""
