"""Arguments that a format writes without quotes have the value that the tool's JSON schema allows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.chat.codec import ChatCodec
from astuner.testing import make_tokenizer
from astuner_families.typed_arguments import TypedArguments
from tests.table import table

DATA = Path(__file__).parent / "templates"
FAMILIES = json.loads((DATA / "families.json").read_text(encoding="utf-8"))
FORMATS = ("glm-4.5", "qwen3.5")
REFERS = {"$ref": "#/$defs/T"}
OPTIONAL_TEXT: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@cache
def codec(name: str) -> ChatCodec:
    known = FAMILIES[name]
    jinja = (DATA / known["file"]).read_text(encoding="utf-8")
    return ChatCodec(make_tokenizer(jinja, known["special"], eos_token=known["eos"]))


def written(name: str, key: str, text: str) -> str:
    """A call of the tool ``f``, in the format ``name``."""
    if name == "glm-4.5":
        return f"<tool_call>f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>\n</tool_call>"


def read(name: str, parameters: Any, text: str, key: str = "k") -> Any:
    """The value of the argument ``key`` whose characters are ``text``."""
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
    prompt_ids = codec(name).template.encode("no thought is open")
    (call,) = codec(name).template.read(written(name, key, text), [tool], prompt_ids=prompt_ids).calls
    return json.loads(call.arguments, parse_constant=pytest.fail)[key]


def properties(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"k": schema}, **more}


def with_definition(definition: Any, schema: Any = REFERS) -> dict[str, Any]:
    return properties(schema, **{"$defs": {"T": definition}})


def same(value: Any, expected: Any) -> bool:
    return type(value) is type(expected) and value == expected


@table(
    "parameters, text, value",
    [
        # references
        (with_definition({"type": "string"}), "12", "12"),
        (with_definition({"type": "string", "enum": ["11", "12"]}), "12", "12"),
        (with_definition({"type": "integer"}), "12", 12),
        (properties({"$ref": "#/definitions/T"}, definitions={"T": {"type": "string"}}), "0404", "0404"),
        (properties({"$ref": "#/definitions/a~1b~0c"}, definitions={"a/b~c": {"type": "string"}}), "1", "1"),
        (properties({"$ref": "#/%24defs/a%20b"}, **{"$defs": {"a b": {"type": "string"}}}), "1", "1"),
        (properties({"$ref": "#/$defs/list/1"}, **{"$defs": {"list": [{}, {"type": "string"}]}}), "1", "1"),
        (properties({"$ref": "#/properties/other"}) | {"properties": {
            "k": {"$ref": "#/properties/other"}, "other": {"type": "string"}}}, "1", "1"),
        (properties({"$ref": "#name"}, **{"$defs": {"T": {"$anchor": "name", "type": "string"}}}), "1", "1"),
        (properties({"$ref": "urn:x#/$defs/T"}, **{"$id": "urn:x", "$defs": {"T": {"type": "string"}}}), "1", "1"),
        (properties({**REFERS, "$defs": {"T": {"type": "string"}}}), "1", "1"),
        (properties(REFERS, **{"$defs": {"T": {"$ref": "#/$defs/U"}, "U": {"type": "string"}}}), "1", "1"),
        (with_definition({"anyOf": [{"type": "string"}, {"type": "array", "items": REFERS}]}), "[1]", [1]),
        (with_definition(REFERS), "1", 1),
        (with_definition({"type": "string", "allOf": [REFERS]}), "1", "1"),
        (properties({"$ref": "#/$defs/missing"}), "1", 1),
        (properties({"$ref": "https://elsewhere.example/s.json"}), "1", 1),
        (properties({"$ref": "#/properties/k"}), "one", "one"),
        ({"$ref": "#/$defs/Args", "$defs": {"Args": properties({"type": "string"})}}, "1", "1"),
        # combinations
        (properties({"allOf": [{"type": "string"}, {"description": "d"}]}), "404", "404"),
        (properties({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]}), "4", 4),
        (properties({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}), "4", "4"),
        (properties({"anyOf": [{"type": "string"}, {"type": "boolean"}]}), "1", "1"),
        (properties({"anyOf": [{"type": "string"}, {"type": "boolean"}]}), "true", True),
        (properties({"oneOf": [{"type": "integer"}, {"type": "string"}]}), "1.5", "1.5"),
        (properties({"oneOf": [{"const": "auto"}, {"type": "integer"}]}), "auto", "auto"),
        (properties({"not": {"type": "integer"}}), "1", "1"),
        ({"allOf": [properties({"type": "string"}), {"required": ["k"]}]}, "1", "1"),
        ({"anyOf": [properties({"type": "string"}), {"properties": {"other": {}}}]}, "1", "1"),
        ({"if": {}, "then": properties({"type": "string"})}, "1", "1"),
        # listed values
        (properties({"const": "7"}), "7", "7"),
        (properties({"const": 7}), "7", 7),
        (properties({"const": 7}), "7.0", 7.0),
        (properties({"const": 7}), "8", 8),
        (properties({"const": "7"}), "8", "8"),
        (properties({"enum": ["1", 2, None, True]}), "1", "1"),
        (properties({"enum": ["1", 2, None, True]}), "2", 2),
        (properties({"enum": ["1", 2, None, True]}), "null", None),
        (properties({"enum": ["1", 2, None, True]}), "true", True),
        (properties({"enum": ["true", "false"]}), "true", "true"),
        (properties({"enum": ["True", "None"]}), "None", "None"),
        (properties({"enum": [1, 2]}), "3", 3),
        (properties({"enum": ["1", "2"]}), "3", "3"),
        (properties({"enum": [[1, {"a": 1}], "x"]}), '[1.0, {"a": 1}]', [1.0, {"a": 1}]),
        (properties({"type": "integer", "minimum": 10}), "5", 5),
        # types
        (properties({"type": ["string", "null"]}), "null", None),
        (properties({"type": ["string", "null"]}), "5", "5"),
        (properties({"type": ["integer", "string"]}), "5", 5),
        (properties({"type": ["integer", "string"]}), "5.0", 5),
        (properties({"type": ["integer", "string"]}), "5.5", "5.5"),
        (properties({"type": "string", "nullable": True}), "null", None),
        (properties({"type": "string", "nullable": True}), "5", "5"),
        (properties({"type": "integer"}), "105.0", 105),
        (properties({"type": "integer"}), "-1.05E+2", -105),
        (properties({"type": "integer"}), "-0.0", 0),
        (properties({"type": "integer"}), "12345678901234567890.0", 12345678901234567890),
        (properties({"type": "number"}), "105.0", 105.0),
        (properties({"type": "integer"}), "105.5", "105.5"),
        (properties({"type": "number"}), "1e999", "1e999"),
        (properties({}), "[1e999]", "[1e999]"),
        (properties({"type": "number"}), "1e999999999999999999999", "1e999999999999999999999"),
        (properties({"type": "boolean"}), "True", True),
        (properties({"type": "boolean"}), "1", "1"),
        (properties({"type": ["integer", "null"]}), "None", None),
        (properties({"type": "string"}), "True", "True"),
        (properties({"type": "object"}), "{}", {}),
        (properties({"type": "array"}), "{}", "{}"),
        (properties({"minLength": 1}), "5", "5"),
        (properties({"pattern": "[0-9]+"}), "5", "5"),
        (properties({"description": "d"}), "5", 5),
        (properties({"description": "d"}), "five", "five"),
        (properties(True), "5", 5),
        ({}, "5", 5),
        (None, "5", 5),
        # names that `properties` does not list
        ({"additionalProperties": {"type": "string"}}, "5", "5"),
        ({"properties": {"other": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, "5", "5"),
        ({"properties": {"k": {"type": "integer"}}, "additionalProperties": {"type": "string"}}, "5", 5),
        ({"patternProperties": {"^k": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, "5", "5"),
        ({"patternProperties": {"^x": {"type": "string"}}, "additionalProperties": {"type": "integer"}}, "5", 5),
        ({"patternProperties": {"(": {"type": "string"}}}, "5", 5),
        ({"unevaluatedProperties": {"type": "string"}}, "5", "5"),
        ({"additionalProperties": False}, "5", 5),
    ],
)  # fmt: skip
def test_the_schema_decides_what_characters_without_quotes_mean(parameters: Any, text: str, value: Any) -> None:
    for name in FORMATS:
        assert same(read(name, parameters, text), value), (name, read(name, parameters, text))


@table("name, schema, text, value", [
    ("qwen3.5", OPTIONAL_TEXT, "None", None),  # its template writes null so
    ("qwen3.5", {"type": ["string", "boolean"]}, "True", True),
    ("qwen3.5", {}, "False", False),
    ("glm-4.5", OPTIONAL_TEXT, "None", "None"),
    ("glm-4.5", {"type": ["string", "boolean"]}, "True", "True"),
    ("glm-4.5", {}, "False", "False"),
])  # fmt: skip
def test_pythons_literals_are_text_only_where_the_template_does_not_write_them(
    name: str, schema: Any, text: str, value: Any
) -> None:
    assert same(read(name, properties(schema), text), value)


def kinds(**schemas: Any) -> list[Any]:
    """Alternative sets of arguments: the kind, and the schema of the value for this kind."""
    return [
        {"properties": {"kind": {"const": kind}, "k": schema}, "required": ["kind"]} for kind, schema in schemas.items()
    ]


TEXT_OR_NUMBER = kinds(text={"type": "string"}, number={"type": "integer"})


@table(
    "parameters, kind, value",
    [
        ({"oneOf": TEXT_OR_NUMBER}, "text", "5"),
        ({"oneOf": TEXT_OR_NUMBER}, "number", 5),
        ({"oneOf": TEXT_OR_NUMBER[::-1]}, "text", "5"),
        ({"anyOf": TEXT_OR_NUMBER}, "text", "5"),
        ({"allOf": [{"oneOf": TEXT_OR_NUMBER}]}, "text", "5"),
        ({"oneOf": [{"$ref": "#/$defs/A"}, TEXT_OR_NUMBER[1]], "$defs": {"A": TEXT_OR_NUMBER[0]}}, "text", "5"),
        ({"if": TEXT_OR_NUMBER[0], "then": properties({"type": "string"}), "else": properties({})}, "text", "5"),
        ({"if": TEXT_OR_NUMBER[0], "then": properties({"type": "string"}), "else": properties({})}, "number", 5),
        ({"oneOf": [{**properties({"type": "integer"}), "required": ["other"]}, *TEXT_OR_NUMBER]}, "text", "5"),
        ({"oneOf": TEXT_OR_NUMBER}, "unknown", 5),
    ],
)
def test_alternative_sets_of_arguments_are_told_apart_by_the_other_arguments(
    parameters: Any, kind: str, value: Any
) -> None:
    read = TypedArguments(parameters, python_literals=False).read
    assert read({"kind": kind, "k": "5"}) == read({"k": "5", "kind": kind}) == {"kind": kind, "k": value}


@table("name", FORMATS)
def test_what_the_template_writes_for_a_value_of_the_schema_is_read_as_that_value(name: str) -> None:
    for schema, value in (
        (OPTIONAL_TEXT, None),
        (OPTIONAL_TEXT, "5"),
        ({"type": ["integer", "null"]}, None),
        ({}, True),
        ({}, None),
        ({"enum": ["1", 2]}, "1"),
        ({"enum": ["1", 2]}, 2),
        ({"$ref": "#/$defs/T"}, "404"),
        ({"type": "number"}, 1e300),
        ({"type": "object"}, {"a": [None, True, "1"]}),
    ):
        parameters = with_definition({"type": "string"}, schema)
        tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}
        function = {"name": "f", "arguments": json.dumps({"k": value})}
        template = codec(name).template
        text = template.write_reply("", [{"id": "c", "type": "function", "function": function}])
        (call,) = template.read(text, [tool], prompt_ids=template.encode(template.generation_prompt)).calls
        assert same(json.loads(call.arguments)["k"], value), (schema, value, call.arguments)


def doubled(depth: int) -> dict[str, Any]:
    """Definitions of which each refers twice to the next."""
    twice = {f"T{n}": {"anyOf": [{"$ref": f"#/$defs/T{n + 1}"}] * 2} for n in range(depth)}
    return {"$defs": {**twice, f"T{depth}": {"type": "string"}}}


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"allOf": [schema]}
    return schema


@table("parameters, key", [
    ({**doubled(60), **properties({"$ref": "#/$defs/T0"})}, "k"),
    ({**doubled(60), "$ref": "#/$defs/T0"}, "k"),
    (properties(nested(100_000)), "k"),
    (nested(100_000), "k"),
    ({"patternProperties": {"^(a+)+$": {"type": "string"}}}, "a" * 40 + "b"),
    ({"patternProperties": {"a*a*a*a*a*$": {"type": "string"}}}, "a" * 4000 + "b"),
    ({"patternProperties": {r"(a?)\1(?=b)": {"type": "string"}}}, "a" * 40 + "b"),
])  # fmt: skip
def test_no_schema_takes_long_or_raises(parameters: Any, key: str) -> None:
    value = TypedArguments(parameters, python_literals=False).read({key: "5"})[key]
    assert value in (5, "5")


KEYWORDS = ["$defs", "$ref", "type", "allOf", "anyOf", "const", "enum", "not", "properties", "patternProperties", "k"]
REFERENCES = ["#", "#/", "#/$defs/0", "#/properties/k", "#a", "%", "string", "integer"]
ODD_SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(REFERENCES),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4),
    max_leaves=12,
)


@given(parameters=ODD_SCHEMAS, text=st.text(max_size=4) | st.sampled_from(["5", "5.0", "null", "True", "[]"]))
def test_reading_never_raises_and_keeps_the_characters(parameters: Any, text: str) -> None:
    value = TypedArguments(parameters, python_literals=True).read({"k": text, "x": "5"})["k"]
    assert value == text or not isinstance(value, str)
