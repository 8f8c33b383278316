"""Import user code from the folder of the experiment file.

Invariant: a reference resolves to one file, and the returned object comes from that file. A loaded module with the same
name from another folder is never reused.

A script can import modules from its folder, as with ``python script.py``. The folder comes last in ``sys.path``, so
user modules do not shadow installed packages.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import threading
import traceback
from contextlib import ExitStack, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import astuner
from astuner.contracts.errors import PluginError, RunError, UnknownName, did_you_mean, told
from astuner.plugins.import_hints import import_hint
from astuner.support.locks import LockTaken, lock_file

_HOME = Path(__file__).parents[1]
_ASTUNER = (
    os.path.join(_HOME, ""),
    os.path.join(_HOME.parents[1], "plugins", "astuner_"),  # first-party plugins in a clone of the repository
)
_LIBRARIES = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_NOT_THEIRS = ("<", *_ASTUNER, *(os.path.join(folder, "") for folder in _LIBRARIES))
_SPAWNED = '''"""Run the file below under the module name that ASTuner assigned to it."""
__file__ = {path!r}
with open(__file__, "rb") as _file:
    _code = compile(_file.read(), __file__, "exec", dont_inherit=True)
exec(_code)
'''
_SPAWNED_FOLDER, _LOCK = "astuner-user-code-", ".lock"
_lock = threading.RLock()
close_name = did_you_mean


def import_user_code(reference: str, base_dir: Path | None = None) -> Any:
    """Import ``package.module->Name`` or ``path/to/file.py->Name``.

    :param base_dir: Folder of the experiment file. Code is searched below it, its parent and the current folder; then
        modules are searched among installed packages.
    :raises UnknownName: The file, module or name does not exist. The message lists the searched folders and a similar
        name.
    :raises PluginError: The code raised while it was imported. The message names the line.
    """
    where, _, attribute = reference.replace("->", ":").rpartition(":")
    folders = _folders(base_dir)
    with _lock:
        module = (_from_file if where.endswith(".py") else _from_module)(where, folders, reference)
    try:
        return getattr(module, attribute)
    except AttributeError:
        file = getattr(module, "__file__", None) or where
        own = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        known = close_name(attribute, own) or (f"; it defines {', '.join(own)}" if own else "")
        raise UnknownName(f"{file} has no {attribute!r}{known}") from None


def find_user_file(reference: str, base_dir: Path | None = None) -> Path | None:
    """Return the user's file that a reference to code means; None if it can only mean an installed module."""
    where, _, _ = reference.replace("->", ":").rpartition(":")
    folders = _folders(base_dir)
    if where.endswith(".py"):
        return next((path for path in _candidates(where, folders) if os.path.isfile(path)), None)
    return next((file for folder in folders if (file := _module_file(folder, where)) is not None), None)


def user_module(path: Path) -> str:
    """Return the module name under which a user's file (an absolute path) is imported."""
    return f"astuner_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def raised_at(error: BaseException, *, caller: str = "") -> str:
    """Return `` (file:line in function)`` for the innermost frame of ``error`` in user code.

    Includes the library frame that raised it. Without a frame in user code, returns the innermost frame. Empty if the
    error was never raised.

    :param caller: File that called the user code. An error raised there does not concern the user code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename == caller:
        return ""
    last, own = frames[-1], [frame for frame in frames if is_own(frame.filename)]
    if not own or own[-1] is last:
        return f" ({_at(last)})"
    return f" ({_at(own[-1])}" + (")" if last.filename.startswith(_ASTUNER) else f"; raised in {_at(last)})")


def is_own(file: str) -> bool:
    """Return whether a file is user code, i.e. not part of ASTuner, Python or an installed package."""
    return not file.startswith(_NOT_THEIRS)


def written_at(code: Any) -> str:
    """Return ``file:line`` where a class or function starts, or an empty string if that is unknown."""
    try:
        code = inspect.unwrap(code)
        return f"{inspect.getsourcefile(code)}:{inspect.findsource(code)[1] + 1}"
    except (OSError, TypeError):
        return ""


def _at(frame: traceback.FrameSummary) -> str:
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


def _from_file(where: str, folders: list[Path], reference: str) -> ModuleType:
    tried = _candidates(where, folders)
    path = next((p for p in tried if os.path.isfile(p)), None)
    if path is None:
        beside = [file.name for folder in tried for file in folder.parent.glob("*.py")]
        looked = " or ".join(map(str, tried))
        raise UnknownName(f"{reference!r}: no such file: {looked}{close_name(Path(where).name, beside)}")
    name = user_module(path)
    if (loaded := sys.modules.get(name)) is not None:
        return loaded
    _make_importable(name, path)
    return _execute(importlib.util.spec_from_file_location(name, path), path, path.parent, reference)


def _make_importable(name: str, path: Path) -> None:
    """Let spawned processes import a user's file under the module name it has here.

    They unpickle a function by the name of its module and search the ``sys.path`` of this process. This requires a
    temporary folder.
    """
    with suppress(OSError):
        folder = _spawned_imports()
        (folder / f"{name}.py").write_text(_SPAWNED.format(path=str(path)), encoding="utf-8")
        if str(folder) not in sys.path:
            sys.path.append(str(folder))


@functools.cache
def _spawned_imports() -> Path:
    """Return the folder of the modules that spawned processes import; it is removed when this process ends.

    It is locked while this process or one of its forks runs. Folders left by killed processes are removed here.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_SPAWNED_FOLDER}*"):
        with suppress(OSError, LockTaken, RunError), lock_file(left / _LOCK):
            shutil.rmtree(left, ignore_errors=True)
    folder, owner = Path(tempfile.mkdtemp(prefix=_SPAWNED_FOLDER)), os.getpid()
    held = ExitStack()
    with suppress(RunError):  # without file locks, no folder is removed either
        held.enter_context(lock_file(folder / _LOCK))

    def remove() -> None:
        if os.getpid() == owner:  # not a fork
            shutil.rmtree(folder, ignore_errors=True)
            held.close()

    atexit.register(remove)
    return folder


def _from_module(name: str, folders: list[Path], reference: str) -> ModuleType:
    found = next(((folder, file) for folder in folders if (file := _module_file(folder, name)) is not None), None)
    if found is None:
        return _installed(name, folders, reference)
    folder, file = found
    top = name.partition(".")[0]
    loaded = sys.modules.get(top)
    if loaded is None:
        _execute(PathFinder.find_spec(top, [str(folder)]), file, folder, reference)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as e:  # user code may raise anything
        if loaded is not None and isinstance(e, ModuleNotFoundError) and name.startswith(e.name or "?"):
            raise PluginError(_clash(reference, file, loaded)) from None
        raise _failed(reference, folder, e) from e
    if Path(module.__file__ or "").resolve() != file:
        raise PluginError(_clash(reference, file, module))
    return module


def _installed(name: str, folders: list[Path], reference: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if not (e.name and (name == e.name or name.startswith(f"{e.name}."))):
            raise _failed(reference, None, e) from e
        beside = _defining(reference, folders)
        if len(beside) == 1 and name.partition(".")[0] == folders[0].name:
            # The legacy Quick Start writes workflow.py into the folder math_agent and refers to math_agent.math_agent.
            return _from_file(beside[0].name, folders, reference)
        attribute = reference.replace("->", ":").rpartition(":")[2]
        hint = f"; did you mean {beside[0].name}->{attribute}?" if beside else ""
        looked = ", ".join(map(str, folders))
        raise UnknownName(f"{reference!r}: no module {name} in {looked} or among installed packages{hint}") from None
    except (Exception, SystemExit) as e:  # third-party code may raise anything
        raise _failed(reference, None, e) from e


def _module_file(folder: Path, name: str) -> Path | None:
    base = folder.joinpath(*name.split("."))
    files = (base.with_name(f"{base.name}.py"), base / "__init__.py")
    return next((file.resolve() for file in files if os.path.isfile(file)), None)


def _execute(spec: ModuleSpec | None, file: Path, folder: Path, reference: str) -> ModuleType:
    if spec is None:
        raise PluginError(f"{reference!r}: {file} is not a Python file that can be loaded")
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # before it runs, because pickle and dataclasses look it up here
    try:
        if spec.loader is not None:
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as e:  # user code may raise anything
        del sys.modules[spec.name]
        raise _failed(reference, folder, e) from e
    return module


def _failed(reference: str, folder: Path | None, error: BaseException) -> PluginError:
    """Return the error for a failed import, with the last executed line in the user's files."""
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}: "
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        own = [f for f in frames if folder is not None and folder in Path(f.filename).parents]
        if own or (frames and folder is None):
            frame = (own or frames)[-1]
            place = f"{frame.filename}:{frame.lineno}: "
    return PluginError(f"{place}importing {reference!r} failed: {told(error)}{import_hint(error)}")


def _clash(reference: str, file: Path, loaded: ModuleType) -> str:
    other = getattr(loaded, "__file__", None) or f"the built-in or namespace package {loaded.__name__}"
    attribute = reference.replace("->", ":").rpartition(":")[2]
    return (
        f"{reference!r} means {file}, but {loaded.__name__} is already loaded from {other}; write {file}->{attribute}"
    )


def _defining(reference: str, folders: list[Path]) -> list[Path]:
    """Return the files in the experiment's folder that define the referenced class."""
    attribute = reference.replace("->", ":").rpartition(":")[2]
    defines = re.compile(rf"^class {re.escape(attribute)}\b", re.M)
    files = sorted(folders[0].glob("*.py")) if folders else []
    return [file for file in files if defines.search(file.read_text(encoding="utf-8", errors="replace"))]


def _folders(base_dir: Path | None) -> list[Path]:
    """Return the folders to search for user code, in order."""
    here = [Path(base_dir).resolve()] if base_dir is not None else []
    return list(dict.fromkeys([*here, *(folder.parent for folder in here), Path.cwd()]))


def _candidates(where: str, folders: list[Path]) -> list[Path]:
    return list(dict.fromkeys((folder / Path(where).expanduser()).resolve() for folder in folders))


if not TYPE_CHECKING:
    __getattr__ = astuner.older_names(__name__)
