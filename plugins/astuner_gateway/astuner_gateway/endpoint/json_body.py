"""From the bytes of a request to a JSON object that is safe to work on, or a refusal in the API's words.

Invariant: what comes out can be written as JSON and encoded again (see `astuner.support.strict_json`).
"""

from __future__ import annotations

from typing import Any

from astuner.support import strict_json
from astuner_gateway.endpoint.errors import ApiError

MAX_BYTES = 32 << 20


def parse(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``.

    :raises ApiError: 400, there is none.
    """
    try:
        return strict_json.parse(raw)
    except ValueError as e:
        raise ApiError(400, f"the request's body cannot be read as JSON: {e}", code="invalid_json") from None
