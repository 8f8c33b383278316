"""`make dist`: all distributions, built, looked at, installed each alone, and used without a checkout.

What is printed last is the time that it took; docs/releasing.md says when it last ran, and where.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from packaging.specifiers import SpecifierSet

from tests.packaging.conftest import ROOT, Environment, build_wheel, metadata, pyproject, run, tomllib, with_ours
from tests.packaging.metadata import EXAMPLE, OURS

BIN = Path(sys.executable).parent
DIST = ROOT / "dist"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""Those that the classifiers name."""
PLUGINS = {
    said["name"] for p in (*OURS, EXAMPLE) if "astuner" in (said := pyproject(p)["project"]).get("entry-points", {})
}
"""Those that `astuner plugins` lists."""
AT_ONCE = 2
BRINGS = ("astuner", "astuner-trinity", "astuner-verl")
LARGE = 50_000_000


class Fresh(Environment):
    """A fresh environment of any Python, filled by uv, with all that a package names but torch.

    Which build of torch is right, the machine says; nothing that is tried here needs one.
    """

    def __init__(self, folder: Path, python: str) -> None:
        run(BIN / "uv", "venv", "--quiet", "--python", python, folder)
        self.folder, self.python = folder, folder / "bin" / "python"
        self.without = folder / "without.txt"
        self.without.write_text("torch; python_version < '3'\n")

    def install(self, *what) -> None:
        run(BIN / "uv", "pip", "install", "--quiet", "--python", self.python, "--override", self.without, *what)


@contextmanager
def step(what: str) -> Iterator[None]:
    began = time.monotonic()
    print(f"== {what}", flush=True)
    yield
    print(f"   {time.monotonic() - began:.0f} s", flush=True)


def build(root: Path, into: Path) -> dict[str, str]:
    """An sdist of each project, and a wheel of each sdist; file name -> its hash."""
    projects = [root, *(root / p.relative_to(ROOT) for p in OURS)]
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", into)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda project: run(*command, project), projects))
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(into.iterdir())}


def build_twice(folder: Path) -> dict[str, Path]:
    """Into `DIST` from this tree, and again from a clone of what is committed: the same bytes. Name -> wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    here = build(ROOT, DIST)
    run("git", "clone", "--quiet", ROOT, folder / "clone")
    (folder / "again").mkdir()
    there = build(folder / "clone", folder / "again")
    if differing := sorted(name for name in {*here, *there} if here.get(name) != there.get(name)):
        sys.exit(f"not the same from a clone (is all committed? see `git status`): {', '.join(differing)}")
    print(f"   {len(here)} files, the same from a clone")
    example = build_wheel(EXAMPLE, folder)
    return {p.name.partition("-")[0].replace("_", "-"): p for p in (*DIST.glob("*.whl"), example)}


def look() -> None:
    """What an index, and those who read wheels, would complain of."""
    wheels, sdists = sorted(DIST.glob("*.whl")), sorted(DIST.glob("*.tar.gz"))
    run(BIN / "twine", "check", "--strict", *wheels, *sdists)
    has_code = [p for p in wheels if not p.name.startswith("astuner-")]  # the package astuner is its dependencies
    # W002: the tiny model's folder is whole by itself; W009: astuner-compat brings `astune`, too
    run(BIN / "check-wheel-contents", "--ignore", "W002,W009", *has_code)
    rated = (BIN / "pyroma", "--min", "10", "--skip-tests", "AuthorEmail", "--file")  # the URLs lead to the authors
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda sdist: run(*rated, sdist), sdists))


def pythons() -> dict[str, str]:
    """Version -> path, of those at hand; pyenv's, too."""
    pyenv = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin"))
    environ = {
        **os.environ,
        "PATH": os.pathsep.join([*map(str, pyenv), os.environ["PATH"]]),
        "UV_PYTHON_DOWNLOADS": "never",
    }
    found = {}
    for version in PYTHONS:
        asked = [BIN / "uv", "python", "find", "--system", "--no-project", version]
        shown = subprocess.run(asked, capture_output=True, text=True, env=environ, check=False)
        if shown.returncode == 0:
            found[version] = shown.stdout.strip()
    return found


def alone(name: str, wheels: dict[str, Path], version: str, python: str, folder: Path) -> None:
    """Install it with the core, what it names of ours, and what that names of others; then its smoke test."""
    environment = Fresh(folder / f"{name}-{version}", python)
    environment.install(*with_ours(wheels, name))
    package = name.replace("-", "_")
    if name not in ("astuner", "astuner-core"):
        environment.run("-c", f"import {package}", cwd=folder)
    plugins = {p["dist"]: p for p in json.loads(environment.astuner("plugins", "--json"))}
    assert not [p for p in plugins.values() if p["status"] != "loaded"], f"{name}: {plugins}"
    assert name in plugins or name not in PLUGINS, f"{name} is not listed"
    assert "Usage: astuner" in environment.astuner("--help")
    shutil.rmtree(environment.folder)


def each_alone(wheels: dict[str, Path], folder: Path) -> None:
    there = pythons()
    print(f"   at hand: {', '.join(there)}; not at hand: {', '.join(v for v in PYTHONS if v not in there) or 'none'}")
    for version, python in there.items():
        fitting = [
            n for n, w in sorted(wheels.items()) if SpecifierSet(metadata(w)["Requires-Python"]).contains(version)
        ]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda name, v=version, p=python: alone(name, wheels, v, p, folder), fitting))
        print(f"   {len(fitting)} fresh environments of Python {version}", flush=True)


def without_a_checkout(wheels: dict[str, Path], folder: Path) -> None:
    """What README shows, and a stranger's judge, where there are only wheels."""
    environment = Environment(folder / "demo")
    environment.install("--constraint", ROOT / "requirements" / "constraints.txt", "torch")  # by pip, as the Makefile
    ours = with_ours(wheels, "astuner", "astuner-acme")
    run(BIN / "uv", "pip", "install", "--quiet", "--python", environment.python, *ours)
    where = environment.run("-c", "import astuner; print(astuner.__file__)", cwd=folder)
    assert str(ROOT) not in where, where

    def astuner(*words):
        return run(environment.folder / "bin" / "astuner", *words, cwd=folder)

    astuner("new", "experiment", "my_agent")
    astuner("run", "my_agent/my_agent.yaml", "--backbone", "local")
    before, *_, after = [row["val/success"] for row in _rows(folder, "my_agent") if "val/success" in row]
    print(f"   the demo: success on held-out tasks went from {before:.0%} to {after:.0%}")
    assert after > before + 0.3, "it did not learn"
    astuner("new", "experiment", "sorter", "--model", "tiny-calculator")
    short = ("astuner.trainer_common.total_steps=1", "astuner.trainer_common.test_freq=never")
    astuner("run", "sorter/sorter.yaml", "astuner.task_judge.judge=word_overlap", *short, "--backbone", "local")
    assert any(name.endswith("word_f1") for row in _rows(folder, "sorter") for name in row), (
        "acme's judge was not asked"
    )


def _rows(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "launcher_record" / name / "metrics.jsonl").read_text().splitlines()]


def say_what_it_brings(name: str, folder: Path) -> None:
    """Resolve it for a Linux machine with Python 3.11; nothing is installed."""
    project = folder / f"brings-{name}"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        f'[project]\nname = "nobody"\nversion = "0"\nrequires-python = "==3.11.*"\ndependencies = ["{name}"]\n'
        f"[tool.uv]\nfind-links = ['{DIST}']\n"
        "environments = [\"sys_platform == 'linux' and platform_machine == 'x86_64'\"]\n"
    )
    run(BIN / "uv", "lock", "--quiet", "--project", project)
    packages = tomllib.loads((project / "uv.lock").read_text())["package"]
    sizes = {p["name"]: _size(p) for p in packages if p["name"] != "nobody"}
    large = sorted(((size, of) for of, size in sizes.items() if size > LARGE), reverse=True)
    print(f"   pip install {name}: {len(sizes)} packages, {sum(sizes.values()) / 1e6:.0f} MB to fetch; the large ones:")
    print("     " + ", ".join(f"{of} {size / 1e6:.0f} MB" for size, of in large))


def _size(package: dict) -> int:
    """Bytes to download for Linux and Python 3.11, as the index says; 0 where it does not, and for ours."""
    fitting = [
        wheel.get("size", 0)
        for wheel in package.get("wheels", ())
        if "any.whl" in (file := wheel.get("url", wheel.get("path", ""))) or ("manylinux" in file and "x86_64" in file)
    ]
    return max(fitting, default=package.get("sdist", {}).get("size", 0))


def main() -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="astuner-dist-") as temporary:
        folder = Path(temporary)
        with step("build everything twice"):
            wheels = build_twice(folder)
        with step("twine, check-wheel-contents, pyroma"):
            look()
        with step("each alone with the core"):
            each_alone(wheels, folder)
        with step("wheels alone: the demo, and a stranger's judge"):
            without_a_checkout(wheels, folder)
        with step("what an installer will bring"):
            for name in BRINGS:
                say_what_it_brings(name, folder)
    print(f"all of it took {time.monotonic() - began:.0f} s; what an index gets is in {DIST.name}/")


if __name__ == "__main__":
    main()
