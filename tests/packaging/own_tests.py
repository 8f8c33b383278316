"""Each package's own fast tests, where of ours there is only the core, the package, what it names, and its test group.

`make test-packages` runs this; ``python -m tests.packaging.own_tests NAME…`` does it for some packages. What others
publish comes from the environment that this runs in. The tests run in a copy of the repository that has no package's
code: what they import is what was installed from wheels.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tests.packaging.conftest import ROOT, Environment, build_wheels, pyproject, third_parties_here, with_ours

AT_ONCE = 2
AGAIN = os.environ.get("AGAIN", "").split()  # the Makefile's


def environment_with_third_parties(folder):
    """One whose packages lie in itself, as hard links: what is confined may read no other place."""
    environment = Environment(folder)
    for path in third_parties_here():
        if path.is_dir():
            shutil.copytree(path, environment.site / path.name, symlinks=True, copy_function=os.link)
        else:
            os.link(path, environment.site / path.name)
    return environment


def copy_without_code(folder):
    """All that is no package (each has a ``py.typed``) and no hidden file: tests, pages, examples, settings."""
    not_ours = shutil.ignore_patterns(".*", "__pycache__", "launcher_record", "*_runs")

    def left_out(parent, names):
        return {*not_ours(parent, names), *(n for n in names if Path(parent, n, "py.typed").exists())}

    return shutil.copytree(ROOT, folder, ignore=left_out)


def own_tests(project, wheels, copy, environments):
    """Run one package's; gives what pytest printed, what it said in the end, and whether all passed."""
    said = pyproject(project)
    environment = environments.get()
    try:
        for path in environment.site.glob("astuner*"):  # of the package before
            shutil.rmtree(path)
        environment.install(
            "--no-deps", *with_ours(wheels, said["project"]["name"], *said["dependency-groups"]["test"])
        )
        shown = subprocess.run(
            [environment.python, "-m", "pytest", "-q", *AGAIN, "-pno:cacheprovider", "-mnot slow", project / "tests"],
            cwd=copy,
            env={k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        environments.put(environment)
    return shown.stdout + shown.stderr, (shown.stdout.splitlines() or ["nothing"])[-1], shown.returncode == 0


def main(*names):
    began = time.monotonic()
    there = {p.name: p for p in sorted((ROOT / "plugins").iterdir()) if (p / "tests").is_dir()}
    if unknown := {*names} - {*there}:
        sys.exit(f"no package with tests is called {min(unknown)}; there are {', '.join(there)}")
    failed = []
    # hidden from git and from the copy, and where the environment is, whose files are linked
    with tempfile.TemporaryDirectory(prefix=".venv-own-tests-", dir=ROOT) as temporary:
        folder = Path(temporary)
        environments = SimpleQueue()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            for environment in pool.map(environment_with_third_parties, (folder / str(n) for n in range(AT_ONCE))):
                environments.put(environment)
            wheels = build_wheels(folder)
            copy = copy_without_code(folder / "copy")
            print(f"wheels and environments are made, after {time.monotonic() - began:.0f} s", flush=True)
            running = {
                pool.submit(own_tests, copy / "plugins" / name, wheels, copy, environments): name
                for name in names or there
            }
            for run in as_completed(running):
                printed, end, passed = run.result()
                if not passed:
                    failed.append(running[run])
                    print(printed)
                print(f"{running[run]}: {end}", flush=True)
    print(f"{len(running) - len(failed)} of {len(running)} packages passed, in {time.monotonic() - began:.0f} s")
    if failed:
        sys.exit(f"failed: {', '.join(sorted(failed))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
