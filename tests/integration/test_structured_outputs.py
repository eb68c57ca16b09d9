"""Structured output of a random model, as vLLM, llama.cpp and OpenAI document it; and hostile requests."""

import json
import random
import re
import threading

import httpx
import jsonschema
import pytest
from tests.decoders import build
from tests.extent import examples
from tests.lettered import write_lettered
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


def tool(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


ADD = tool("add", {**CAR, "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
NONE = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = tool("now", NONE)
WRONG = tool("wrong", {**NONE, "properties": {"a": {"not": {}}}}, strict=True)
STRING = {"type": "string", "maxLength": 6}
INTEGER = {"type": "integer", "minimum": -9, "maximum": 99}


def closed_object(required=None, **properties):
    """A schema of an object with these members only, all of them required if nothing else is said."""
    names = list(properties if required is None else required)
    return {"type": "object", "properties": properties, "required": names,
            "additionalProperties": False}  # fmt: skip


SCHEMAS = {
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "pattern": {"type": "string", "pattern": "^[A-C]{2}-[0-9]{1,4}$"},
    "date": {"type": "string", "format": "date"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "uuid": {"type": "string", "format": "uuid"},
    "const": {"const": {"k": ["é", 1.5, False]}},
    "tuple": {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
    "union": {"anyOf": [closed_object(kind={"const": "a"}, x=INTEGER),
                        closed_object(kind={"const": "b"}, y=STRING), {"type": "null"}]},
    "map": {"type": "object", "additionalProperties": INTEGER, "maxProperties": 2,
            "patternProperties": {"^[a-z]{1,3}$": INTEGER}},
    "tree": {"$ref": "#/$defs/tree", "$defs": {"tree": closed_object(("v",), v=INTEGER,
             left={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]}),
             "leaf": closed_object(v=INTEGER)}},
    "all": {"allOf": [{"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                      {"properties": {"b": STRING}, "required": ["b"]}], "additionalProperties": False,
            "properties": {"a": True, "b": True}},
    "types": {"type": ["integer", "boolean"], "minimum": 0, "maximum": 5},
}  # fmt: skip
DIVISOR = {"type": "integer", "multipleOf": 99_999_999}
"""Takes the grammar library minutes."""


@pytest.fixture(scope="module")
def server(lettered_bundle):
    engine = Engine(lettered_bundle, slots=2, queue=200)
    models = Models(Served("model", lettered_bundle, engine, 1))
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


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice",
         "found structured_outputs.regex and structured_outputs.choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "structured_outputs.regex",
         "found guided_regex and structured_outputs.regex"),
        ({"guided_json": CAR, "response_format": {"type": "json_object"}}, "guided_json",
         "found response_format and guided_json"),
        ({"structured_outputs": {}}, "structured_outputs", "expected one of json, regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length"),
        ({"guided_json": "{"}, "guided_json", "expected a JSON Schema"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag",
         "does not support"),
        ({"grammar": "root ::= nothing"}, "grammar", "expected a Lark or GBNF grammar: .*nothing"),
        ({"grammar": "root ::= ("}, "grammar", "expected a Lark or GBNF grammar"),
        ({"guided_regex": "("}, "guided_regex", "regex"),
        ({"guided_json": {"uniqueItems": True, "type": "array"}}, "guided_json", "uniqueItems"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "at most 262144 characters, found 300009"),
        pytest.param({"guided_json": DIVISOR}, "guided_json", "more than 2 seconds to compile",
                     marks=pytest.mark.thorough),
        ({"tools": [ADD], "guided_regex": "a"}, "guided_regex", "beside tools"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "sub"}}]}}},
         "tool_choice", "expected one of 'add', found 'sub'"),
        ({"tools": [ADD, WRONG], "tool_choice": {"type": "function", "function": {"name": "wrong"}}},
         "tools[1].function.parameters/properties/a", "not"),
        ({"tools": [WRONG], "tool_choice": "required"},
         "tools[0].function.parameters/properties/a", "not"),
        ({"tools": [ADD, WRONG], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "required", "tools": [{"type": "function", "function": {"name": "wrong"}}]}}},
         "tools[1].function.parameters/properties/a", "not"),
    ],
)  # fmt: skip
def test_what_no_answer_can_be_is_refused(server, body, param, message):
    found = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": USER, **body}, timeout=60
    )
    assert found.status_code == 400, found.text
    error = found.json()["error"]
    assert error["param"] == param
    assert re.search(message, error["message"]), error["message"]


def test_a_grammar_of_suppressed_tokens_is_not_complete(
    lettered_bundle, warm, build_cache, tmp_path
):
    model = write_lettered(tmp_path / "model")
    ids = lettered_bundle.tokenizer.library.get_vocab()
    ends = ids["</s>"]
    config = {"suppress_tokens": [ids["b"], ends, 10**6], "begin_suppress_tokens": [ids["c"]]}
    (model / "generation_config.json").write_text(json.dumps(config))
    sizes = {"batch": (1, 3), "prompt": (64,), "context": (64, 512)}
    bundle = load(build(warm, model, tmp_path, build_cache, **sizes))
    models = Models(Served("model", bundle, Engine(bundle, slots=2), 1))
    try:
        with running(models, Settings()) as server:

            def ask(regex, **fields):
                body = {"prompt": "ab", "guided_regex": regex, "max_tokens": 9, **fields}
                return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)

            for regex, place in (("xb", "after 1 tokens"), ("c", "after 0 tokens")):
                for stream in (False, True):
                    refused = ask(regex, stream=stream)
                    assert re.search(f"suppress_tokens: expected .* {place}", refused.text)
                    assert '"stop"' not in refused.text
            done = ask("xb", logit_bias={ids["b"]: 0}).json()["choices"][0]
            assert (done["text"], done["finish_reason"]) == ("xb", "stop")
            # Its end is suppressed, and nothing else.
            assert ask("xc").json()["choices"][0]["text"] == "xc"
            for prompt in ("xb", "xc"):  # scores of a prompt have no other tokens than the prompt
                body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
                scored = httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]
                assert scored["logprobs"]["tokens"] == [*prompt]
    finally:
        models.close()


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


def test_only_allowed_tools_are_called(client, server):
    name = {"type": "function", "function": {"name": "now"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [name]}}
    chat = client.chat.completions.create(
        model="model", messages=USER, tools=[ADD, NOW], tool_choice=choice, max_tokens=100,
        parallel_tool_calls=False,
    )  # fmt: skip
    assert [call.function.name for call in chat.choices[0].message.tool_calls or ()] == ["now"]
    tools = [{"type": "function", **each["function"]} for each in (ADD, NOW)]
    found = client.responses.create(
        model="model", input="ab", tools=tools, parallel_tool_calls=False, max_output_tokens=100,
        tool_choice={"type": "allowed_tools", "mode": "required",
                     "tools": [{"type": "function", "name": "now"}]},
    )  # fmt: skip
    assert [item.name for item in found.output if item.type == "function_call"] == ["now"]


@pytest.fixture(scope="module")
def grammars(lettered_bundle):
    return Grammars(lettered_bundle)


def test_what_a_random_model_writes_satisfies_its_schema(lettered_bundle, grammars):
    for name, schema in SCHEMAS.items():
        check = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        for seed in range(2):
            result = lettered_bundle.generate(
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
            return closed_object(tuple(name for name in names if draw.random() < 0.6), **members)
        case "array":
            least = draw.randint(0, 2)
            return {"type": "array", "items": _schema(draw, depth - 1), "minItems": least,
                    "maxItems": least + draw.randint(0, 2)}  # fmt: skip
        case "anyOf":
            return {"anyOf": [_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
        case kind:
            return {"type": kind}


def test_what_a_random_model_writes_satisfies_a_random_schema(lettered_bundle, grammars):
    for seed in range(examples(10, 40)):
        schema = _schema(random.Random(seed), 2)
        mask = grammars.json_schema(schema)
        result = lettered_bundle.generate("ab", token_mask=mask, temperature=3.0, seed=seed)
        if result.finish_reason == "context":  # only its beginning is known to be right
            assert not mask.accepts(result.token_ids), seed
            continue
        assert result.finish_reason == "stop", seed
        assert mask.accepts(result.token_ids), seed
        jsonschema.Draft202012Validator(schema).validate(json.loads(result.text))


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


def test_a_grammar_is_given_up_when_its_client_is_gone(server):
    for connection in flood(server, 45, "b"):
        connection.close()
    body = {"prompt": "ab", "guided_choice": ["given", "up"]}
    # Each of the 45 would take 2 seconds of a CPU.
    found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=80)
    assert found.json()["choices"][0]["text"] in ("given", "up")
    wait_for(lambda: server.requests() == 0)


def test_many_prompts_are_tokenized_off_the_event_loop(server, lettered_bundle, monkeypatch):
    """Each alone is short enough for the event loop, all of them are not."""
    threads = set()
    encode = type(lettered_bundle.tokenizer).encode

    def spy(self, *args, **kwargs):
        threads.add(threading.current_thread().name)
        return encode(self, *args, **kwargs)

    monkeypatch.setattr(type(lettered_bundle.tokenizer), "encode", spy)
    body = {"prompt": ["a " * 4_500] * 4, "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert {name.rpartition("_")[0] for name in threads} == {"prejit-text"}
