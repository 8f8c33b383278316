"""Structured answers: the JSON schema that a request asks for, and whether a text is what it describes.

Sampling is never constrained to it; the endpoint says afterwards whether the model complied.  Invariant: no schema
makes the endpoint fetch anything, fail or stand still: one that cannot be used is refused before the model is asked,
and checking an answer takes a bounded number of steps.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from astuner.contracts.errors import MissingDependency
from astuner_gateway.endpoint import schema_limits
from astuner_gateway.endpoint.counted import TooMuchWork, counted, limited
from astuner_gateway.endpoint.errors import refused

ANY_OBJECT: dict[str, Any] = {"type": "object"}

_MOST = 200
"""Characters of one mistake."""
_SHOWN = 3
"""Mistakes that are told."""
_LONGEST = 1 << 20
"""Characters of an answer that is checked."""
_STEPS, _PROBE_STEPS = 100_000, 25_000


@dataclass(frozen=True)
class Structure:
    """A JSON schema that can be used."""

    schema: Mapping[str, Any]

    @classmethod
    def of(cls, schema: Any, path: str) -> Structure:
        """
        :param path: the field it came in.
        :raises ApiError: 400, it cannot be used.
        """
        if not isinstance(schema, dict) or schema.get("type", "object") != "object":
            raise refused(path, "must be the JSON schema of an object")
        schema_limits.check(schema, path)
        _validator(json.dumps(schema, sort_keys=True), path)
        return cls(schema)

    def complaint(self, text: str) -> str | None:
        """Why ``text`` is not what the schema describes; None when it is."""
        if len(text) > _LONGEST:
            return f"it is longer than the {_LONGEST} characters that are checked"
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as e:
            return f"it is not JSON ({e})"
        if not isinstance(value, dict) and self.schema == ANY_OBJECT:
            return f"it is not a JSON object, but {type(value).__name__}"
        validator = _validator(json.dumps(self.schema, sort_keys=True), "the schema")
        try:
            with limited(_STEPS, len(text)):
                errors = sorted(validator.iter_errors(value), key=lambda e: (len(e.absolute_path), e.json_path))
        except RecursionError:
            return "it is nested too deep for the schema"
        except TooMuchWork as e:
            return f"it cannot be checked: {e}"
        except ArithmeticError:
            return "a number in it is too large to be checked"
        if not errors:
            return None
        more = f"; and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
        return "; ".join(f"{e.json_path}: {e.message[:_MOST]}" for e in errors[:_SHOWN]) + more


@functools.lru_cache(maxsize=64)
def _validator(schema_text: str, path: str) -> Any:
    """A validator that knows no other documents than JSON Schema's own."""
    try:
        import jsonschema
        import referencing
        import referencing.exceptions
    except ImportError as e:
        raise MissingDependency(
            f"structured answers need the package jsonschema ({e}); install it with: "
            "pip install astuner-gateway"
        ) from e
    schema = json.loads(schema_text)
    unusable: tuple[type[Exception], ...] = (jsonschema.SchemaError, referencing.exceptions.Unresolvable)
    try:
        kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
        for name in ("$schema", "$id", "id"):  # references stay in here, and all parts are checked by the same class
            if isinstance(schema.get(name), str):
                del schema[name]
        kind.check_schema(schema)
        registry: Any = referencing.Registry()
        validator = counted(kind)(schema, registry=registry)
        probes: tuple[Any, ...] = ({}, [], "", 0, None)  # a schema that leads in a circle shows with one of these
        with limited(_PROBE_STEPS):
            for probe in probes:
                list(validator.iter_errors(probe))
    except RecursionError:
        raise refused(path, "is a schema that leads in a circle") from None
    except TooMuchWork:
        raise refused(path, "is a schema that leads in a circle or has too many parts for one place") from None
    except unusable as e:
        raise refused(path, f"is no usable JSON schema: {str(e).splitlines()[0][:_MOST]}") from None
    except Exception as e:  # a keyword of a wrong type, …
        raise refused(path, f"is no usable JSON schema ({type(e).__name__}: {str(e)[:_MOST]})") from None
    return validator


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
