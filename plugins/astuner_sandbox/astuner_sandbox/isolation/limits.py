"""What a process may use up: processor time, memory, the size of a file, open files. All of it once and for all."""

from __future__ import annotations

import resource

_MB = 1 << 20


def limit(*, cpu_s: int | None, memory_mb: int | None, file_mb: int | None, open_files: int | None) -> str | None:
    """Set what is not None for this process and its children, and forbid core dumps; why it failed, else None.

    ``cpu_s`` ends a process with SIGKILL, which nothing can ignore; memory is address space.
    """
    failed = []
    for name, number, value in (
        ("processor time", resource.RLIMIT_CPU, cpu_s),
        ("memory", resource.RLIMIT_AS, None if memory_mb is None else memory_mb * _MB),
        ("file size", resource.RLIMIT_FSIZE, None if file_mb is None else file_mb * _MB),
        ("open files", resource.RLIMIT_NOFILE, open_files),
        ("core dumps", resource.RLIMIT_CORE, 0),
    ):
        if value is None:
            continue
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(number, (value, value))
        except (ValueError, OSError) as e:  # macOS knows no limit of the address space
            failed.append(f"{name} ({e})")
    return f"this system does not limit {', '.join(failed)}" if failed else None
