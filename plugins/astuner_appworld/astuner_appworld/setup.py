"""Set up AppWorld on a machine: unpack its apps in its interpreter and provide a data root.

The installed package's own functions do the work, in its own interpreter; ASTuner contains no part of AppWorld. Its
license allows publishing the unpacked apps and the data only in encrypted form, so they stay on this machine.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from astuner.contracts.errors import RunError
from astuner_appworld.world.roots import ROOT_VARIABLE, SPLITS, NoData, data_root, split_counts
from astuner_appworld.world.session import REQUIRE_VARIABLE
from astuner_env.environment_setup import EnvironmentSettings, EnvironmentSetup, Finding
from astuner_sandbox.isolation.confine import available

AGAIN = "astuner env setup appworld"
_SYNTHETIC = Path(__file__).with_name("synthetic")
_PROBE = Path(__file__).with_name("probe.py")


class AppWorldSetup(EnvironmentSetup):
    """Setup and diagnosis of AppWorld."""

    options: ClassVar[Mapping[str, str]] = {
        "root": "Folder that contains or receives AppWorld's data/. Default: a folder in $ASTUNER_HOME",
        "bundle": "Path of a data-0.1.0.bundle. Default: download it",
        "synthetic": "true: create a small data root with invented people instead of AppWorld's data",
        "confinement": "require: refuse to run if the kernel cannot confine model-written code. Default: auto",
    }

    def check(self, options: Mapping[str, str]) -> None:
        _checked(options)

    def setup(
        self, settings: EnvironmentSettings, folder: Path, options: Mapping[str, str], say: Callable[[str], None]
    ) -> EnvironmentSettings:
        python = _python(settings)
        chosen = _checked(options)
        root = Path(chosen.get("root") or settings.environ.get(ROOT_VARIABLE) or folder / "root").expanduser().resolve()
        if "memory" in str(root):
            raise RunError(f"AppWorld cannot use a folder with 'memory' in its path: {root}. Run: {AGAIN} root=OTHER")
        if not probe(python)["unpacked"]:
            say("Unpacking AppWorld's apps into its interpreter")
            _run(python, ["-m", "appworld.cli", "install"], root, "unpack the apps", cache=folder / "cache")
        environ = {**settings.environ, ROOT_VARIABLE: str(root)}
        if not _has_data(environ) or "bundle" in chosen:
            self._fill(python, root, folder, chosen, say)
        counts = split_counts(data_root(environ))
        say(f"Data in {root}: " + ", ".join(f"{split} {count}" for split, count in counts.items()))
        if "confinement" in chosen:
            environ[REQUIRE_VARIABLE] = chosen["confinement"]
        return replace(settings, environ=environ)

    def doctor(self, settings: EnvironmentSettings) -> Sequence[Finding]:
        return list(_findings(settings))

    def _fill(
        self, python: str, root: Path, folder: Path, options: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        """Fill ``root`` with data."""
        root.mkdir(parents=True, exist_ok=True)
        if options.get("synthetic") == "true":
            say(f"Building a synthetic root in {root}")
            _run(python, [str(_SYNTHETIC), str(root)], root, "build a synthetic root")
        elif "bundle" in options:
            bundle = Path(options["bundle"]).expanduser().resolve()
            say(f"Unpacking {bundle} into {root}")
            _run(python, [str(_PROBE), "unpack", str(bundle), str(root)], root, f"unpack {bundle}")
        else:
            say(f"Downloading AppWorld's data into {root}")
            _run(python, ["-m", "appworld.cli", "download", "data"], root, "download the data", cache=folder / "cache")
        if not _has_data({ROOT_VARIABLE: str(root)}):  # the package only prints some download failures
            raise RunError(
                f"{root} still contains no data. Without a network, use a bundle ({AGAIN} bundle=FILE), "
                f"an existing root ({AGAIN} root=DIR), or invented people ({AGAIN} synthetic=true)."
            )


def _findings(settings: EnvironmentSettings) -> Iterator[Finding]:
    try:
        facts = probe(_python(settings))
    except RunError as e:
        yield Finding(what=str(e), ok=False, hint=AGAIN)
        return
    yield Finding(what=f"Python {facts['python']} at {settings.python}")
    version = facts["version"]
    if version is None:
        yield Finding(what="the package appworld is not installed in its interpreter", ok=False, hint=AGAIN)
        return
    yield _finding(f"appworld {version}", version.startswith("0.1."), AGAIN)
    yield _finding("apps unpacked" if facts["unpacked"] else "apps not unpacked", facts["unpacked"], AGAIN)
    yield from _data_findings(settings, facts)
    level, require = available(), settings.environ.get(REQUIRE_VARIABLE, "auto") == "require"
    hint = f"{AGAIN} confinement=auto (or use Linux 5.13 or newer with Landlock)"
    yield _finding(f"confinement of model-written code: {level}", not (level.missing and require), hint)


def _data_findings(settings: EnvironmentSettings, facts: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        root = data_root(settings.environ)
    except NoData as e:
        yield Finding(what=str(e), ok=False, hint=AGAIN)
        return
    counts = split_counts(root)
    there = ", ".join(f"{split} {count}" for split, count in counts.items())
    yield _finding(f"data in {root}: {there}", all(counts.get(split) for split in SPLITS[:2]), AGAIN)
    specs = sorted((root / "data" / "tasks").glob("*/specs.json"))[:20]
    versions = sorted(
        {str(json.loads(file.read_text(encoding="utf-8")).get("db_version", "unknown")) for file in specs}
    )
    if facts["db_version"] is not None:
        fits = versions == [facts["db_version"]]
        what = f"databases of version {', '.join(versions) or 'none'}; the package requires {facts['db_version']}"
        yield _finding(what, fits, f"{AGAIN} bundle=FILE, with the bundle of that version")


def probe(python: str) -> dict[str, Any]:
    """Return the facts about an interpreter: ``python``, ``version``, ``unpacked``, ``db_version``.

    :raises RunError: The interpreter does not run.
    """
    done = _run(python, ["-I", str(_PROBE), "facts"], None, "inspect AppWorld")
    return dict(json.loads(done.splitlines()[-1]))


def _python(settings: EnvironmentSettings) -> str:
    if not settings.python:
        raise RunError(f"AppWorld needs a separate interpreter. Run: {AGAIN}")
    return settings.python


def _checked(options: Mapping[str, str]) -> dict[str, str]:
    if options.get("synthetic", "false") not in ("true", "false"):
        raise RunError(f"synthetic must be true or false, not {options['synthetic']!r}")
    if options.get("confinement", "auto") not in ("auto", "require"):
        raise RunError(f"confinement must be auto or require, not {options['confinement']!r}")
    if options.get("synthetic") == "true" and "bundle" in options:
        raise RunError("synthetic and bundle exclude each other. Pass one of them.")
    if "bundle" in options and not Path(options["bundle"]).expanduser().is_file():
        raise RunError(f"File not found: {Path(options['bundle']).expanduser()}. Run: {AGAIN} bundle=FILE")
    return dict(options)


def _has_data(environ: Mapping[str, str]) -> bool:
    try:
        data_root(environ)
    except NoData:
        return False
    return True


def _run(python: str, arguments: Sequence[str], root: Path | None, what: str, cache: Path | None = None) -> str:
    """Run a program in an interpreter and return its output.

    :raises RunError: It failed; the message contains the last line of its output.
    """
    environ = {"PATH": os.environ.get("PATH", ""), "HOME": os.environ.get("HOME", ""), "PYTHON_DOTENV_DISABLED": "1"}
    proxies = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    environ.update({name: os.environ[name] for name in (*proxies, "SSL_CERT_FILE") if name in os.environ})
    if root is not None:
        environ[ROOT_VARIABLE] = str(root)
    if cache is not None:
        environ["APPWORLD_CACHE"] = str(cache)
    try:
        done = subprocess.run(
            [python, *arguments], env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as e:
        raise RunError(f"Could not run AppWorld's interpreter {python}: {e}. Run: {AGAIN}") from e
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no output"]
        raise RunError(f"Could not {what} with {python}: {last[0][:500]}")
    return done.stdout


def _finding(what: str, ok: bool, hint: str) -> Finding:
    """Return a finding, with the hint only if the check failed."""
    return Finding(what=what, ok=ok, hint="" if ok else hint)
