"""Convert numbers and truth values of any library to Python's types.

Values of NumPy, torch and `decimal` are recognized by their methods, so these libraries are not imported.
"""

from __future__ import annotations

import math
import numbers
from typing import Any

_OTHER_KINDS = "cmMSUT"
"""NumPy's element kinds that are not real numbers: complex numbers, durations, times and strings."""


def as_float(value: object) -> float | None:
    """Return ``value`` as a finite float, or None if it is not a single real number.

    Real numbers are Python's numbers, truth values, objects with ``__float__`` or ``__index__``, and arrays or tensors
    with a single element. Strings, complex numbers, NaN, infinities and integers beyond the range of a float are not.
    """
    try:
        found = float(_real(value))
    except Exception:  # methods of third-party classes may raise anything
        return None
    return found if math.isfinite(found) else None


def as_bool(value: object) -> bool | None:
    """Return ``value`` as a Python bool, or None if it is neither a bool nor an array with a single bool."""
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
    """Return an object that ``float()`` converts to the intended number.

    :raises TypeError: The value is not a real number.
    """
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in [*_OTHER_KINDS] or _is_of(value, "complex") or (hasattr(value, "filled") and value.mask.any()):
        raise TypeError("not a real number, or a masked one")
    if hasattr(value, "dtype") and hasattr(value, "item"):
        value = value.item()  # raises for more than one element
    if isinstance(value, (str, bytes)) or (isinstance(value, numbers.Complex) and not isinstance(value, numbers.Real)):
        raise TypeError("not a real number")
    if not any(hasattr(type(value), method) for method in ("__float__", "__index__")):
        raise TypeError("not a number")
    return value


def _is_of(value: object, kind: str) -> bool:
    """Return whether the elements of an array or scalar are of this kind, e.g. ``bool`` or ``torch.bool``."""
    return str(getattr(value, "dtype", "")).rpartition(".")[2].startswith(kind)
