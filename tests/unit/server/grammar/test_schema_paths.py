"""Where an error in a schema is."""

import pytest

from prejit.runtime.errors import UsageError
from prejit.server.grammar.schema_paths import error_path

BAD = {"type": "string", "pattern": "(?=a)b"}


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "foo"}, ""),
        ({"properties": {"a/b~": {"items": {"anyOf": [{"type": "null"}, BAD]}}}},
         "/properties/a~1b~0/items/anyOf/1"),
        ({"type": "array", "prefixItems": [True, {"not": {}}]}, "/prefixItems/1"),
        ({"$defs": {"n": {"additionalProperties": BAD}}, "properties": {"k": {"$ref": "#/$defs/n"}}},
         "/$defs/n/additionalProperties"),
        ({"properties": {"k": {"$ref": "https://other.example/s"}}}, "/properties/k"),
        ({"properties": {"all": {"$ref": "#"}, "bad": {"type": "string", "format": "shoe-size"}}},
         "/properties/bad"),
        ({"properties": {"a": False}, "type": "object", "required": ["a"]}, ""),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, ""),
    ],
)  # fmt: skip
def test_an_error_names_the_part_of_the_schema(grammars, schema, path):
    with pytest.raises(UsageError) as error:
        grammars.json_schema(schema)
    assert str(error.value).startswith(f"schema{path}: expected a JSON schema that a grammar can ")
    assert "\n" not in str(error.value)
    assert error.value.hint


def test_the_search_for_a_place_ends():
    tried = []

    def error_of(schema):
        tried.append(schema)
        return "wrong"

    deep = {}
    for _ in range(2000):
        deep = {"items": deep}
    assert error_path({"anyOf": [{}] * 3}, "wrong", error_of) == "/anyOf/0"
    assert error_path(deep, "wrong", error_of) == ""  # deeper than Python recurses
    wide = {"anyOf": [{}] * 5000}
    tried.clear()
    assert error_path(wide, "other", error_of) == ""
    assert len(tried) == 500
