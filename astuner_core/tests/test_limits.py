"""What this machine refuses is reported in one paragraph: what, where and what to do."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from astuner import astuner_home, home_folder, recorded_process
from astuner.contracts.errors import RunError
from astuner.support import processes
from astuner.support.limits import describe_limit
from tests.table import table

LIMITS: list[tuple[BaseException, str]] = [
    (OSError(errno.ENOSPC, "No space left on device", "/data/x"), "/data/x: No space left on device; free space"),
    (OSError(errno.EDQUOT, "Disk quota exceeded", "/data/x"), "/data/x: Disk quota exceeded; free space"),
    (OSError(errno.EROFS, "Read-only file system", b"/data/x"), "/data/x: Read-only file system"),
    (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "fix the permissions"),
    (OSError(errno.EIO, "Input/output error", "/data/x"), "choose another folder"),
    (OSError(errno.EFBIG, "File too large"), "ulimit -f"),
    (OSError(errno.EMFILE, "Too many open files"), "ulimit -n"),
    (OSError(errno.ENFILE, "Too many open files in system"), "ulimit -n"),
    (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "ulimit -u"),
    (RuntimeError("can't start new thread"), "ulimit -u"),
    (OSError(errno.ENOMEM, "Cannot allocate memory"), "ulimit -v"),
    (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), "shorter"),
    (OSError(errno.ELOOP, "Too many levels of symbolic links", "/a"), "link"),
    (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), "connections"),
    (MemoryError(), "not enough memory"),
    (MemoryError("Unable to allocate 3 GiB"), "Unable to allocate 3 GiB"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "ulimit -v"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "max_model_len"),
    (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "ulimit -v"),
    (RuntimeError("Could not determine home directory."), "HOME"),
    (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "TMPDIR"),
    (sqlite3.OperationalError("database or disk is full"), "free space"),
    (sqlite3.OperationalError("unable to open database file"), "folder"),
]


@table("error, expected", LIMITS)
def test_a_limit_is_described(error: BaseException, expected: str) -> None:
    assert expected in describe_limit(error)


@table(
    "error",
    [ValueError("x"), KeyError("x"), RuntimeError("x"), FileNotFoundError(2, "No such file", "a"), OSError("x"),
     ImportError("cannot import name"), ZeroDivisionError(), sqlite3.OperationalError("no such table: x")],
)  # fmt: skip
def test_a_defect_is_none(error: BaseException) -> None:
    assert describe_limit(error) == ""


def _limited(number: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(number, (value, value))


def _closed(*numbers: int) -> Callable[[], None]:
    return lambda: [os.close(number) for number in numbers] and None  # type: ignore[func-returns-value]


def _astuner(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    program = [str(Path(sys.executable).with_name("astuner")), *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(program, text=True, check=False, timeout=120, **streams)  # type: ignore[call-overload, no-any-return]


@pytest.mark.slow
@table(
    "words, options, code, expected",
    [
        (["plugins"], {"preexec_fn": _closed(1)}, 0, ""),
        (["--help"], {"preexec_fn": _closed(0, 1, 2)}, 0, ""),
        (["plugins"], {"preexec_fn": _limited(resource.RLIMIT_NOFILE, 6)}, None, ""),
        (["run", "e.yaml"], {"preexec_fn": _limited(resource.RLIMIT_AS, 300 << 20)}, None, ""),
        (["plugins"], {"stdout": open("/dev/full", "w")}, 1, "No space left on device"),  # noqa: SIM115
        (["run", "x" * 300 + ".yaml"], {}, 2, "astuner: "),
        (["run", "e.yaml", "--run-dir", "/dev/null/x"], {}, 2, "astuner: "),
        (["kill"], {"env": {"HOME": "/dev/null", "ASTUNER_HOME": "/dev/null/x"}}, 1, "ASTUNER_HOME"),
        (["kill"], {"env": {"ASTUNER_HOME": "~nobody_of_this_name/x", "TMPDIR": "/proc"}}, None, ""),
    ],
)
def test_a_command_has_no_traceback(
    words: list[str], options: dict[str, object], code: int | None, expected: str, tmp_path: Path
) -> None:
    done = _astuner(*words, cwd=tmp_path, **options)
    assert "Traceback" not in (done.stderr or "")
    assert expected in (done.stderr or "")
    assert code in (None, done.returncode)


@pytest.mark.slow
def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.argv[1], sys.argv[1:])"
    (tmp_path / "e.yaml").write_text("astuner: {model: {path: tiny-calculator}}\n")
    folder = tmp_path / "folder"
    folder.mkdir()
    words = [str(Path(sys.executable).with_name("astuner")), "run", str(tmp_path / "e.yaml"), "--backbone", "local"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode != 0


# ----------------------------------------------------------------------------------------- the home folder


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine on which nothing but ``tmp_path / "temporary"`` can be written, as a user without an entry."""
    processes._temporary_home.cache_clear()
    monkeypatch.delenv("ASTUNER_HOME", raising=False)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "closed" not in str(path) and access(path, mode))
    (tmp_path / "closed").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


@table("home", ["closed", "closed/below", "file", "file/below", "closed/a/b/c"])
def test_a_home_that_cannot_be_written_is_replaced(
    home: str, homeless: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    processes._temporary_home.cache_clear()
    monkeypatch.setenv("HOME", str(homeless / home))
    expected = homeless / "temporary" / f"astuner-{os.getuid()}"
    assert astuner_home() == astuner_home() == expected
    assert expected.stat().st_mode & 0o777 == 0o700
    assert capsys.readouterr().err.count(f"{homeless / home}/.astuner cannot be written") == 1
    with recorded_process(os.getpid(), "test"):
        assert (expected / "processes" / f"{os.getpid()}.json").exists()


@table("name", ["file", "file/below", "/proc/none", "/dev/null", "x" * 300])
def test_a_chosen_home_that_cannot_be_used_is_named(name: str, homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASTUNER_HOME", str(homeless / name))
    with pytest.raises(RunError, match=r"/processes cannot be written .*set ASTUNER_HOME"):
        home_folder("processes")
    with pytest.raises(RunError), recorded_process(os.getpid(), "test"):
        pass


def _link(folder: Path) -> None:
    folder.symlink_to("/")


def _readable(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o755)


@table("made", [_link, _readable, Path.touch], ids=lambda f: f.__name__)
def test_a_folder_that_another_user_could_have_made_is_refused(
    made: Callable[[Path], None], homeless: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    processes._temporary_home.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("HOME", str(homeless / "closed"))
    made(tmp_path / f"astuner-{os.getuid()}")
    with pytest.raises(RunError, match="ASTUNER_HOME"):
        astuner_home()


def test_without_any_folder_it_says_so(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes._temporary_home.cache_clear()
    monkeypatch.setattr(tempfile, "tempdir", str(homeless / "missing"))
    monkeypatch.setenv("HOME", str(homeless / "closed"))
    with pytest.raises(RunError, match="ASTUNER_HOME"):
        astuner_home()
