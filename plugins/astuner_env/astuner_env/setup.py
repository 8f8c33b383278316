"""Implement ``astuner env setup`` and ``astuner env doctor``.

Setup creates an environment's virtual environment, installs its packages and runs the setup class of its plugin.
Everything is stored in ``$ASTUNER_HOME/environments/NAME``.

Invariant: every step checks what exists and does only what is missing, and the settings are written last. The same
command therefore completes a setup that failed or was interrupted. ASTuner's own interpreter is never changed.

The doctor changes nothing and starts only interpreters. An interpreter counts only if it has run, because a name on the
PATH may be a stub that fails (such as pyenv's shims).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from astuner import LockTaken, import_target, lock_file, missing_modules
from astuner.contracts.errors import AstunerError, ConfigError, MissingDependency, PluginError, RunError, did_you_mean
from astuner.contracts.hookspecs import EnvironmentProvider
from astuner_env import settings
from astuner_env.environment_setup import EnvironmentSettings, EnvironmentSetup, Finding

Say = Callable[[str], None]
T = TypeVar("T")

ANSWER_WITHIN = 60.0
"""Timeout in seconds for starting an interpreter from a slow disk."""
NEWEST_MINOR = 15
"""Largest N of the python3.N names to search for."""

NEEDED_TO_BUILD_PIP = "ensurepip"
"""Module that is missing on Debian if `python -m venv` fails; ASTuner's own pip is used then."""

_ASK = """
import importlib.metadata, importlib.util, json, sys
modules = json.loads(sys.argv[1])
print(json.dumps({
    "version": ".".join(map(str, sys.version_info[:3])),
    "executable": sys.executable,
    "packages": {d.metadata["Name"]: d.version for d in importlib.metadata.distributions() if d.metadata["Name"]},
    "modules": [m for m in modules if importlib.util.find_spec(m.partition(".")[0]) is not None],
}))
"""


def set_up(
    name: str,
    provider: EnvironmentProvider,
    options: Mapping[str, str],
    *,
    python: Path | None = None,
    say: Say,
) -> EnvironmentSettings:
    """Do all missing steps of a setup and save the environment's settings.

    :param options: Options of the provider's `EnvironmentSetup`.
    :param python: Interpreter to create the virtual environment from; None finds one.
    :param say: Prints a progress line.
    :raises ConfigError: An option is unknown, or ``python`` has an unsuitable version.
    :raises MissingDependency: The environment uses ASTuner's interpreter, and a package is missing there.
    :raises RunError: A step failed; repeating the command continues there.
    """
    own_steps = setup_of(name, provider)
    known = options_of(name, provider)
    there = "; ".join(f"{key}: {text}" for key, text in known.items()) or "it has no options"
    if unknown := [option for option in options if option not in known]:
        raise ConfigError([f"{name} has no option {it!r}{did_you_mean(it, known, f'; {there}')}" for it in unknown])
    if own_steps is not None:
        _call_own(name, own_steps.check, options)
    if python is not None and not has_interpreter(provider):
        raise ConfigError(f"The environment {name!r} uses ASTuner's own interpreter. Omit --python.")
    folder = settings.folder_of(name)
    data = folder / "data"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise RunError(f"Could not create {data}: {e.strerror}. Set ASTUNER_HOME to a writable folder.") from None
    try:
        with lock_file(folder / "setup.lock"):
            kept = _kept(name, say)
            if has_interpreter(provider):
                kept = replace(kept, python=_interpreter(name, provider, folder, python, say))
            else:
                _check_requires(name, provider, ask_interpreter(sys.executable, provider.requires))
                kept = replace(kept, python="")
            if own_steps is not None:
                kept = _call_own(name, own_steps.setup, kept, data, options, say)
            settings.save(name, kept)
            return kept
    except LockTaken as e:
        raise RunError(f"Another `astuner env setup {name}` is running ({e}). Wait until it has finished.") from None


def _call_own(name: str, step: Callable[..., T], *arguments: Any) -> T:
    """Call a method of the provider's `EnvironmentSetup`."""
    try:
        return step(*arguments)
    except AstunerError:
        raise
    except Exception as e:
        where = f"{step.__module__}.{step.__qualname__}"
        raise RunError(f"The setup of {name} failed in {where}: {type(e).__name__}: {e}") from e


def _kept(name: str, say: Say) -> EnvironmentSettings:
    """Return the settings of an earlier setup, or the defaults if they cannot be used."""
    try:
        return settings.load(name)
    except RunError as e:
        say(f"Starting from scratch: {e}")
        return EnvironmentSettings()


def has_interpreter(provider: EnvironmentProvider) -> bool:
    """Return whether the environment has a separate interpreter."""
    return bool(provider.python or provider.packages)


def setup_of(name: str, provider: EnvironmentProvider) -> EnvironmentSetup | None:
    """Return the provider's setup, or None.

    :raises PluginError: It cannot be imported or is not an `EnvironmentSetup`.
    """
    if not provider.setup:
        return None
    found = import_target(provider.setup)
    if not (isinstance(found, type) and issubclass(found, EnvironmentSetup)):
        raise PluginError(f"The setup {provider.setup} of the environment {name!r} is not an EnvironmentSetup.")
    made: EnvironmentSetup = found()
    return made


def options_of(name: str, provider: EnvironmentProvider) -> dict[str, str]:
    """Return the options and their descriptions; raise like `setup_of`."""
    own_steps = setup_of(name, provider)
    return dict(own_steps.options) if own_steps else {}


def _interpreter(name: str, provider: EnvironmentProvider, folder: Path, python: Path | None, say: Say) -> str:
    """Create the interpreter, install missing packages, and return its path."""
    venv = folder / "venv"
    done = folder / "installed.json"
    there = _usable(venv, provider.python)
    if there is not None and python is not None:
        wanted = find_interpreter(provider.python, python)
        if wanted.version != there.version:
            say(f"Replacing {venv} (Python {there.version}) with Python {wanted.version}")
            there = None
    if there is None:
        done.unlink(missing_ok=True)
        base = find_interpreter(provider.python, python)
        say(f"Creating a virtual environment in {venv} (Python {base.version}, from {base.path})")
        _make(venv, base.path)
        there = ask_interpreter(_python_of(venv))
    else:
        say(f"Virtual environment: {venv} (Python {there.version}), up to date")
    wanted_packages = json.dumps(list(provider.packages))
    if (done.exists() and done.read_text()) != wanted_packages or there.lacks(provider.packages):
        say(f"Installing {', '.join(provider.packages)}")
        _install(name, venv, provider.packages, say)
        there = ask_interpreter(there.path, provider.requires)
        if wrong := there.lacks(provider.packages):
            raise RunError(
                f"pip reported success, but in {venv}: {'; '.join(f'{what}: {how}' for what, how in wrong)}. "
                "Check pip's configuration: pip config list"
            )
        done.write_text(wanted_packages)
    else:
        there = ask_interpreter(there.path, provider.requires)
        say("Packages: up to date")
    _check_requires(name, provider, there)
    return str(_python_of(venv))


def _usable(venv: Path, wanted: str) -> Interpreter | None:
    """Return the existing interpreter if it works and has a suitable version."""
    if not _python_of(venv).exists():
        return None
    try:
        there = ask_interpreter(_python_of(venv))
    except RunError:
        return None  # incomplete, or its base interpreter was removed
    return there if SpecifierSet(wanted).contains(there.version) else None


def _python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def _make(venv: Path, base: str) -> None:
    shutil.rmtree(venv, ignore_errors=True)  # if this fails, the next command reports it
    made = _run([base, "-m", "venv", str(venv)])
    if made.returncode and NEEDED_TO_BUILD_PIP in made.stdout + made.stderr:
        shutil.rmtree(venv, ignore_errors=True)
        made = _run([base, "-m", "venv", "--without-pip", str(venv)])
    if made.returncode:
        raise RunError(
            f"{base} could not create {venv}: {_last_lines(made.stdout + made.stderr)}. "
            "Install its venv module (Debian: python3-venv), or select another Python with --python PATH."
        )


def _install(name: str, venv: Path, packages: Sequence[str], say: Say) -> None:
    """Install packages with pip, which uses its own configuration, and show its output as progress."""
    inside = _run([str(_python_of(venv)), "-m", "pip", "--version"]).returncode == 0
    pip = [str(_python_of(venv)), "-m", "pip"] if inside else [sys.executable, "-m", "pip", "--python", str(venv)]
    command = [*pip, "install", "--no-input", "--disable-pip-version-check", "--progress-bar", "off", *packages]
    said = []
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=_clean_environ(),
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                said.append(line)
                say(f"  {line.rstrip()}")
        except BaseException:  # Ctrl-C: the next setup completes the installation
            process.terminate()
            raise
    if process.returncode:
        raise RunError(
            f"Could not install {' '.join(packages)} for {name}: {_last_lines(''.join(said))}. "
            f"Fix the problem and repeat: astuner env setup {name}"
        )


def _check_requires(name: str, provider: EnvironmentProvider, there: Interpreter) -> None:
    missing = [module for module in provider.requires if module not in there.modules]
    if missing:
        how = provider.install if not has_interpreter(provider) and provider.install else f"astuner env doctor {name}"
        raise MissingDependency(
            f"The environment {name!r} requires {', '.join(missing)}, not installed in {there.path}. Run: {how}"
        )


def _run(command: Sequence[str], timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        timeout=timeout,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
        env=_clean_environ(),
    )


def _last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "no output"


# ---- interpreters ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """Properties of an interpreter."""

    path: str
    """Absolute path, from ``sys.executable``."""
    version: str
    packages: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Normalized distribution name -> version."""
    modules: tuple[str, ...] = ()
    """Requested modules that it can find."""

    def lacks(self, requirements: Sequence[str]) -> list[tuple[str, str]]:
        """Return the unmet requirements, each with the installed version.

        Requirements without a name (paths, URLs) cannot be checked and are skipped.
        """
        missing = []
        for text in requirements:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            have = self.packages.get(canonicalize_name(requirement.name))
            if have is None:
                missing.append((text, "not installed"))
            elif not requirement.specifier.contains(have, prereleases=True):
                missing.append((text, f"{have} is installed"))
        return missing


def ask_interpreter(python: str | Path, modules: Sequence[str] = ()) -> Interpreter:
    """Run an interpreter and return its properties.

    :param modules: Modules to search for; they are not imported.
    :raises RunError: It cannot be run or does not answer.
    """
    try:
        shown = _run([str(python), "-I", "-c", _ASK, json.dumps(list(modules))], ANSWER_WITHIN)
    except OSError as e:
        raise RunError(f"Could not run {python}: {e.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{python} did not answer within {ANSWER_WITHIN:g} s") from None
    try:
        said: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
        packages: dict[str, str] = {canonicalize_name(name): version for name, version in said["packages"].items()}
        return Interpreter(
            path=said["executable"], version=said["version"], packages=packages, modules=tuple(said["modules"])
        )
    except (IndexError, ValueError, KeyError, TypeError):
        last = (shown.stderr.strip() or shown.stdout.strip() or f"exit code {shown.returncode}").splitlines()[-1]
        raise RunError(f"{python} is not a working Python: {last}") from None


def find_interpreter(wanted: str, chosen: Path | None = None) -> Interpreter:
    """Return an interpreter with a version in ``wanted`` (for example ``>=3.11,<3.14``; empty: any).

    The search order is ASTuner's own interpreter, python3.N on the PATH (newest first), and uv.

    :param chosen: Interpreter to use instead of a search.
    :raises ConfigError: None was found, or ``chosen`` is unsuitable; the message contains a command.
    """
    fits = SpecifierSet(wanted)
    if chosen is not None:
        path = shutil.which(chosen.expanduser()) or chosen.expanduser()
        try:
            found = ask_interpreter(path)
        except RunError as e:
            raise ConfigError(f"--python {chosen}: {e}") from None
        if not fits.contains(found.version):
            raise ConfigError(f"--python {chosen} is Python {found.version}, but {wanted} is required")
        return found
    seen: list[str] = []
    for candidate in _candidates(wanted):
        try:
            found = ask_interpreter(candidate)
        except RunError:
            continue  # a stub or an incomplete installation
        if fits.contains(found.version):
            return found
        seen.append(f"{found.version} ({candidate})")
    advice = (
        "uv python install 3.12"
        if shutil.which("uv")
        else "install one, for example with uv or your system's package manager"
    )
    raise ConfigError(
        f"No Python {wanted} was found (found: {', '.join(dict.fromkeys(seen)) or 'none'}). "
        f"Select one with --python PATH, or: {advice}"
    )


def _candidates(wanted: str) -> Iterator[str]:
    yield sys.executable
    fits = SpecifierSet(wanted)
    minors = [f"3.{n}" for n in range(NEWEST_MINOR, 8, -1) if any(fits.contains(f"3.{n}.{p}") for p in (0, 99))]
    for name in (*(f"python{minor}" for minor in minors), "python3"):
        for folder in os.get_exec_path():
            if (path := shutil.which(name, path=folder)) is not None:
                yield path
    if (uv := shutil.which("uv")) is not None:
        shown = _run([uv, "python", "find", "--no-python-downloads", wanted or ">=3"])
        if shown.returncode == 0:
            yield shown.stdout.strip()


def _clean_environ() -> dict[str, str]:
    """Return the environment variables for another interpreter, except variables that would load ASTuner's packages."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "__PYVENV_LAUNCHER__"}


# ---- doctor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Findings about one environment or about the machine."""

    name: str
    findings: Sequence[Finding]
    wanted: bool
    """Whether its setup was started; only then are missing parts failures."""

    @property
    def is_ready(self) -> bool:
        return all(finding.ok for finding in self.findings)


def diagnose(name: str, provider: EnvironmentProvider) -> Diagnosis:
    """Check everything that ``provider`` requires, in the order of installation."""
    try:
        settings.file_of(name)
    except ConfigError as e:
        return Diagnosis(name=name, findings=[Finding(what=str(e), ok=False)], wanted=False)
    begun = settings.is_saved(name) or (settings.folder_of(name) / "venv").exists()
    return Diagnosis(name=name, findings=list(_findings(name, provider)), wanted=begun)


def machine() -> Diagnosis:
    """Return findings that apply to all environments on this machine."""
    from astuner_sandbox.isolation import confine, linux

    level = Finding(what=f"code written by models is {confine.available()}")
    try:
        linux.apart_abi()
        apart = "environments cannot access your other processes"
    except OSError as e:
        apart = f"environments can read the environment variables of your other processes: {e}"
    return Diagnosis(name="this machine", findings=[level, Finding(what=apart)], wanted=True)


def missing_for(name: str, provider: EnvironmentProvider) -> str:
    """Return the command to run first, or an empty string; starts no interpreter."""
    try:
        python = settings.load(name).python
    except AstunerError:
        return f"astuner env doctor {name}"  # reports the problem with the settings
    if has_interpreter(provider):
        return "" if python and shutil.which(python) else f"astuner env setup {name}"
    if missing_modules(provider):
        return provider.install or f"astuner env doctor {name}"
    if provider.setup and not settings.is_saved(name):
        return f"astuner env setup {name}"
    return ""


def _findings(name: str, provider: EnvironmentProvider) -> Iterator[Finding]:
    setup = f"astuner env setup {name}"
    try:
        kept = settings.load(name)
    except RunError as e:
        yield Finding(what=str(e), ok=False, hint=setup)
        return
    there = yield from _found_interpreter(provider, kept, setup)
    if there is not None:
        yield from _found_packages(provider, there, setup)
        yield from _found_by_its_plugin(name, provider, kept)
    from astuner_env.manager.capacity import capacity

    instances, why = capacity([provider.memory_mb])
    yield Finding(what=f"capacity: {instances} instances, {why}")


def _found_interpreter(
    provider: EnvironmentProvider, kept: EnvironmentSettings, setup: str
) -> Generator[Finding, None, Interpreter | None]:
    own_one = has_interpreter(provider)
    if own_one and not kept.python:
        wanted = f", Python {provider.python}" if provider.python else ""
        yield Finding(what=f"its interpreter{wanted} is not installed", ok=False, hint=setup)
        return None
    python = kept.python or sys.executable
    try:
        there = ask_interpreter(python, provider.requires)
    except RunError as e:
        yield Finding(what=str(e), ok=False, hint=setup)
        return None
    whose = "separate interpreter" if own_one else "interpreter of the service"
    fits = SpecifierSet(provider.python).contains(there.version)
    wanted = "" if fits else f" ({provider.python} is required)"
    yield Finding(what=f"Python {there.version}{wanted}, {whose}: {there.path}", ok=fits, hint="" if fits else setup)
    return there


def _found_packages(provider: EnvironmentProvider, there: Interpreter, setup: str) -> Iterator[Finding]:
    lacking = dict(there.lacks(provider.packages))
    for text in provider.packages:
        if text in lacking:
            yield Finding(what=f"requires {text}: {lacking[text]}", ok=False, hint=setup)
        else:
            yield Finding(what=f"has {text}")
    for module in provider.requires:
        if module in there.modules:
            yield Finding(what=f"has the module {module}")
        else:
            how = setup if has_interpreter(provider) else provider.install or f"{there.path} -m pip install {module}"
            yield Finding(what=f"requires the module {module}: not installed", ok=False, hint=how)


def _found_by_its_plugin(name: str, provider: EnvironmentProvider, kept: EnvironmentSettings) -> Iterator[Finding]:
    """Yield the findings of the provider's `EnvironmentSetup`."""
    try:
        own_steps = setup_of(name, provider)
        if own_steps is not None:
            yield from own_steps.doctor(kept)
    except AstunerError as e:
        yield Finding(what=str(e), ok=False)
    except Exception as e:
        yield Finding(what=f"{provider.setup} failed: {type(e).__name__}: {e}", ok=False)
