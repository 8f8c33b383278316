"""``astuner env setup NAME``: an interpreter of the environment's own, its packages, and what its plugin does besides.

Everything lives under ``$ASTUNER_HOME/environments/NAME``.  Invariant: every step looks at what is there and does what
is missing, and the settings are written last; so a setup that failed or was interrupted is mended by the same command.
The interpreter that ASTuner itself runs on is never changed.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from packaging.specifiers import SpecifierSet

from astuner.contracts.errors import AstunerError, ConfigError, MissingDependency, PluginError, RunError
from astuner.contracts.hookspecs import EnvironmentProvider
from astuner.plugins.registry import import_target
from astuner_env import interpreter, settings
from astuner_env.environment_setup import EnvironmentSettings, EnvironmentSetup

Say = Callable[[str], None]
T = TypeVar("T")

NEEDED_TO_BUILD_PIP = "ensurepip"
"""The module whose absence makes `python -m venv` fail on Debian; then our own pip installs."""


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
    _check_options(name, options_of(name, provider), options)
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
    with _alone(name, folder):
        kept = _kept(name, say)
        if has_interpreter(provider):
            kept = replace(kept, python=_interpreter(name, provider, folder, python, say))
        else:
            _check_requires(name, provider, interpreter.ask(sys.executable, provider.requires))
            kept = replace(kept, python="")
        if own_steps is not None:
            kept = _call_own(name, own_steps.setup, kept, data, options, say)
        settings.save(name, kept)
    return kept


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


def _check_options(name: str, known: Mapping[str, str], options: Mapping[str, str]) -> None:
    problems = []
    for option in options:
        if option not in known:
            close = get_close_matches(option, known, n=1)
            there = "; ".join(f"{key}: {text}" for key, text in known.items()) or "there are none"
            hint = f"did you mean {close[0]}?" if close else there
            problems.append(f"{name} has no option {option!r}; {hint}")
    if problems:
        raise ConfigError(problems)


@contextmanager
def _alone(name: str, folder: Path) -> Iterator[None]:
    with (folder / "setup.lock").open("w") as lock:  # released by the system when this process ends, however
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another `astuner env setup {name}` is at work; wait for it") from None
        yield


def _interpreter(name: str, provider: EnvironmentProvider, folder: Path, python: Path | None, say: Say) -> str:
    """Make it and install into it what is missing; gives its path."""
    venv = folder / "venv"
    done = folder / "installed.json"
    there = _usable(venv, provider.python)
    if there is not None and python is not None:
        wanted = interpreter.find(provider.python, python)
        if wanted.version != there.version:
            say(f"{venv} has Python {there.version}; making it again with {wanted.version}")
            there = None
    if there is None:
        done.unlink(missing_ok=True)
        base = interpreter.find(provider.python, python)
        say(f"making an interpreter of its own in {venv} (Python {base.version}, from {base.path})")
        _make(venv, base.path)
        there = interpreter.ask(_python_of(venv))
    else:
        say(f"interpreter: {venv} (Python {there.version}) is there")
    if _installed(done) != list(provider.packages) or there.lacks(provider.packages):
        say(f"installing {', '.join(provider.packages)}")
        _install(name, venv, provider.packages, say)
        there = interpreter.ask(there.path, provider.requires)
        if wrong := there.lacks(provider.packages):
            raise RunError(
                f"pip says it is done, but in {venv}: {'; '.join(f'{what}: {how}' for what, how in wrong)}; "
                "look at pip's own settings with: pip config list"
            )
        done.write_text(json.dumps(list(provider.packages)))
    else:
        there = interpreter.ask(there.path, provider.requires)
        say("packages: all there")
    _check_requires(name, provider, there)
    return str(_python_of(venv))


def _usable(venv: Path, wanted: str) -> interpreter.Interpreter | None:
    """The interpreter that is there, if it runs and fits."""
    if not _python_of(venv).exists():
        return None
    try:
        there = interpreter.ask(_python_of(venv))
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
        env=interpreter.clean_environ(),
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


def _check_requires(name: str, provider: EnvironmentProvider, there: interpreter.Interpreter) -> None:
    missing = [module for module in provider.requires if module not in there.modules]
    if missing:
        how = provider.install if not has_interpreter(provider) and provider.install else f"astuner env doctor {name}"
        raise MissingDependency(
            f"the environment {name!r} needs {', '.join(missing)}, which {there.path} has not; type: {how}"
        )


def _installed(done: Path) -> list[str]:
    try:
        found = json.loads(done.read_text())
    except (FileNotFoundError, ValueError):
        return []
    return found if isinstance(found, list) else []


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        stdin=subprocess.DEVNULL,
        env=interpreter.clean_environ(),
    )


def _last_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-count:]) or "it said nothing"
