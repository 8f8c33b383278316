"""What this machine should be able to test, by a look of its own: ``python tests/should_have.py`` prints the names.

`make test` puts them into ``ASTUNER_TESTS_REQUIRE``, and then a test that needs one of them fails instead of being
skipped. Nothing of ASTuner is imported: were its own look at the kernel wrong, its tests would not be skipped silently.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import sys
from pathlib import Path

_LANDLOCK_CREATE_RULESET, _ONLY_ITS_VERSION = 444, 1


def names() -> list[str]:
    found = ["agentscope-1.0.7", "agentscope-1.0.21"]
    if sys.version_info >= (3, 11):  # what the newest frameworks require
        found.append("frameworks")
    if (3, 11) <= sys.version_info < (3, 14):  # what the package asks for
        found.append("appworld")
    if _kernel_confines():
        found.append("confinement")
    if shutil.which("chromium"):
        found.append("chromium")
    return found


def _kernel_confines() -> bool:
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    has_landlock = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _ONLY_ITS_VERSION) > 0
    return has_landlock and Path("/proc/sys/kernel/seccomp/actions_avail").exists()


if __name__ == "__main__":
    print(",".join(names()))
