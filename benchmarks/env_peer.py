"""Install the EnvService of agentscope-runtime with AppWorld in a separate environment, for `env_load`.

``python -m benchmarks.env_peer`` creates the environment (no torch; about 0.7 GB). Without it, the peer is skipped.

The wheel contains the server's files, but not what they need outside its container image. This module assembles the
rest: the packages that the server imports, AppWorld and Ray at versions that still work together (a newer Ray rejects
AppWorld's pydantic 1), and the server's folder without the two client modules, which import the rest of
agentscope-runtime.  The server and its AppWorld environment are unchanged.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers import Peer

COMMAND = ".venv/bin/python -m benchmarks.env_peer"
"""Command that creates the environment."""
APPWORLD = "appworld==0.1.3.post1"
_BESIDE = ("ray==2.40.0", APPWORLD, "jinja2>=3.1,<4")
_CLIENT_SIDE = ("__init__.py", "training_box.py")
_COUNTER = Path(__file__).with_name("env_counter_older.py")


@dataclass(frozen=True)
class EnvServicePeer(Peer):
    """Peer that has to be assembled from several packages."""

    @property
    def box(self) -> Path:
        """Return the folder that the service starts in."""
        return self.folder / "service"

    @property
    def cache(self) -> Path:
        """Return the folder that AppWorld unpacks into, outside its package."""
        return self.folder / "appworld-cache"

    def install(self) -> None:
        """Create the environment.

        :raises RuntimeError: AppWorld and Ray 2.40 do not both support this Python.
        :raises subprocess.CalledProcessError: pip failed.
        """
        if not (3, 11) <= sys.version_info < (3, 13):
            raise RuntimeError(
                "AppWorld and Ray 2.40 together need Python 3.11 or 3.12; the benchmark runs without them"
            )
        subprocess.run([sys.executable, "-m", "venv", str(self.folder)], check=True)
        python = str(self.folder / "bin" / "python")
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *_BESIDE], check=True)
        subprocess.run([*pip, "--no-deps", self.requirement], check=True)
        unpack = [str(self.folder / "bin" / "appworld"), "install"]
        subprocess.run(unpack, check=True, env={**os.environ, "APPWORLD_CACHE": str(self.cache)})
        (files,) = self.folder.glob("lib/python*/site-packages/agentscope_runtime/sandbox/box/training_box")
        shutil.copytree(
            files, self.box / "training_box", ignore=shutil.ignore_patterns(*_CLIENT_SIDE), dirs_exist_ok=True
        )
        (self.folder / ".done").touch()

    def with_counter(self, folder: Path) -> Path:
        """Copy the service into ``folder``, add the benchmark's counter environment, and return the copy."""
        copy = folder / "service"
        shutil.copytree(self.box, copy)
        counter = copy / "training_box" / "environments" / "counter"
        counter.mkdir()
        shutil.copy(_COUNTER, counter / "counter_env.py")
        return copy


ENV_SERVICE = EnvServicePeer("envservice", "agentscope-runtime==1.1.6.post2")


def main() -> None:
    if ENV_SERVICE.python is None:
        print(f"installing {ENV_SERVICE.requirement}, {', '.join(_BESIDE)} into {ENV_SERVICE.folder.name}", flush=True)
        try:
            ENV_SERVICE.install()
        except RuntimeError as e:
            sys.exit(str(e))


if __name__ == "__main__":
    main()
