"""A lock that somebody holds is told from a file that cannot be locked."""

import errno
import fcntl
import os

import pytest

from astuner.contracts.errors import RunError
from astuner.runs.run_dir import RunDir
from astuner.support.locks import LockTaken, check_unlocked, lock_file
from tests.table import table


def refuse(monkeypatch, number):
    def flock(file, how):
        raise OSError(number, os.strerror(number))  # of the class that belongs to the number

    monkeypatch.setattr(fcntl, "flock", flock)


def test_who_holds_it_is_named_and_it_is_free_again_afterwards(tmp_path):
    path = tmp_path / "x.lock"
    check_unlocked(path)
    assert not path.exists()
    with lock_file(path):
        for again in (lambda: check_unlocked(path), lambda: lock_file(path).__enter__()):
            with pytest.raises(LockTaken) as taken:
                again()
            assert taken.value.pid == str(os.getpid())
    check_unlocked(path)
    with lock_file(path):
        pass


@table("number", [errno.EWOULDBLOCK, errno.EACCES])
def test_what_the_system_says_of_a_lock_that_is_held(tmp_path, monkeypatch, number):
    path = tmp_path / "x.lock"
    path.write_text("17")
    refuse(monkeypatch, number)
    with pytest.raises(LockTaken, match="pid 17"):
        check_unlocked(path)
    with pytest.raises(LockTaken, match="pid 17"), lock_file(path):
        pass


@table(
    ("number", "says"),
    [
        (errno.ENOLCK, "its file system does not support locks"),
        (errno.ENOSYS, "its file system does not support locks"),
        (errno.EOPNOTSUPP, "its file system does not support locks"),
        (errno.EIO, "the system refused"),
    ],
)
def test_a_file_that_cannot_be_locked_is_nobodys(tmp_path, monkeypatch, number, says):
    path = tmp_path / "x.lock"
    path.write_text("17")
    refuse(monkeypatch, number)
    why = rf"x.lock cannot be locked: {says} \({os.strerror(number)}\).*choose a folder on another file system"
    with pytest.raises(RunError, match=why):
        check_unlocked(path)
    with pytest.raises(RunError, match=why), lock_file(path):
        pass
    with pytest.raises(RunError, match=r"\.run\.lock cannot be locked"), RunDir(tmp_path / "run").locked():
        pass
    assert path.read_text() == "17"
