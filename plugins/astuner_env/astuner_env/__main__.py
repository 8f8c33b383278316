"""Run ``astuner env`` as ``python -m astuner_env``; ``astuner run --with NAME`` starts the service this way."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from astuner.contracts.errors import AstunerError
from astuner_env.cli import app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and raise `SystemExit` with 0, 1 (the command failed) or 2 (unknown command or option)."""
    try:
        app(arguments, prog_name="python -m astuner_env")
    except AstunerError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
