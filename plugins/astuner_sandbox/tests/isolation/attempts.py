"""``python attempts.py`` reads ``{"attempts": {name: code}, "confinement", "require", "without"}`` and tries each piece
of code in a confined child of its own; prints ``{"level", "results": {name: what came of it}}``.

A piece of code says what it achieved by setting ``got``.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

from astuner_sandbox.isolation import confine, linux, seccomp
from astuner_sandbox.isolation.child import ForkedChild, ForkFailed
from astuner_sandbox.isolation.confine import Confinement


def attempt(channel, code):
    names = {"got": "nothing", "parent": PARENT}
    try:
        exec(code, names)
    except BaseException as e:
        channel.send(f"{type(e).__name__}: {e}")
    else:
        channel.send(f"got {names['got']}")


def pretend_that_it_is_missing(what):
    """As on a kernel that has not got it."""

    def refused(*args, **kwargs):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if "landlock" in what:
        linux.landlock_abi = refused
    if "seccomp" in what:
        seccomp.prctl = refused
    if "limits" in what:
        confine.resource.setrlimit = refused


PARENT = os.getpid()

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    pretend_that_it_is_missing(asked["without"])
    library = [p for p in sys.path if Path(p).is_dir()]
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in asked["confinement"].items()}
    confinement = Confinement(**{"read": (*library, "/lib", "/lib64", "/usr/lib"), **given})
    results, level = {}, None
    for name, code in asked["attempts"].items():
        try:
            child = ForkedChild(attempt, code, confinement=confinement, require=asked["require"])
        except ForkFailed as e:
            results[name] = f"ForkFailed: {e}"
            continue
        level = child.level
        try:
            results[name] = child.channel.recv(20)
        except (EOFError, TimeoutError) as e:
            results[name] = f"{type(e).__name__}, {child.kill()}"
        child.kill()
    print(json.dumps({"level": level and level.as_json(), "results": results}))
