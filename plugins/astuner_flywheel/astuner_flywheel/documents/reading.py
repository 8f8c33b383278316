"""Read untrusted documents, each in a separate process that can only read that file.

The process is a fork of a warm process with imported parsers (`astuner_sandbox.isolation`). It has limits of processor
time and memory, and no network or other files if the system supports that. Invariant: a file that crashes or hangs its
parser ends only that process and raises `BadDocument`.
"""

from __future__ import annotations

import hashlib
import signal
import stat
import sys
from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import astuner_flywheel
from astuner.contracts.errors import RunError
from astuner_flywheel.documents.document import KINDS, BadDocument, Document, Limits
from astuner_sandbox.isolation.channel import Channel
from astuner_sandbox.isolation.confine import Confinement, Level, readable
from astuner_sandbox.isolation.zygotes import Fork, Keeper, ZygoteFailed, ZygoteSpec

_HERE = str(Path(astuner_flywheel.__file__).absolute().parent)
_START_WITHIN = 120.0
_WALL_PER_CPU_SECOND = 10.0
_BYTES_PER_CHARACTER = 6  # of JSON in ASCII
_OLD_OFFICE = {".doc": ".docx", ".odt": ".docx", ".rtf": ".docx", ".pages": ".docx", ".epub": ".html", ".pptx": ".pdf"}


class DocumentReader(AbstractContextManager["DocumentReader"]):
    """Context manager for reading documents, used by one thread at a time.

    :param encoding: Encoding of text, Markdown and HTML files. None: see `astuner_flywheel.documents.inside`.
    """

    def __init__(self, limits: Limits | None = None, encoding: str | None = None) -> None:
        self.limits = limits or Limits()
        self.level: Level | None = None
        """Confinement that the system granted, known after the first document."""
        self._encoding = encoding
        spec = ZygoteSpec(
            python=sys.executable,
            main="astuner_flywheel.documents.inside:main",
            preload=("astuner_flywheel.documents.inside:warm",),
            lent={"astuner_flywheel": _HERE},
            environ={"HOME": "/", "TMPDIR": "/", "LANG": "C.UTF-8"},
        )
        self._zygote = Keeper(spec, _START_WITHIN)

    def __exit__(self, *ended: object) -> None:
        """End the warm process."""
        self._zygote.close()

    def read(self, path: Path, name: str = "") -> Document:
        """Return the document in a file.

        :param name: Name in messages and records. Default: the path.
        :raises BadDocument: The file cannot be read or exceeds a limit. The message names the key of the limit.
        :raises RunError: The reading process cannot be started.
        """
        name = name or str(path)
        kind = check(path, name, self.limits)
        options = {
            "path": str(path.resolve()),
            "kind": kind,
            "encoding": self._encoding,
            "bytes": int(self.limits.file_mb * 1_000_000),
            **asdict(self.limits),
            "confinement": asdict(self._confinement(path)),
        }
        try:
            answer = self._ask(options, name)
        except ZygoteFailed as e:
            raise RunError(f"cannot start the process that reads documents: {e}") from e
        if "fault" in answer:
            raise BadDocument(f"{name} {answer['fault']}")
        return Document(
            path=name,
            sha256=answer["sha256"],
            kind=kind,
            text=answer["text"],
            pages=tuple(answer["pages"]),
            notes=tuple(answer["notes"]),
        )

    def _confinement(self, path: Path) -> Confinement:
        return Confinement(
            read=(*readable(), _HERE, str(path.resolve())),
            cpu_s=max(1, round(self.limits.seconds)),
            memory_mb=self.limits.memory_mb,
            file_mb=0,
            open_files=64,
        )

    def _ask(self, options: dict[str, Any], name: str) -> Any:
        fork = self._zygote.fork(options)
        most = self.limits.characters * _BYTES_PER_CHARACTER + (1 << 20)
        with closing(Channel(fork.socket, max_bytes=most)) as channel:
            try:
                answer = channel.recv(self.limits.seconds * _WALL_PER_CPU_SECOND)
            except TimeoutError:
                raise BadDocument(f"{name} took more than {self.limits.seconds:g} s to read; {_SECONDS}") from None
            except EOFError:
                fork.wait(_START_WITHIN)
                raise BadDocument(self._how_it_died(fork, name)) from None
            except ValueError as e:
                raise BadDocument(f"{name} cannot be read: the reading process sent an invalid answer ({e})") from None
            finally:
                fork.kill()
                fork.wait(_START_WITHIN)
        self.level = Level.from_json(answer["level"])
        return answer

    def _how_it_died(self, fork: Fork, name: str) -> str:
        if fork.returncode == -signal.SIGKILL and fork.cpu_s > self.limits.seconds - 1:
            return f"{name} took more than {self.limits.seconds:g} s of processor time to read; {_SECONDS}"
        return (
            f"{name} ended the reading process ({fork.ended}): it may need more than {self.limits.memory_mb} MB "
            "(raise max_memory_mb), or it is damaged"
        )


_SECONDS = "raise max_seconds, or split the file"


def check(path: Path, name: str, limits: Limits) -> str:
    """Return the kind of a readable file.

    :raises BadDocument: The file does not exist, is not a file, has an unsupported suffix, or is too large.
    """
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        better = _OLD_OFFICE.get(path.suffix.lower())
        hint = f"save it as {better}" if better else f"rename it to one of {', '.join(sorted(KINDS))} if it is one"
        raise BadDocument(f"{name} has the unsupported suffix {path.suffix!r}: {hint}")
    try:
        status = path.stat()
    except OSError as e:
        raise BadDocument(f"{name} cannot be opened: {e.strerror or e}") from None
    if not stat.S_ISREG(status.st_mode):
        raise BadDocument(f"{name} is not a file")
    if status.st_size > limits.file_mb * 1_000_000:
        raise BadDocument(
            f"{name} has {status.st_size / 1e6:,.1f} MB, more than {limits.file_mb:g} MB; raise max_file_mb, "
            "or split the file"
        )
    return kind


def sha256_of(path: Path, name: str) -> str:
    """Return the hash of a file's bytes without loading them at once.

    :raises BadDocument: The file cannot be read.
    """
    hashed = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hashed.update(block)
    except OSError as e:
        raise BadDocument(f"{name} cannot be opened: {e.strerror or e}") from None
    return hashed.hexdigest()
