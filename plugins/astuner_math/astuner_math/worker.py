"""Compare answers symbolically in a limited process.

`astuner_math.limited` runs this script in isolated mode (``python -I worker.py FD``). It exchanges JSON (never pickle)
over the pipe with the given file descriptor. Before the first question, the process gives up memory, file writes, core
dumps and child processes. An audit hook blocks calls that start a process, open a connection or write a file.

Symbolic equality comes from math-verify and SymPy, which no other module imports. math-verify parses LaTeX with its own
grammar (without `eval`) and compares exactly where possible, else to six decimal places. Its timeouts use signals and
are off: the limits of this process replace them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

_FORBIDDEN = ("os.", "subprocess.", "socket.", "shutil.", "ctypes.", "pty.", "signal.", "webbrowser.")
_HARMLESS = frozenset({"os.listdir", "os.scandir"})  # used by Python's import system
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


_SPELLED = re.compile(r"(?<![A-Za-z\\])(pi|sqrt|sin|cos|tan|log|ln|infty)(?![A-Za-z])")
_SQRT_CALL = re.compile(r"(?<!\\)\bsqrt ?\(([^()]*)\)")
_AROUND_OPERATOR = re.compile(r" ?([-+*/=<>]) ?")  # math-verify treats ` c` after `b +` as a unit
_ENUMERATION = re.compile(r" (?:\\text ?\{ ?)?(?:or|and)(?: ?\})? ")


@functools.cache
def _parser() -> Any:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # suppress its warning about disabled timeouts
    targets = (LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig())
    return functools.partial(parse, extraction_config=targets)


class Unreadable(ValueError):
    """Raised if math-verify cannot parse a text."""


def read(text: str) -> list[Any]:
    """Parse a normalized answer (`astuner_math.answers.normalise`).

    :raises Unreadable: Nothing in it can be parsed.
    """
    latex = _ENUMERATION.sub(", ", text.replace("¤", "").replace("€", ""))
    latex = _SQRT_CALL.sub(r"\\sqrt{\1}", latex)
    latex = _SPELLED.sub(r"\\\1 ", latex)
    latex = _AROUND_OPERATOR.sub(r"\1", re.sub(r"(?<!\\)%", r"\\%", latex))
    found: list[Any] = _parser()(f"${latex}$", parsing_timeout=None)
    if not found:
        raise Unreadable(text)
    return found


def equal(reference: list[Any], candidate: list[Any]) -> bool:
    """Return whether two parsed answers are equal; a relation may equal the set of its solutions.

    Answers that differ as written are evaluated and compared again.
    """
    from math_verify import verify

    if verify(reference, candidate, allow_set_relation_comp=True, timeout_seconds=None):
        return True
    mine, other = [_worked_out(one) for one in reference], [_worked_out(one) for one in candidate]
    if mine == reference and other == candidate:
        return False
    return bool(verify(mine, other, allow_set_relation_comp=True, timeout_seconds=None))


def _worked_out(found: Any) -> Any:
    """Evaluate an answer: use i as the imaginary unit, and move the unknown of `18=x` to the left."""
    import sympy

    if isinstance(found, sympy.Eq) and isinstance(found.rhs, sympy.Symbol) and not isinstance(found.lhs, sympy.Symbol):
        found = sympy.Eq(found.rhs, found.lhs, evaluate=False)
    if isinstance(found, sympy.Expr):
        found = found.subs({symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"}).doit()
    return found


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
        raise PermissionError(f"{event} is not allowed in the limited process")


def main() -> None:
    """Answer questions until the pipe is closed."""
    pipe: Connection = Connection(int(sys.argv[1]))

    def answer(**said: Any) -> None:
        pipe.send_bytes(json.dumps(said).encode())

    setup = json.loads(pipe.recv_bytes())
    try:
        sys.path[:] = setup["sys_path"]
        equal(read("1"), read(r"\frac{2}{2}"))  # warm up imports and grammar tables
        _give_up_rights(setup["memory_bytes"])
    except Exception as e:
        answer(failed=f"{type(e).__name__}: {e}")
        return
    answer(ready=True)

    while True:
        try:
            question = json.loads(pipe.recv_bytes())
        except EOFError:  # the pipe was closed
            return
        # the kernel ends this process (SIGPROF) after this much more CPU time; wall-clock time does not count
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])
        try:
            reference = read(question["reference"])
        except (Unreadable, RecursionError, MemoryError) as e:
            answer(reference=type(e).__name__)
            continue
        answer(reference=None)  # the candidate is the cause of later errors
        try:
            answer(equal=equal(reference, read(question["candidate"])))
        except Exception as e:  # SymPy may raise any exception on model output
            answer(equal=False, error=type(e).__name__)


if __name__ == "__main__":
    main()
