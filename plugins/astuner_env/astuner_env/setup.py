"""``astuner env setup`` and ``doctor``: what an environment needs on this machine, done, or looked at.

That is an interpreter of its own, its packages, and what its plugin does besides.
Everything lives under ``$ASTUNER_HOME/environments/NAME``.  Invariant: every step looks at what is there and does what
is missing, and the settings are written last; so a setup that failed or was interrupted is mended by the same command.
The interpreter that ASTuner itself runs on is never changed.  Looking changes nothing, and starts nothing but
interpreters that say what they have; one is believed only after it has run, for a name on the PATH may be a stub that
fails (pyenv's shims are such).
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
"""Seconds; a cold interpreter on a slow disk takes some."""
NEWEST_MINOR = 15
"""python3.N is looked for up to this N."""

NEEDED_TO_BUILD_PIP = "ensurepip"
"""The module whose absence makes `python -m venv` fail on Debian; then our own pip installs."""

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
    """Do what is missing, and keep how to run the environment.

    :param options: for the provider's `EnvironmentSetup`.
    :param python: the interpreter to make the environment's own from; None finds one.
    :param say: prints a line of progress.
    :raises ConfigError: an option that there is not, or a ``python`` that does not fit.
    :raises MissingDependency: it runs on ASTuner's interpreter, and a package is missing there.
    :raises RunError: a step failed; giving the command again goes on there.
    """
    own_steps = setup_of(name, provider)
    known = options_of(name, provider)
    there = "; ".join(f"{key}: {text}" for key, text in known.items()) or "there are none"
    if unknown := [option for option in options if option not in known]:
        raise ConfigError([f"{name} has no option {it!r}{did_you_mean(it, known, f'; {there}')}" for it in unknown])
    if own_steps is not None:
        _call_own(name, own_steps.check, options)
    if python is not None and not has_interpreter(provider):
        raise ConfigError(f"the environment {name!r} runs on ASTuner's own interpreter; leave out --python")
    folder = settings.folder_of(name)
    data = folder / "data"
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise RunError(f"cannot make {data}: {e.strerror}; set ASTUNER_HOME to a folder of your own") from None
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
        raise RunError(f"another `astuner env setup {name}` is at work ({e}); wait for it") from None


def _call_own(name: str, step: Callable[..., T], *arguments: Any) -> T:
    """Call a method of the provider's own `EnvironmentSetup`."""
    try:
        return step(*arguments)
    except AstunerError:
        raise
    except Exception as e:
        where = f"{step.__module__}.{step.__qualname__}"
        raise RunError(f"setting up {name} failed in {where}: {type(e).__name__}: {e}") from e


def _kept(name: str, say: Say) -> EnvironmentSettings:
    """What an earlier setup found; settings that cannot be used are made anew."""
    try:
        return settings.load(name)
    except RunError as e:
        say(f"beginning anew: {e}")
        return EnvironmentSettings()


def has_interpreter(provider: EnvironmentProvider) -> bool:
    """Whether the environment runs on an interpreter of its own."""
    return bool(provider.python or provider.packages)


def setup_of(name: str, provider: EnvironmentProvider) -> EnvironmentSetup | None:
    """The provider's own setup, if it has one.

    :raises PluginError: it cannot be imported, or is no `EnvironmentSetup`.
    """
    if not provider.setup:
        return None
    found = import_target(provider.setup)
    if not (isinstance(found, type) and issubclass(found, EnvironmentSetup)):
        raise PluginError(f"the setup of the environment {name!r}, {provider.setup}, is no EnvironmentSetup")
    made: EnvironmentSetup = found()
    return made


def options_of(name: str, provider: EnvironmentProvider) -> dict[str, str]:
    """Option -> what it is; raises as `setup_of`."""
    own_steps = setup_of(name, provider)
    return dict(own_steps.options) if own_steps else {}


def _interpreter(name: str, provider: EnvironmentProvider, folder: Path, python: Path | None, say: Say) -> str:
    """Make it and install into it what is missing; gives its path."""
    venv = folder / "venv"
    done = folder / "installed.json"
    there = _usable(venv, provider.python)
    if there is not None and python is not None:
        wanted = find_interpreter(provider.python, python)
        if wanted.version != there.version:
            say(f"{venv} has Python {there.version}; making it again with {wanted.version}")
            there = None
    if there is None:
        done.unlink(missing_ok=True)
        base = find_interpreter(provider.python, python)
        say(f"making an interpreter of its own in {venv} (Python {base.version}, from {base.path})")
        _make(venv, base.path)
        there = ask_interpreter(_python_of(venv))
    else:
        say(f"interpreter: {venv} (Python {there.version}) is there")
    wanted_packages = json.dumps(list(provider.packages))
    if (done.exists() and done.read_text()) != wanted_packages or there.lacks(provider.packages):
        say(f"installing {', '.join(provider.packages)}")
        _install(name, venv, provider.packages, say)
        there = ask_interpreter(there.path, provider.requires)
        if wrong := there.lacks(provider.packages):
            raise RunError(
                f"pip says it is done, but in {venv}: {'; '.join(f'{what}: {how}' for what, how in wrong)}; "
                "look at pip's own settings with: pip config list"
            )
        done.write_text(wanted_packages)
    else:
        there = ask_interpreter(there.path, provider.requires)
        say("packages: all there")
    _check_requires(name, provider, there)
    return str(_python_of(venv))


def _usable(venv: Path, wanted: str) -> Interpreter | None:
    """The interpreter that is there, if it runs and fits."""
    if not _python_of(venv).exists():
        return None
    try:
        there = ask_interpreter(_python_of(venv))
    except RunError:
        return None  # half made, or what it was made from is gone
    return there if SpecifierSet(wanted).contains(there.version) else None


def _python_of(venv: Path) -> Path:
    return venv / "bin" / "python"


def _make(venv: Path, base: str) -> None:
    shutil.rmtree(venv, ignore_errors=True)  # half of one is of no use; what cannot be removed stops the next line
    made = _run([base, "-m", "venv", str(venv)])
    if made.returncode and NEEDED_TO_BUILD_PIP in made.stdout + made.stderr:
        shutil.rmtree(venv, ignore_errors=True)
        made = _run([base, "-m", "venv", "--without-pip", str(venv)])
    if made.returncode:
        raise RunError(
            f"{base} cannot make {venv}: {_last_lines(made.stdout + made.stderr)}; "
            "install its venv module (Debian: python3-venv), or name another Python with --python PATH"
        )


def _install(name: str, venv: Path, packages: Sequence[str], say: Say) -> None:
    """With pip, which reads its own configuration; every line it prints is progress."""
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
        except BaseException:  # Ctrl-C: what pip has begun is finished by the next setup
            process.terminate()
            raise
    if process.returncode:
        raise RunError(
            f"installing {' '.join(packages)} for {name} failed: {_last_lines(''.join(said))}; "
            f"when that is mended, give the same command again: astuner env setup {name}"
        )


def _check_requires(name: str, provider: EnvironmentProvider, there: Interpreter) -> None:
    missing = [module for module in provider.requires if module not in there.modules]
    if missing:
        how = provider.install if not has_interpreter(provider) and provider.install else f"astuner env doctor {name}"
        raise MissingDependency(
            f"the environment {name!r} needs {', '.join(missing)}, which {there.path} has not; type: {how}"
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
    return " / ".join(lines[-count:]) or "it said nothing"


# ---- interpreters other than our own ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Interpreter:
    """What an interpreter said about itself."""

    path: str
    """As it calls itself; absolute."""
    version: str
    packages: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Normalised distribution name -> version."""
    modules: tuple[str, ...] = ()
    """Which of the modules that were asked for it can find."""

    def lacks(self, requirements: Sequence[str]) -> list[tuple[str, str]]:
        """The requirements it does not meet, each with what it has instead.

        What is no requirement of a name (a path, a URL) cannot be looked up, and is left out.
        """
        missing = []
        for text in requirements:
            try:
                requirement = Requirement(text)
            except InvalidRequirement:
                continue
            have = self.packages.get(canonicalize_name(requirement.name))
            if have is None:
                missing.append((text, "it is not installed"))
            elif not requirement.specifier.contains(have, prereleases=True):
                missing.append((text, f"{have} is installed"))
        return missing


def ask_interpreter(python: str | Path, modules: Sequence[str] = ()) -> Interpreter:
    """Run an interpreter and let it say what it is.

    :param modules: which modules to look for; they are not imported.
    :raises RunError: it cannot be run, or does not answer.
    """
    try:
        shown = _run([str(python), "-I", "-c", _ASK, json.dumps(list(modules))], ANSWER_WITHIN)
    except OSError as e:
        raise RunError(f"{python} cannot be run: {e.strerror}") from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{python} does not answer within {ANSWER_WITHIN:g} s") from None
    try:
        said: dict[str, Any] = json.loads(shown.stdout.splitlines()[-1])
        packages: dict[str, str] = {canonicalize_name(name): version for name, version in said["packages"].items()}
        return Interpreter(
            path=said["executable"], version=said["version"], packages=packages, modules=tuple(said["modules"])
        )
    except (IndexError, ValueError, KeyError, TypeError):
        last = (shown.stderr.strip() or shown.stdout.strip() or f"exit code {shown.returncode}").splitlines()[-1]
        raise RunError(f"{python} is no Python that works: {last}") from None


def find_interpreter(wanted: str, chosen: Path | None = None) -> Interpreter:
    """An interpreter whose version is in ``wanted`` (as in ``>=3.11,<3.14``; empty: any).

    :param chosen: take this one; else our own if it fits, then python3.N on the PATH, the newest first, then what uv
        knows of.
    :raises ConfigError: there is none, or ``chosen`` does not fit; says what to type.
    """
    fits = SpecifierSet(wanted)
    if chosen is not None:
        path = shutil.which(chosen.expanduser()) or chosen.expanduser()
        try:
            found = ask_interpreter(path)
        except RunError as e:
            raise ConfigError(f"--python {chosen}: {e}") from None
        if not fits.contains(found.version):
            raise ConfigError(f"--python {chosen} is Python {found.version}, and {wanted} is needed")
        return found
    seen: list[str] = []
    for candidate in _candidates(wanted):
        try:
            found = ask_interpreter(candidate)
        except RunError:
            continue  # a stub, or half an installation; nobody asked for it
        if fits.contains(found.version):
            return found
        seen.append(f"{found.version} ({candidate})")
    advice = "uv python install 3.12" if shutil.which("uv") else "install one, e.g. with uv or your system's packages"
    raise ConfigError(
        f"no Python {wanted} was found, only {', '.join(dict.fromkeys(seen)) or 'none'}; "
        f"name one with --python PATH, or: {advice}"
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
    """Our variables for a program of another interpreter: without those that would make it load our packages."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "__PYVENV_LAUNCHER__"}


# ---- doctor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found about one environment, or about the machine."""

    name: str
    findings: Sequence[Finding]
    wanted: bool
    """Whether somebody has begun to set it up; of others it is no fault that something is missing."""

    @property
    def is_ready(self) -> bool:
        return all(finding.ok for finding in self.findings)


def diagnose(name: str, provider: EnvironmentProvider) -> Diagnosis:
    """Look at everything that ``provider`` needs, in the order in which it would be missed."""
    try:
        settings.file_of(name)
    except ConfigError as e:
        return Diagnosis(name=name, findings=[Finding(what=str(e), ok=False)], wanted=False)
    begun = settings.is_saved(name) or (settings.folder_of(name) / "venv").exists()
    return Diagnosis(name=name, findings=list(_findings(name, provider)), wanted=begun)


def machine() -> Diagnosis:
    """What holds for every environment here."""
    from astuner_sandbox.isolation import confine, linux

    level = Finding(what=f"what models write is {confine.available()}")
    try:
        linux.apart_abi()
        apart = "environments cannot see into your other processes"
    except OSError as e:
        apart = f"environments can read the variables of your other processes: {e}"
    return Diagnosis(name="this machine", findings=[level, Finding(what=apart)], wanted=True)


def missing_for(name: str, provider: EnvironmentProvider) -> str:
    """What one has to type first, found without starting an interpreter; empty when it looks ready."""
    try:
        python = settings.load(name).python
    except AstunerError:
        return f"astuner env doctor {name}"  # which says what is wrong with its settings
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
    yield Finding(what=f"room for {instances} instances at once: {why}")


def _found_interpreter(
    provider: EnvironmentProvider, kept: EnvironmentSettings, setup: str
) -> Generator[Finding, None, Interpreter | None]:
    own_one = has_interpreter(provider)
    if own_one and not kept.python:
        wanted = f", Python {provider.python}" if provider.python else ""
        yield Finding(what=f"the interpreter of its own{wanted} is not there yet", ok=False, hint=setup)
        return None
    python = kept.python or sys.executable
    try:
        there = ask_interpreter(python, provider.requires)
    except RunError as e:
        yield Finding(what=str(e), ok=False, hint=setup)
        return None
    whose = "of its own" if own_one else "the service's"
    fits = SpecifierSet(provider.python).contains(there.version)
    wanted = "" if fits else f", but {provider.python} is needed"
    yield Finding(what=f"Python {there.version}{wanted}, {whose}: {there.path}", ok=fits, hint="" if fits else setup)
    return there


def _found_packages(provider: EnvironmentProvider, there: Interpreter, setup: str) -> Iterator[Finding]:
    lacking = dict(there.lacks(provider.packages))
    for text in provider.packages:
        if text in lacking:
            yield Finding(what=f"needs {text}, but {lacking[text]}", ok=False, hint=setup)
        else:
            yield Finding(what=f"has {text}")
    for module in provider.requires:
        if module in there.modules:
            yield Finding(what=f"has the module {module}")
        else:
            how = setup if has_interpreter(provider) else provider.install or f"{there.path} -m pip install {module}"
            yield Finding(what=f"needs the module {module}, which is not installed", ok=False, hint=how)


def _found_by_its_plugin(name: str, provider: EnvironmentProvider, kept: EnvironmentSettings) -> Iterator[Finding]:
    """What the provider's `EnvironmentSetup` says."""
    try:
        own_steps = setup_of(name, provider)
        if own_steps is not None:
            yield from own_steps.doctor(kept)
    except AstunerError as e:
        yield Finding(what=str(e), ok=False)
    except Exception as e:
        yield Finding(what=f"{provider.setup} raised while it looked: {type(e).__name__}: {e}", ok=False)
