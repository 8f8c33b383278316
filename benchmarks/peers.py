"""Install servers of other projects in separate environments, because their requirements conflict with ASTuner's.

``python -m benchmarks.peers`` creates them and `env_peer`'s environment (no torch; about 2.2 GB). Rows of a missing
environment are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COMMAND = ".venv/bin/python -m benchmarks.peers"
"""Command that creates the environments."""


@dataclass(frozen=True)
class Peer:
    """Project whose server is measured."""

    name: str
    requirement: str

    @property
    def folder(self) -> Path:
        return REPOSITORY / f".venv-bench-{self.name}"

    @property
    def python(self) -> Path | None:
        """Return the interpreter of its environment, if it exists."""
        python = self.folder / "bin" / "python"
        return python if (self.folder / ".done").exists() else None

    def install(self) -> None:
        """Create the environment.

        :raises subprocess.CalledProcessError: pip failed.
        """
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        pip = [str(self.folder / "bin" / "python"), "-m", "pip", "install", "--quiet", self.requirement]
        subprocess.run(pip, check=True)
        (self.folder / ".done").touch()


VERIFIERS = Peer("verifiers", "verifiers==0.4.0")
LIGHTNING = Peer("agentlightning", "agentlightning==0.3.0")


def main() -> None:
    from benchmarks import env_peer  # which builds on this module

    for peer in (VERIFIERS, LIGHTNING):
        if peer.python is None:
            print(f"installing {peer.requirement} into {peer.folder.name}", flush=True)
            peer.install()
    env_peer.main()


if __name__ == "__main__":
    main()
