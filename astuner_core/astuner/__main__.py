"""``python -m astuner`` is the ``astuner`` command."""

from astuner.cli import main

if __name__ == "__main__":
    main()
