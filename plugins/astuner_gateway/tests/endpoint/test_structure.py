"""A client's JSON schema and its patterns cannot make the endpoint stand still."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest

from astuner_gateway.endpoint.errors import ApiError
from astuner_gateway.endpoint.structure import Structure
from tests.table import table

TEXT = {"type": "string"}


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def doubling(levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"$ref": f"#/$defs/a{i + 1}"}]} for i in range(levels)
    }
    return {"type": "object", "$defs": {**definitions, f"a{levels}": {}}, "$ref": "#/$defs/a0"}


@table(
    ("schema", "says"),
    [
        (doubling(40), "s is a schema of more than 100000 parts"),
        ({**doubling(40), "$ref": "#/$defs/a39", "properties": {"p": {"$ref": "#/$defs/a1"}}}, "s is a schema of more"),
        (objects(a={**TEXT, "description": "d" * 70_000}), "s is a schema of more than 64 KiB"),
        (objects(x={**TEXT, "pattern": "(a)\\1"}), "s.properties.x.pattern is a pattern that cannot be used"),
        (objects(x={**TEXT, "pattern": "(?=.*a)b"}), "s.properties.x.pattern is a pattern that cannot be used"),
        (objects(x={**TEXT, "pattern": "(" * 3}), "s.properties.x.pattern is a pattern that cannot be used"),
        (objects(x={**TEXT, "pattern": "((a{100}){100}){100}"}), "s.properties.x.pattern is a pattern that cannot"),
        ({"type": "object", "patternProperties": {"(a+": {}}}, "s.patternProperties.(a+ is a pattern that cannot be"),
        ({"type": "object", "$ref": "#/default"}, "s.$ref is '#/default'"),
        (objects(a={"$ref": "#name"}), "s.properties.a.$ref is '#name'"),
        (objects(a={"$schema": "http://json-schema.org/draft-07/schema#"}), "s.properties.a.$schema is"),
        ({"type": "object", "allOf": [{"$ref": "#"}, {"$ref": "#"}]}, "s is a schema with a circular reference"),
        ({"type": "object", "required": 5}, "s.required is"),
    ],
)
def test_a_schema_that_could_take_too_long_is_refused(schema: Any, says: str) -> None:
    with pytest.raises(ApiError) as refusal:
        Structure.of(schema, "s")
    assert refusal.value.status == 400
    assert refusal.value.message.startswith(says)


def test_a_chain_of_references_and_deep_nesting_are_refused() -> None:
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2000)}
    with pytest.raises(ApiError):
        Structure.of({"type": "object", "$defs": {**chain, "a2000": {}}, "$ref": "#/$defs/a0"}, "s")
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"not": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        Structure.of({**deep, "type": "object"}, "s")


TREE = objects(name=TEXT, children={"type": "array", "items": {"$ref": "#"}})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (TREE, {"children": [{"children": [{"name": "a"}]}]}, {"children": [{"children": [{"name": 1}]}]}),
        (objects(d={**TEXT, "pattern": r"^\d{4}-\d{2}-\d{2}$"}), {"d": "2026-01-02"}, {"d": "2026"}),
        (objects(d={**TEXT, "pattern": r"^[a-z.]+@[a-z]+\.[a-z]+$"}), {"d": "somebody@example.org"}, {"d": "x"}),
        (objects(d={**TEXT, "pattern": r"^(\d{1,3}\.){3}\d{1,3}$"}), {"d": "127.0.0.1"}, {"d": "127.0"}),
        ({"type": "object", "patternProperties": {"^x-": TEXT}}, {"x-a": "b"}, {"x-a": 1}),
        (objects(d={"type": "array", "uniqueItems": True}), {"d": [1, True, "1", [1], {"a": 1}]}, {"d": [[1], [1.0]]}),
        ({**doubling(10), "required": ["a"]}, {"a": 1}, {}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "$id": "http://x.y/z", **TREE}, {}, {"name": 1}),
        (objects(d={"multipleOf": 0.5}), {"d": 10**400}, {"d": 1.3}),
    ],
)
def test_usual_schemas_are_checked(schema: Any, right: Any, wrong: Any) -> None:
    structure = Structure.of(schema, "s")
    assert structure.complaint(json.dumps(right)) is None
    assert structure.complaint(json.dumps(wrong))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (objects(x={"items": {"enum": [{"a": i} for i in range(3000)]}}), json.dumps({"x": [{"a": 2999}] * 3000})),
        ({**doubling(12), "required": ["a"]}, '{"b": "' + "c" * 30_000 + '"}'),
        ({"type": "object"}, '{"a": "' + "b" * (2 << 20) + '"}'),
    ],
)
def test_an_answer_that_takes_too_long_is_not_what_was_asked_for(schema: Any, answer: str) -> None:
    assert re.search("can(not)? be checked|longer than", Structure.of(schema, "s").complaint(answer) or "")


BOTH = objects(a={"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, b={"type": "null"})


@table(
    ("schema", "answer", "fits"),
    [
        (objects(x={**TEXT, "pattern": "^(a+)+$"}), json.dumps({"x": "a" * 100_000 + "!"}), False),
        (objects(x={**TEXT, "pattern": "^(a|a)*$"}), json.dumps({"x": "a" * 100_000 + "!"}), False),
        (objects(x={**TEXT, "pattern": "a*b*c*d*e*f"}), json.dumps({"x": "a" * 100_000}), False),
        (objects(x={**TEXT, "pattern": "a*b"}), json.dumps({"x": "a" * 100_000}), False),
        ({"type": "object", "patternProperties": {".*.*.*x": {}}}, json.dumps({"a" * 100_000: 1}), True),
        (BOTH, '{"a": ' * 60 + '{"b":1}' + "}" * 60, False),
        (BOTH, '{"a": ' * 60 + '{"b":null}' + "}" * 60, True),
        (objects(x={"items": {"enum": [str(i) for i in range(5000)]}}), json.dumps({"x": list(range(4000))}), False),
    ],
)
def test_what_took_too_long_for_a_search_that_goes_back_is_answered_at_once(
    schema: Any, answer: str, fits: bool
) -> None:
    structure = Structure.of(schema, "s")
    began = time.monotonic()
    assert (structure.complaint(answer) is None) == fits
    assert time.monotonic() - began < 2


def test_items_that_are_not_unique_are_found_in_a_long_list() -> None:
    structure = Structure.of(objects(d={"type": "array", "uniqueItems": True}), "s")
    different = [{"a": i} for i in range(20_000)]
    assert structure.complaint(json.dumps({"d": different})) is None
    assert "non-unique" in (structure.complaint(json.dumps({"d": [*different, {"a": 7}]})) or "")
