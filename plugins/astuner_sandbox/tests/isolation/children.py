"""What the children of the tests' zygotes do; imported by them, not by the tests. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

imported_at = os.getpid()


def echo(channel, options):
    """Answer each message with itself, the options, and who answers."""
    while True:
        message = channel.recv()
        if message == "raise":
            raise LookupError("as it was told to")
        if message == "exit 7":
            sys.exit(7)
        if message == "print":
            print("printed")
            print("and complained", file=sys.stderr)
        channel.send({"said": message, "options": options, "pid": os.getpid(), "imported_at": imported_at})


def look(channel, options):
    """What can be seen from inside."""
    importable = {}
    for name in options["names"]:
        try:
            __import__(name)
            importable[name] = True
        except ImportError:
            importable[name] = False
    channel.send(
        {
            "environ": dict(os.environ),
            "importable": importable,
            "loaded": sorted(sys.modules),
            "descriptors": sorted(int(entry) for entry in os.listdir("/proc/self/fd")),
            "session": os.getsid(0) == os.getpid(),
            "stdin": os.readlink("/proc/self/fd/0"),
        }
    )


def leave_something_running(channel, options):
    """Start a process that leaves the group, and end without it."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    channel.send(child.pid)
    channel.recv()


def start_a_thread():
    threading.Thread(target=time.sleep, args=(300,), name="left over", daemon=True).start()


def not_importable():
    raise RuntimeError("the data is not there")


def hang():
    time.sleep(300)
