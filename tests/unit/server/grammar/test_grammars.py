"""Grammars of a bundle: what they and their masks take, what they refuse and how, and what they keep."""

import functools
import itertools
import json
import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.threads import in_threads

from prejit.runtime import load
from prejit.runtime.errors import UsageError
from prejit.server.grammar import grammar_compiling
from prejit.server.grammar import grammars as module
from prejit.server.grammar.grammar_sources import ToolForm, any_source, error_path, schema_source
from prejit.server.grammar.grammars import GrammarMask, Grammars, token_table


def nested(depth):
    return functools.reduce(lambda schema, _: {"items": schema}, range(depth), {"type": "object"})


def check(bundle, mask, good, bad):
    """Check that a mask accepts all good texts, and no bad one."""
    found = {text: bool(mask.accepts(bundle.tokenizer.encode(text))) for text in (*good, *bad)}
    assert found == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


def follow(mask, tokens):
    """Check that a mask allows each token of a text after those before it."""
    for place, token_id in enumerate(tokens):
        assert mask(tokens[:place])[token_id]


TWO = {
    "type": "object", "required": ["b", "a"], "additionalProperties": False,
    "properties": {"b": {"type": "integer"}, "a": {"type": "null"}},
}  # fmt: skip
HOSTILE = {"type": "array", "x-guidance": {"item_separator": "[^x]*", "lenient": True}}
"""With options of the library, which have no effect."""
BOOLEANS = {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}}

GBNF = r"""root ::= [\u00e9ab~~] "\[\]\\" "\\u00e9" # "\u00e"""
OPEN = {
    "type": "object", "properties": {"a": {"type": "integer"}},
    "additionalProperties": {"type": "string"},
}  # fmt: skip
NAMED = {
    "type": "object", "additionalProperties": False,
    "patternProperties": {'^[^"]$': {"$ref": "#/components/inner"}},
    "components": {"inner": {"type": "string", "pattern": '^[^"]$'}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        # Little white space, and the order of the schema.
        (lambda g: g.json_schema(TWO), ('{"b":1,"a":null}', '{"b": 1, "a": null}'),
         ('{"a":null,"b":1}', '{"b":  1,"a":null}', '{\n"b":1,"a":null}', ' {"b":1,"a":null}')),
        (lambda g: g.json_schema(HOSTILE), ("[1]",), ("[1 and 2]",)),
        (lambda g: g.json_schema(BOOLEANS, lenient=True), ("[true,true]",), ("[1]",)),
        (lambda g: g.json_schema({"enum": [2**53, 2**63 - 1]}), (str(2**53), str(2**63 - 1)), ("1",)),
        (lambda g: g.json_schema({"const": 2**53 + 1}, lenient=True), (str(2**53 + 1),), ()),
        (lambda g: g.json_schema({"type": "integer", "maximum": 2**64 - 1}), ("7",), ("7.5",)),
        # No other spelling of a name, unless the schema has control characters.
        (lambda g: g.json_schema(OPEN), (r'{"a":1,"b":"\n\""}',),
         (r'{"a":1,"\u0061":"b"}', r'{"\u0061":"b"}')),
        (lambda g: g.json_schema({**OPEN, "properties": {"a": {"const": "\x7f\x01"}}}),
         (r'{"a":"\u007f\u0001"}',), ('{"a":"a"}',)),
        # Patterns of names, and a schema under a name of no keyword.
        (lambda g: g.json_schema(NAMED), ('{"a":"b"}',), (r'{"\"":"b"}', r'{"a":"\""}')),
        (lambda g: g.json_object(), ('{"name": [1, {"é": null}]}',), ("[]",)),
        (lambda g: g.json_schema(True), ("12",), ("",)),
        (lambda g: g.mask(any_source('root ::= (("a"? ) ){2} ("b"* | "c"+)+ "?)*" # ?)*')),
         ("?)*", "aabbccb?)*"), ("aaa?)*", "ac?)", "ba?)*")),
        (lambda g: g.mask(any_source(GBNF)), (r"é[]\\u00e9", r"a[]\\u00e9", r"~[]\\u00e9"),
         ("\ue9ab" + r"[]\\u00e9", r"é[]\\é")),
        (lambda g: g.regex("a/b|\n+"), ("a/b", "\n\n"), ("a/",)),
        (lambda g: g.regex(r"\d+\.\w"), ("12.é",), ("12é",)),
    ],
)  # fmt: skip
def test_a_grammar_takes_its_texts_and_no_others(bundle, grammars, make, good, bad):
    check(bundle, make(grammars), good, bad)


BAD = {"type": "string", "pattern": "(?=a)b"}
COMPILES = "expected a JSON schema that a grammar can "


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (False, "schema: expected a JSON schema that a value satisfies, found False"),
        ({"const": float("nan")}, ".*expected values of JSON"),
        ({"const": "\ud800"}, ".*hex escape"),
        ({**HOSTILE, "uniqueItems": True}, ".*uniqueItems"),
        ({"properties": {"a/b": {"enum": [1, {"id": 2**53 + 1}]}}},
         "schema/properties/a~1b/enum: expected numbers .*found 9007199254740993"),
        ({"type": "integer", "enum": [1e19]}, "schema/enum: .*1e[+]19"),
        ({"minimum": 2**53 + 1}, "schema/minimum: .*9007199254740993"),
        ({"items": {"minProperties": 3, "required": ["a"]}},
         "schema/items/minProperties: expected at most 2 .* found 3"),
        (nested(200), ".*recursion limit"),
        (nested(100_000), ".*expected values of JSON"),
        ({"type": "foo"}, f"schema: {COMPILES}"),
        ({"properties": {"a/b~": {"items": {"anyOf": [{"type": "null"}, BAD]}}}},
         f"schema/properties/a~1b~0/items/anyOf/1: {COMPILES}"),
        ({"type": "array", "prefixItems": [True, {"not": {}}]}, f"schema/prefixItems/1: {COMPILES}"),
        ({"$defs": {"n": {"additionalProperties": BAD}}, "properties": {"k": {"$ref": "#/$defs/n"}}},
         rf"schema/\$defs/n/additionalProperties: {COMPILES}"),
        ({"properties": {"k": {"$ref": "https://other.example/s"}}}, f"schema/properties/k: {COMPILES}"),
        ({"properties": {"all": {"$ref": "#"}, "bad": {"type": "string", "format": "shoe-size"}}},
         f"schema/properties/bad: {COMPILES}"),
        ({"properties": {"a": False}, "type": "object", "required": ["a"]}, f"schema: {COMPILES}"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, f"schema: {COMPILES}"),
    ],
)  # fmt: skip
def test_what_is_no_schema_is_refused_by_the_name_of_its_part(grammars, schema, message):
    with pytest.raises(UsageError, match=f"^{message}") as error:
        grammars.json_schema(schema)
    if COMPILES in message:
        assert "\n" not in str(error.value)
        assert error.value.hint


def test_no_regular_expression_lark_grammar_or_text_is_refused(grammars, bundle_dir, decoder_dir):
    with pytest.raises(UsageError, match="look-around") as error:
        grammars.regex("(?<=b)a")
    assert "\n" not in str(error.value)
    with pytest.raises(UsageError, match=r"^grammar: expected a Lark grammar: .*unknown name"):
        grammars.lark("start: foo")
    for path, why in ((bundle_dir, "holds no decoder"), (decoder_dir, "no tokenizer")):
        with pytest.raises(UsageError, match=why):
            Grammars(load(path))


def test_a_grammar_is_compiled_once_and_few_are_kept(bundle, monkeypatch):
    sources, compile_ = [], module.compiled

    def count(tokenizer, source, size_bytes):
        sources.append(source.text)
        return compile_(tokenizer, source, 1 << 20)

    monkeypatch.setattr(module, "compiled", count)
    monkeypatch.setattr(module, "_KEPT_BYTES", 6 << 20)
    grammars = Grammars(bundle)
    # In the end "b" was used later than "a", which made room.
    for pattern, compiled in (("a", 1), ("b", 2), ("a", 2), ("b", 2), ("c", 3), ("b", 3), ("a", 4)):
        assert grammars.regex(pattern)([]).any()
        assert len(sources) == compiled


def test_one_of_many_texts_is_an_answer():
    """An enumeration of 3,000 texts ended its request with an error after the first token."""
    letters, chosen = "abcdefghijklmnop", random.Random(0)
    texts = ["".join(chosen.choices(letters, k=12)) for _ in range(6000)]
    words = [bytes([byte]) for byte in range(256)]
    words += ["".join(each).encode() for each in itertools.product(letters, repeat=3)]
    source = schema_source({"enum": texts})
    matcher = grammar_compiling.compiled(grammar_compiling.tokenizer_of(words), source).matcher
    mask = GrammarMask(matcher, len(words), ())
    follow(mask, [*f'"{texts[0]}"'.encode()])


def test_long_texts_fit_and_one_that_needs_too_much_memory_is_named(bundle, grammars):
    """Every string with a `maxLength` ended its request with an error after 1,670 characters."""
    schema = {"type": "string", "maxLength": 8000}
    text = bundle.tokenizer.encode('"' + "a" * 4000 + '"')
    follow(grammars.json_schema(schema), text)
    source, compiled_ = schema_source(schema), grammar_compiling.compiled
    tokenizer = grammars._tokenizer
    stop, size = bundle.decoder.decoder.eos_token_ids, bundle.decoder.decoder.vocab_size
    follow(GrammarMask(compiled_(tokenizer, source, 1).matcher, size, stop), text)
    text = bundle.tokenizer.encode('"' + "a" * 8000 + '"')
    mask = GrammarMask(compiled_(tokenizer, source, 1).matcher, size, stop)
    with pytest.raises(UsageError, match=r"smaller one, found after \d{4} tokens: .*many states"):
        follow(mask, text)


@pytest.mark.parametrize("of_strangers", [False, True])
def test_texts_of_many_requests_do_not_fill_a_grammar(bundle, monkeypatch, of_strangers):
    """Their lexer states added up: one request ended with an error, and then each one with its schema."""
    for limit in ("_LEXER_STATES", "_CLIENT_LEXER_STATES"):
        monkeypatch.setattr(grammar_compiling, limit, 2000)
    texts = {f"p{place}": {"type": "string", "maxLength": 300 + place} for place in range(9)}
    schema = {"type": "object", "properties": texts, "required": list(texts)}
    grammars, chosen = Grammars(bundle, of_strangers=of_strangers), random.Random(0)
    others = [grammars.json_schema(schema) for _ in range(3)]
    for mask in [grammars.json_schema(schema) for _ in range(3)] + others:
        value = {name: "a" * chosen.randint(0, 99) for name in texts}
        follow(mask, bundle.tokenizer.encode(json.dumps(value)))
    assert grammars.json_schema(schema)([]).any()
    grammars.stop_trial()


CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}},
        "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "ab"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WRONG = CALL.replace('"ab"', "12")


@pytest.mark.parametrize(
    ("required", "parallel", "good", "bad"),
    [
        (True, True, (CALL, NOW, CALL + "\n" + NOW), ("", "no", "no" + CALL, WRONG)),
        (True, False, (CALL, NOW), (CALL + NOW, "", WRONG)),
        (False, True, ("", "no", CALL, "so: " + CALL + "\n" + NOW + " done", CALL + CALL),
         (WRONG, "so: " + WRONG, "so: " + CALL[:40], '<tool_call>\n{"name": "none"')),
        (False, False, ("", "no", CALL, "so: " + CALL), (WRONG, CALL + NOW, CALL + "no")),
    ],
)  # fmt: skip
def test_answers_call_tools_as_the_request_allows(bundle, grammars, required, parallel, good, bad):
    mask = grammars.tools(TOOLS, ToolForm(), required=required, parallel=parallel)
    check(bundle, mask, good, bad)


def test_markers_references_and_keywords_of_tools(bundle, grammars):
    form = ToolForm(begin="[CALL]", end="")
    body = bundle.tokenizer.encode('{"name": "now", "arguments": {}}')
    marker = bundle.tokenizer.special_id("[CALL]")
    for required in (True, False):
        mask = grammars.tools(TOOLS, form, required=required)
        assert mask.accepts([marker, *body])
        assert mask([])[marker]
    letters = [bundle.tokenizer.encode(letter)[0] for letter in "[CALL]"]
    assert not grammars.tools(TOOLS, form, required=True).accepts([*letters, *body])
    form = ToolForm(begin="", end="", arguments_key="parameters")
    call = '{"name": "%s", "parameters": {}}'
    check(bundle, grammars.tools(TOOLS, form), (call % "now", "", "a {"), (call % "then",))
    check(bundle, grammars.tools(TOOLS, form, required=True), (), ("a {",))
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/bit"}},
                  "required": ["x"], "$defs": {"bit": {"enum": [0, 1]}}}  # fmt: skip
    tool = {"function": {"name": "flip", "parameters": parameters, "strict": True}}
    mask = grammars.tools([tool], ToolForm(), required=True)
    call = '<tool_call>\n{"name": "flip", "arguments": {"x": %d}}\n</tool_call>'
    check(bundle, mask, (call % 1,), (call % 2,))
    tool = {"function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    assert grammars.tools([tool], ToolForm(), required=True)([]).any()


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ([], "tools: expected one or more, found none"),
        ([{"function": {}}], r"tools\[0\].function.name: expected a text, found None"),
        ([*TOOLS, {"function": {"name": "f", "parameters": 3}}],
         r"tools\[2\].function.parameters: expected an object, found 3"),
        ([*TOOLS, {"function": {"name": "f", "strict": True,
                                "parameters": {"properties": {"x": {"not": {}}}}}}],
         r"tools\[2\].function.parameters/properties/x: .*not"),
        ([*TOOLS, {"function": {"name": "f", "strict": True,
                                "parameters": {"properties": {"x": {"const": 2**53 + 1}}}}}],
         r"tools\[2\].function.parameters/properties/x/const: expected numbers"),
    ],
)  # fmt: skip
def test_a_wrong_tool_is_named(grammars, tools, message):
    with pytest.raises(UsageError, match=message):
        grammars.tools(tools, ToolForm())


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^"]+$', "a\\\n", 'a"'),
        (r"^[^/\\]+$", 'a"\t', "a\\"),
        (r"^x[^-\]]{2}$", "xa\n", "xa-"),
        (r"^\[[^-x]$", "[a", "[-"),
    ],
)
def test_a_class_of_a_pattern_has_no_character_that_it_leaves_out(pattern, right, wrong):
    inner = {"type": "string", "pattern": pattern}
    data = {"const": {"pattern": "[^a]"}}  # no schema
    schema = {"properties": {"pattern": inner, "data": data}, "required": ["pattern", "data"]}
    written = schema_source(schema | {"type": "object"}).text
    matcher = LLMatcher(LLTokenizer("byte"), written)
    for value, is_right in ((right, True), (wrong, False)):
        text = json.dumps({"pattern": value, "data": data["const"]}, separators=(",", ":"))
        assert (matcher.validate_tokens([*text.encode()]) == len(text)) is is_right


def test_the_search_for_a_place_ends():
    tried = []

    def error_of(schema):
        tried.append(schema)
        return "wrong"

    assert error_path({"anyOf": [{}] * 3}, "wrong", error_of) == "/anyOf/0"
    assert error_path(nested(2000), "wrong", error_of) == ""  # deeper than Python recurses
    tried.clear()
    assert error_path({"anyOf": [{}] * 5000}, "other", error_of) == ""
    assert len(tried) == 500


def product(*parts):
    return {"".join(each) for each in itertools.product(*parts)}


LETTERS = ("ab", "a", "bc", "é")
LANGUAGES = {
    "regex": (
        lambda g: g.regex("(ab|a|bc|é){1,3}x?"),
        set().union(*(product(*[LETTERS] * count, ("", "x")) for count in (1, 2, 3))),
    ),
    "enum": (
        lambda g: g.json_schema({"enum": ["ab", "abc", "abé", 1, 12, -1, True, None]}),
        {'"ab"', '"abc"', '"abé"', "1", "12", "-1", "true", "null"},
    ),
    "lark": (
        lambda g: g.lark('start: "a" b? (C | "[1")\nb: "b" | "bc"\nC: /[0-1]{2}/'),
        product(("a",), ("", "b", "bc"), ("00", "01", "10", "11", "[1")),
    ),
    "integers": (
        lambda g: g.json_schema({"type": "integer", "minimum": -3, "maximum": 120}),
        {str(number) for number in range(-3, 121)} | {"-0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_mask_allows_what_a_list_of_all_texts_allows(bundle, grammars, name):
    make, texts = LANGUAGES[name]
    vocab_size = bundle.decoder.decoder.vocab_size
    table = token_table(bundle.tokenizer.library, vocab_size)
    (eos,) = bundle.decoder.decoder.eos_token_ids
    encoded = [text.encode() for text in texts]
    chosen = random.Random(0)
    for _ in range(25):
        mask, token_ids, text = make(grammars), [], b""
        while True:
            allowed = mask(token_ids)
            expected = np.zeros(vocab_size, np.bool_)
            for token_id, token in enumerate(table):
                if token:
                    expected[token_id] = any(one.startswith(text + token) for one in encoded)
            expected[eos] = text in encoded
            assert allowed.dtype == np.bool_
            wrong = np.flatnonzero(allowed != expected)
            assert not len(wrong), (text, [(int(i), table[i], bool(allowed[i])) for i in wrong])
            token_id = chosen.choice(np.flatnonzero(allowed).tolist())
            if token_id == eos:
                assert mask.accepts(token_ids)
                assert mask.accepts([*token_ids, eos])
                break
            token_ids.append(token_id)
            text += table[token_id] or b""


def test_tokens_outside_the_grammar_and_stop_tokens_with_a_text(bundle, grammars):
    (a,) = bundle.tokenizer.encode("a")
    mask = grammars.regex("a+b?", stop_token_ids=[a])
    assert not mask([]).take(a)  # it would end an empty text
    (b,) = bundle.tokenizer.encode("b")
    [*eos] = bundle.decoder.decoder.eos_token_ids
    for stops, tokens, allowed in (
        ([a], [], [b]),
        ([a], [b], [a]),
        (None, [b], eos),
        ((), [b], []),
    ):
        options = {} if stops is None else {"stop_token_ids": stops}
        assert np.flatnonzero(grammars.regex("b", **options)(tokens)).tolist() == allowed
    mask = grammars.regex("ab")
    bad = bundle.tokenizer.encode("ax")
    with pytest.raises(UsageError, match="expected one that allows more after"):
        mask(bad)
    assert not mask.accepts(bad)
    assert mask.accepts(bundle.tokenizer.encode("ab"))
    assert mask([]).any()


def test_threads_that_share_a_mask_do_not_disturb_each_other(bundle, grammars):
    texts = [bundle.tokenizer.encode(text) for text in ("aaaa", "aabb", "abab", "bbaa")]
    shared = grammars.regex("[ab]{5}")

    def follow(number):
        for _ in range(50):
            assert shared(texts[number]).any()
            assert not shared.accepts(texts[number])

    in_threads(len(texts), follow)
