"""Reading documents of strangers: each in a process of its own that can do nothing but read that file.

The process is a fork of a warm one with the parsers imported (`astuner_sandbox.isolation`), with limits of processor
time and memory, without network and other files where the system can take these away.  Invariant: a file that breaks,
hangs or blows up its parser costs that process and becomes a `BadDocument`; the caller is never at risk.
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
    """``with DocumentReader() as reader: reader.read(path)``; one thread at a time.

    :param encoding: of text, Markdown and HTML files; None: see `astuner_flywheel.documents.inside`.
    """

    def __init__(self, limits: Limits | None = None, encoding: str | None = None) -> None:
        self.limits = limits or Limits()
        self.level: Level | None = None
        """What the system granted of the confinement; known after the first document."""
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
        """The document in a file.

        :param name: what it is called in messages and records; the path as given where empty.
        :raises BadDocument: it cannot be read, or is beyond a limit; says which key raises it.
        :raises RunError: no process to read it in can be started.
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
            raise RunError(f"cannot start a process to read documents in: {e}") from e
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
                raise BadDocument(f"{name} cannot be read: its process answered nonsense ({e})") from None
            finally:
                fork.kill()
                fork.wait(_START_WITHIN)
        self.level = Level.from_json(answer["level"])
        return answer

    def _how_it_died(self, fork: Fork, name: str) -> str:
        if fork.returncode == -signal.SIGKILL and fork.cpu_s > self.limits.seconds - 1:
            return f"{name} took more than {self.limits.seconds:g} s of processor time to read; {_SECONDS}"
        return (
            f"{name} ended the process that read it ({fork.ended}): it may need more than {self.limits.memory_mb} MB "
            "(max_memory_mb), or it is damaged"
        )


_SECONDS = "max_seconds raises that, or split the file"


def check(path: Path, name: str, limits: Limits) -> str:
    """The kind of a file that may be read.

    :raises BadDocument: it is not there, no file, of another kind, or too large.
    """
    kind = KINDS.get(path.suffix.lower())
    if kind is None:
        better = _OLD_OFFICE.get(path.suffix.lower())
        hint = f"save it as {better}" if better else f"give it one of {', '.join(sorted(KINDS))}, if it is one of these"
        raise BadDocument(f"{name} has the suffix {path.suffix!r}, which is none that is read: {hint}")
    try:
        status = path.stat()
    except OSError as e:
        raise BadDocument(f"{name} cannot be opened: {e.strerror or e}") from None
    if not stat.S_ISREG(status.st_mode):
        raise BadDocument(f"{name} is no file")
    if status.st_size > limits.file_mb * 1_000_000:
        raise BadDocument(
            f"{name} has {status.st_size / 1e6:,.1f} MB, more than {limits.file_mb:g} MB; max_file_mb raises that, "
            "or split the file"
        )
    return kind


def sha256_of(path: Path, name: str) -> str:
    """The hash of a file's bytes, without holding them.

    :raises BadDocument: it cannot be read.
    """
    hashed = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                hashed.update(block)
    except OSError as e:
        raise BadDocument(f"{name} cannot be opened: {e.strerror or e}") from None
    return hashed.hexdigest()
