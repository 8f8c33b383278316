"""A bounded memory of what was computed before, shared by threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable


class RecentlyUsed:
    """Keeps the ``size`` most recently used lists; whoever asks gets a list of their own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[int, ...]] = OrderedDict()

    def get(self, key: Hashable | None, compute: Callable[[], list[int]]) -> list[int]:
        """What was kept for ``key``, else ``compute()``; None is never kept."""
        if key is None:
            return compute()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return list(self._kept[key])
        computed = compute()  # outside the lock: two threads may compute the same thing, which is harmless
        with self._lock:
            self._kept[key] = tuple(computed)
            if len(self._kept) > self._size:
                self._kept.popitem(last=False)
        return computed
