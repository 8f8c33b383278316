"""Turn numbers and truth values of any library into Python's own.

NumPy's, torch's and `decimal`'s are recognised by their methods, so no such library is imported.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

_OTHER_KINDS = "cmMSUT"
"""NumPy's kinds of elements that are not real numbers: complex numbers, durations, times and texts."""


def as_float(value: object) -> float | None:
    """Return ``value`` as a finite float; None where it is not one real number.

    Real numbers are Python's and instances of classes with ``__float__`` or ``__index__``, truth values, and arrays or
    tensors with a single element.  Texts are not, although ``float()`` reads them; nor are complex numbers, NaN,
    infinities, and integers that a float cannot hold.
    """
    try:
        found = float(_real(value))
    except Exception:  # the methods of somebody else's class may raise anything
        return None
    return found if math.isfinite(found) else None


def as_bool(value: object) -> bool | None:
    """Return ``value`` as Python's truth value; None where it is neither that nor an array's single truth value."""
    if isinstance(value, bool):
        return value
    if not _is_of(value, "bool"):
        return None
    try:
        found = value.item()  # type: ignore[attr-defined]
    except Exception:  # more than one element, among other things
        return None
    return found if isinstance(found, bool) else None


def _real(value: Any) -> Any:
    """Return what ``float()`` turns into a number and not into a guess.

    :raises TypeError: it is something else.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in [*_OTHER_KINDS] or _is_of(value, "complex") or (hasattr(value, "filled") and value.mask.any()):
        raise TypeError("not a real number, or a masked one")
    if hasattr(value, "dtype") and hasattr(value, "item"):
        value = value.item()  # of more than one element it raises
    if isinstance(value, (str, bytes)) or (isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)):
        raise TypeError("not a real number")
    if not any(hasattr(type(value), method) for method in ("__float__", "__index__")):
        raise TypeError("not a number")
    return value


def _is_of(value: object, kind: str) -> bool:
    """Whether the elements of an array, or of a library's scalar, are of this kind: ``bool``, ``torch.bool``."""
    return str(getattr(value, "dtype", "")).rpartition(".")[2].startswith(kind)
