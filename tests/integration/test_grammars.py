"""Random models under JSON schemas: whatever they write parses and satisfies the schema."""

import json
import random

import jsonschema
import pytest
from tests.extent import examples

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
            result = bundle.generate(
                "ab", token_mask=grammars.json_schema(schema), temperature=3.0, seed=seed
            )
            assert result.finish_reason == "stop", (name, result.text)
            check.validate(json.loads(result.text))


def _schema(draw, depth):
    kinds = ["integer", "string", "boolean", "null", "enum"]
    match draw.choice(kinds + ["object", "array", "anyOf"] * (depth > 0)):
        case "integer":
            least = draw.randint(-50, 50)
            return {"type": "integer", "minimum": least, "maximum": least + draw.randint(0, 60)}
        case "string":
            least = draw.randint(0, 2)
            return {"type": "string", "minLength": least, "maxLength": least + draw.randint(0, 4)}
        case "enum":
            values = ["ab", 'a"b\\', "é\n", 1, -2.5, True, None, [], {"a": 1}]
            return {"enum": draw.sample(values, draw.randint(1, 4))}
        case "object":
            names = draw.sample(["a", "ab", "é", "x y", '"q"', "12"], draw.randint(0, 3))
            members = {name: _schema(draw, depth - 1) for name in names}
            return strict(tuple(name for name in names if draw.random() < 0.6), **members)
        case "array":
            least = draw.randint(0, 2)
            return {"type": "array", "items": _schema(draw, depth - 1), "minItems": least,
                    "maxItems": least + draw.randint(0, 2)}  # fmt: skip
        case "anyOf":
            return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
        case kind:
            return {"type": kind}


def test_what_a_random_model_writes_satisfies_a_random_schema(bundle, grammars):
    for seed in range(examples(10, 40)):
        schema = _schema(random.Random(seed), 2)
        mask = grammars.json_schema(schema)
        result = bundle.generate("ab", token_mask=mask, temperature=3.0, seed=seed)
        if result.finish_reason == "context":  # only its beginning is known to be right
            assert not mask.accepts(result.token_ids), seed
            continue
        assert result.finish_reason == "stop", seed
        assert mask.accepts(result.token_ids), seed
        jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))
