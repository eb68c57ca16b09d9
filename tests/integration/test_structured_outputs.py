"""Requests for structured output, as vLLM, llama.cpp and OpenAI document them; and hostile ones."""

import json
import re
import threading

import httpx
import jsonschema
import pytest
from tests.extent import ALL
from tests.unit.server.running import running, wait_for

from prejit.runtime import load
from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.grammar.grammars import Grammars
from prejit.server.served.served import Models, Served

USER = [{"role": "user", "content": "ab"}]
CAR = {
    "type": "object",
    "properties": {
        "brand": {"type": "string", "maxLength": 5},
        "car_type": {"enum": ["sedan", "SUV", "Truck", "Coupe"]},
    },
    "required": ["brand", "car_type"],
    "additionalProperties": False,
}
SQL_LARK = """\
start: select_statement
select_statement: "SELECT " column " from " table " where " condition
column: "col_1 " | "col_2 "
table: "table_1 " | "table_2 "
condition: column "= " NUMBER
NUMBER: /[12]/
"""
SQL_GBNF = """\
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""
SQL = r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ?"
MAIL = r"[a-z]{1,5}@[a-z]{1,3}\.com\n"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {**CAR, "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]},
    },
}
DIVISOR = {"type": "integer", "multipleOf": 99_999_999}
"""Takes the grammar library minutes."""


@pytest.fixture(scope="module")
def bundle(lettered_dir):
    return load(lettered_dir, on_mismatch="error")


@pytest.fixture(scope="module")
def server(bundle):
    models = Models(Served("model", bundle, Engine(bundle, slots=2, queue=200), 1))
    try:
        with running(models, Settings()) as found:
            yield found
    finally:
        models.close()


def is_car(text):
    jsonschema.validate(json.loads(text), CAR)


def matches(pattern):
    return lambda text: re.fullmatch(pattern, text) or pytest.fail(text)


is_sql, is_mail, is_choice = matches(SQL), matches(MAIL), matches("positive|negative")
is_object = matches(r"(?s)\s*\{.*")
REQUESTS = {
    "choice": ({"structured_outputs": {"choice": ["positive", "negative"]}}, is_choice),
    "regex": ({"structured_outputs": {"regex": MAIL}, "stop": ["\n\n"]}, is_mail),
    "json": ({"structured_outputs": {"json": CAR}}, is_car),
    "json as text": ({"structured_outputs": {"json": json.dumps(CAR)}}, is_car),
    "lark": ({"structured_outputs": {"grammar": SQL_LARK}}, is_sql),
    "gbnf": ({"structured_outputs": {"grammar": SQL_GBNF}}, is_sql),
    "json_object": ({"structured_outputs": {"json_object": True}, "max_tokens": 20}, is_object),
    "guided_choice": ({"guided_choice": ["positive", "negative"]}, is_choice),
    "guided_regex": ({"guided_regex": MAIL}, is_mail),
    "guided_json": ({"guided_json": CAR}, is_car),
    "guided_grammar": ({"guided_grammar": SQL_GBNF}, is_sql),
    "grammar": ({"grammar": SQL_GBNF}, is_sql),
    "json_schema": ({"json_schema": CAR}, is_car),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_what_a_request_says_it_must_be(client, name):
    body, check = REQUESTS[name]
    most = body.get("max_tokens", 100)
    body = {key: value for key, value in body.items() if key != "max_tokens"}
    common = {"model": "model", "extra_body": body}
    chat = client.chat.completions.create(messages=USER, max_tokens=most, **common)
    check(chat.choices[0].message.content or "")
    if "structured_outputs" not in body:  # an older name of the same
        return
    text = client.completions.create(prompt="ab", max_tokens=most, n=2, **common)
    for choice in text.choices:
        check(choice.text)
    pieces = client.completions.create(prompt="ab", max_tokens=most, stream=True, **common)
    check("".join(piece.choices[0].text for piece in pieces))
    if "stop" not in body:
        found = client.responses.create(input="ab", max_output_tokens=most, **common)
        check(found.output_text)


def allowed(name):
    tool = {"type": "function", "function": {"name": name}}
    allowed_tools = {"mode": "auto", "tools": [tool]}
    return {
        "tools": [ADD],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed_tools},
    }


STRUCTURED, GRAMMAR = "structured_outputs", "expected a Lark or GBNF grammar"
REFUSED = [
    ({STRUCTURED: {"regex": "a", "choice": ["a"]}}, f"{STRUCTURED}.choice",
     f"found {STRUCTURED}.regex and {STRUCTURED}.choice"),
    ({"guided_regex": "a", STRUCTURED: {"regex": "a"}}, f"{STRUCTURED}.regex",
     f"found guided_regex and {STRUCTURED}.regex"),
    ({"guided_json": CAR, "response_format": {"type": "json_object"}}, "guided_json",
     "found response_format and guided_json"),
    ({STRUCTURED: {}}, STRUCTURED, "expected one of json, regex"),
    ({STRUCTURED: {"choice": []}}, f"{STRUCTURED}.choice", "length"),
    ({STRUCTURED: {"structural_tag": "x"}}, f"{STRUCTURED}.structural_tag", "does not support"),
    ({"guided_json": "{"}, "guided_json", "expected a JSON Schema"),
    ({"grammar": "root ::= nothing"}, "grammar", f"{GRAMMAR}: .*nothing"),
    ({"grammar": "root ::= ("}, "grammar", GRAMMAR),
    ({"guided_regex": "("}, "guided_regex", "regex"),
    ({"guided_json": {"uniqueItems": True, "type": "array"}}, "guided_json", "uniqueItems"),
    ({"guided_regex": "a" * 300_000}, "guided_regex", "at most 262144 characters, found 300009"),
    ({"tools": [ADD], "guided_regex": "a"}, "guided_regex", "beside tools"),
    (allowed("sub"), "tool_choice", "expected one of 'add', found 'sub'"),
    *[({"guided_json": DIVISOR}, "guided_json", "more than 2 seconds to compile")] * ALL,
]  # fmt: skip


def test_what_no_answer_can_be_is_refused(server):
    for body, param, message in REFUSED:
        asked = {"messages": USER, **body}
        found = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=60)
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert (error["param"], bool(re.search(message, error["message"]))) == (param, True), error


def test_an_answer_beside_tools_is_a_call_or_meets_the_format(client):
    schema = {"name": "car", "schema": CAR, "strict": True}
    wanted = {"type": "json_schema", "json_schema": schema}
    kinds = set()
    for seed in range(20):
        found = client.chat.completions.create(
            model="model", messages=USER, tools=[ADD], response_format=wanted, seed=seed,
            max_tokens=100, temperature=2,
        )  # fmt: skip
        message = found.choices[0].message
        kinds.add(found.choices[0].finish_reason)
        if message.tool_calls:
            call = message.tool_calls[0]
            assert call.function.name == "add"
            assert json.loads(call.function.arguments) in ({"a": 1}, {"a": 2})
        else:
            is_car(message.content or "")
    assert kinds == {"tool_calls", "stop"}


# Hostile clients


def flood(server, count, name):
    """Send requests with a grammar that takes long, and return their connections."""
    body = {"prompt": "ab", "max_tokens": 4}
    bombs = [{**DIVISOR, "title": f"{name}{number}"} for number in range(count)]
    found = [server.send("/v1/completions", {**body, "guided_json": each}) for each in bombs]
    wait_for(lambda: server.requests() == count)
    return found


def test_scrapes_and_tokens_do_not_wait_for_grammars(server):
    """45 requests with a bomb filled the pool of threads that metrics had in common with them."""
    connections = flood(server, 45, "a")
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            for path in ("/metrics", "/page/figures", "/page/models"):
                assert http.get(path).status_code == 200
            long = {"prompt": "ab " * 20_000}
            assert http.post("/tokenize", json=long).status_code == 200
            assert http.post("/v1/completions", json={"prompt": "ab"}).status_code == 200
            assert server.requests() >= 40, "the flood had ended before"
    finally:
        for connection in connections:
            connection.close()
    wait_for(lambda: server.requests() == 0)


def test_many_prompts_are_tokenized_off_the_event_loop(server, bundle, monkeypatch):
    """Each alone is short enough for the event loop, all of them are not."""
    threads = set()
    encode = type(bundle.tokenizer).encode

    def spy(self, *args, **kwargs):
        threads.add(threading.current_thread().name)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(bundle.tokenizer), "encode", spy)
    body = {"prompt": ["a " * 4_500] * 4, "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert {name.rpartition("_")[0] for name in threads} == {"prejit-text"}


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
