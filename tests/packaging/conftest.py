"""Wheels, built once, and a fresh virtual environment to install them into."""

import email
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parents[2]
collect_ignore = ["downstream"]  # tests of strangers, run where their wheels are installed


class Environment:
    """A virtual environment that a test installs into and runs commands in."""

    def __init__(self, folder, *, see=()):
        """Make it, without pip: the one that runs the tests installs into it.

        :param see: folders whose packages it also sees, without installing them.
        """
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        (self.site / "seen.pth").write_text("".join(f"{path}\n" for path in see))

    def install(self, *what):
        run(sys.executable, "-m", "pip", "--python", self.python, "install", "-q", "--no-compile", *what)

    def astuner(self, *arguments, code=0, stdin=None):
        """Run the command; gives stdout. Its start is the script that the wheel installed."""
        return run(self.folder / "bin" / "astuner", *arguments, code=code, stdin=stdin)

    def run(self, *arguments, cwd=None):
        return run(self.python, *arguments, cwd=cwd)


def run(*command, code=0, cwd=None, stdin=None):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "ASTUNER", "VIRTUAL_ENV"))}
    shown = subprocess.run(
        [str(c) for c in command], capture_output=True, text=True, check=False, env=environment, cwd=cwd, input=stdin
    )
    assert shown.returncode == code, f"{' '.join(map(str, command))}\n{shown.stdout}\n{shown.stderr}"
    return shown.stdout if code == 0 else shown.stderr + shown.stdout


def build_wheel(project, folder):
    """Build one wheel, and an sdist beside it, with the backend that is installed here: nothing is downloaded."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=project)
    return max(folder.glob("*.whl"), key=lambda p: p.stat().st_mtime_ns)


def pyproject(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())


def metadata(wheel):
    """What the wheel says of itself."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def with_ours(wheels, *names):
    """The wheels of these packages, of the core, and of all packages of ours that they name."""
    wanted, queue = {}, ["astuner-core", *names]
    while queue:
        if (name := queue.pop()) not in wanted:
            wanted[name] = wheels[name]
            for line in metadata(wheels[name]).get_all("Requires-Dist", ()):
                needed = Requirement(line)
                if needed.name in wheels and (not needed.marker or needed.marker.evaluate({"extra": ""})):
                    queue.append(needed.name)
    return list(wanted.values())


def third_parties_here():
    """All that is installed here and is not ours, neither as a package nor as a place to look for some."""
    folder = Path(sysconfig.get_path("purelib"))
    return [p for p in folder.iterdir() if "astuner" not in p.name and p.suffix != ".pth" and p.name != "__pycache__"]


def build_wheels(folder):
    """Distribution name -> wheel, of the core, every plugin of ours, and the example of a third party."""
    example = ROOT / "examples" / "plugins" / "astuner-acme"
    projects = [ROOT, *sorted((ROOT / "plugins").iterdir()), *(ROOT / "plugins").glob("*/cpu"), example]
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(lambda project: build_wheel(project, Path(mkdtemp(dir=folder))), projects))
    return {wheel.name.partition("-")[0].replace("_", "-"): wheel for wheel in built}


@pytest.fixture(scope="session")
def third_parties(tmp_path_factory):
    """A folder of what others publish: an environment that sees it downloads nothing."""
    folder = tmp_path_factory.mktemp("third_parties")
    for path in third_parties_here():
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    return build_wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def fresh(tmp_path_factory, wheels):
    """A fresh environment with the core, the backbone that experiments are tried with, what both depend on, and the
    third party's judge; nothing else."""
    environment = Environment(tmp_path_factory.mktemp("fresh") / "venv")
    environment.install(*with_ours(wheels, "astuner-debug", "astuner-acme"))
    return environment
