"""Describe errors caused by limits of the machine, such as a full disk, too little memory or too many open files."""

from __future__ import annotations

import errno
import os
import sqlite3

_FOLDER = "free space, fix the permissions, or choose another folder"
_FILES = "raise the limit of open files: ulimit -n"
_PROCESSES = "stop other processes, or raise the limit of processes and threads: ulimit -u"
_MEMORY = "stop other programs, reduce batch sizes or max_model_len, or raise the memory limit: ulimit -v"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO), _FOLDER),
    errno.EFBIG: "raise the limit of file sizes: ulimit -f",
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.EAGAIN: _PROCESSES,
    errno.ENOMEM: _MEMORY,
    errno.ENAMETOOLONG: "choose a shorter name or another folder",
    errno.ELOOP: "remove the symbolic link that points to itself",
    errno.ESTALE: "remount the file system",
    errno.EADDRNOTAVAIL: "wait until other connections are closed",
}
"""Remedies by error number."""
_TEXTS = {
    "can't start new thread": _PROCESSES,
    "can't allocate memory": _MEMORY,
    "Cannot allocate memory": _MEMORY,
    "failed to map segment": _MEMORY,
    "out of memory": _MEMORY,
    "No usable temporary directory": "set TMPDIR to a writable folder",
    "Could not determine home directory": "set HOME to a folder",
    "database or disk is full": _FOLDER,
    "unable to open database file": _FOLDER,
    "attempt to write a readonly database": _FOLDER,
    "disk I/O error": _FOLDER,
}
"""Remedies by a part of the message, for errors without a number."""
_KINDS = (OSError, RuntimeError, ImportError, SystemError, sqlite3.Error)


def describe_limit(error: BaseException) -> str:
    """Return a message with a remedy if a limit of the machine caused the error, or an empty string."""
    if isinstance(error, MemoryError):
        return f"not enough memory{f' ({error})' if str(error) else ''}; {_MEMORY}"
    if not isinstance(error, _KINDS):
        return ""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
        return f"{where}{error.strerror or text}; {_REMEDIES[error.errno]}"
    if isinstance(error, FileNotFoundError) and error.filename is None and not _exists(os.curdir):
        return "the current folder was removed; change to another folder: cd FOLDER"
    remedy = next((remedy for part, remedy in _TEXTS.items() if part in text), "")
    return f"{text[:500]}; {remedy}" if remedy else ""


def _exists(folder: str) -> bool:
    try:
        return bool(os.listdir(folder) or os.getcwd())
    except OSError:
        return False
