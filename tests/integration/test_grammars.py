"""Random models under JSON schemas: whatever they write parses and satisfies the schema."""

import json

import jsonschema
import pytest

from prejit.runtime import load
from prejit.server.grammar.grammars import Grammars

STRING = {"type": "string", "maxLength": 6}
INTEGER = {"type": "integer", "minimum": -9, "maximum": 99}


def strict(required=None, **properties):
    """A schema of an object with these members only, all of them required if nothing else is said."""
    names = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": names,
            "additionalProperties": False}  # fmt: skip


SCHEMAS = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": INTEGER,
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "string": {"type": "string", "minLength": 2, "maxLength": 8},
    "pattern": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "enum": {"enum": ["red", "green", 3, None, {"a": [1]}]},
    "const": {"const": {"k": ["é", 1.5, False]}},
    "list": {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    "object": strict(name=STRING, age=INTEGER),
    "odd names": strict(**{"é": INTEGER, "x y": STRING, '"q"': INTEGER, "12": {"type": "null"}}),
    "odd values": {"enum": ['a"b\\', "é\n", -2.5, True, []]},
    "lists of lists": {"type": "array", "items": {"type": "array", "items": STRING, "maxItems": 2},
                       "minItems": 1, "maxItems": 2},
    "optional": strict((), name=STRING, age=INTEGER, tags={"type": "array", "items": STRING,
                       "maxItems": 2}),
    "nested": strict(user=strict(name=STRING, at=strict(x=INTEGER, y=INTEGER)), ok={"type": "boolean"}),
    "union": {"anyOf": [strict(kind={"const": "a"}, x=INTEGER), strict(kind={"const": "b"}, y=STRING),
                        {"type": "null"}]},
    "map": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2,
            "patternProperties": {"^[a-z]{1,3}$": INTEGER}},
    "tree": {"$ref": "#/$defs/tree", "$defs": {"tree": strict(("v",), v=INTEGER,
             left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}), "leaf": strict(v=INTEGER)}},
    "all": {"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                      {"properties": {"b": STRING}, "required": ["b"]}], "additionalProperties": False,
            "properties": {"a": True, "b": True}},
    "types": {"type": ["integer", "boolean"], "minimum": 0, "maximum": 5},
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(lettered_dir):
    return load(lettered_dir, on_mismatch="error")


@pytest.fixture(scope="module")
def grammars(bundle):
    return Grammars(bundle)


def test_what_a_random_model_writes_satisfies_its_schema(bundle, grammars):
    for name, schema in SCHEMAS.items():
        check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for seed in range(2):
            mask = grammars.json_schema(schema)
            result = bundle.generate("ab", token_mask=mask, temperature=3.0, seed=seed)
            assert result.finish_reason == "stop", (name, result.text)
            assert mask.accepts(result.token_ids), name
            check.validate(json.loads(result.text))
