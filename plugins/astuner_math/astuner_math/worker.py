"""The limited process: reads a question, answers whether two texts are equal as mathematics.

Run as a script, in isolated mode (``python -I worker.py``), by `astuner_math.limited` only.  It talks over its
standard input and output in frames: four bytes of length, then JSON; never pickle.  Before the first question it
gives up what it will not need: memory, files of any size, core dumps, child processes, and, by an audit hook,
every call that would start a process, open a connection or write a file.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from typing import IO, Any

HEADER = struct.Struct(">I")
_FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.", "webbrowser.")
_HARMLESS = frozenset({"os.listdir", "os.scandir"})  # how Python looks for a module to import
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def write_frame(stream: IO[bytes], value: Any) -> None:
    data = json.dumps(value).encode()
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


def read_frame(stream: IO[bytes]) -> Any:
    """The next frame, or None at the end of the stream."""
    header = _read_exactly(stream, HEADER.size)
    data = _read_exactly(stream, HEADER.unpack(header)[0]) if header else b""
    return json.loads(data) if data else None


def _read_exactly(stream: IO[bytes], size: int) -> bytes:
    """``size`` bytes of a stream that may give them in pieces; empty when it ends before."""
    data = b""
    while len(data) < size:
        piece = stream.read(size - len(data))
        if not piece:
            return b""
        data += piece
    return data


def _give_up_rights(memory_bytes: int) -> None:
    import resource

    wanted = {"RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0, "RLIMIT_NPROC": 0}
    if sys.platform == "linux":  # elsewhere RLIMIT_AS is refused or ignored
        wanted["RLIMIT_AS"] = memory_bytes
    for name, limit in wanted.items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    writes = event == "open" and isinstance(args[2], int) and args[2] & _WRITING
    if writes or (event.startswith(_FORBIDDEN) and event not in _HARMLESS):
        raise PermissionError(f"{event} is refused in the limited process")


def main() -> None:
    questions, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # whatever prints does not end up between the frames
    setup = read_frame(questions)
    try:
        sys.path[:] = setup["sys_path"]
        from astuner_math.equality import Unreadable, equal, read

        equal(read("1"), read(r"\frac{2}{2}"))  # imports everything and builds the grammar's tables, once
        _give_up_rights(setup["memory_bytes"])
    except Exception as e:
        write_frame(answers, {"failed": f"{type(e).__name__}: {e}"})
        return
    write_frame(answers, {"ready": True})

    while (question := read_frame(questions)) is not None:
        # the kernel ends this process (SIGPROF) when it has used this much more; a busy machine does not count
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])
        try:
            reference = read(question["reference"])
        except (Unreadable, RecursionError, MemoryError) as e:
            write_frame(answers, {"reference": type(e).__name__})
            continue
        write_frame(answers, {"reference": None})  # from here on, whatever goes wrong is the candidate's doing
        try:
            verdict: dict[str, Any] = {"equal": equal(reference, read(question["candidate"]))}
        except Exception as e:  # sympy raises anything, on input made by a model
            verdict = {"equal": False, "error": type(e).__name__}
        write_frame(answers, verdict)


if __name__ == "__main__":
    main()
