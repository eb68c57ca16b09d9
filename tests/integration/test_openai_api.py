"""OpenAI's API over HTTP: the `openai` package against a server, and clients that send anything else."""

import contextlib
import json
from functools import partial

import httpx
import hypothesis
import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.extent import examples
from tests.unit.server.running import running, wait_for

from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.chat_completions import ChatRequest
from prejit.server.openai.completions import CompletionRequest
from prejit.server.openai.encoder_endpoints import EmbeddingRequest, RerankRequest, ScoreRequest
from prejit.server.openai.models_and_tokens import DetokenizeRequest, TokenizeRequest
from prejit.server.openai.responses_schema import ResponseRequest
from prejit.server.served.served import Models, Served

ONCE = "Once upon a time"


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Only the process that runs these tests imports openai, which takes two seconds."""
    global openai
    import openai


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
NUMBERS = {
    **{"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [2, 3]}}},
    **{"required": ["a", "b"], "additionalProperties": False},
}
FUNCTION = {"name": "add", "description": "Add numbers", "parameters": NUMBERS}
ADD = {"type": "function", "function": FUNCTION}
HUGE = b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"
USER = [{"role": "user", "content": ONCE}]


class ScriptedEngine:
    """An engine whose model writes a given text, where the request's own token mask allows that."""

    def __init__(self, bundle, engine, text):
        self._engine = engine
        self._decoder = bundle.decoder.decoder
        self._ids = bundle.tokenizer.encode(text, add_special_tokens=False)

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit(self, prompt, **options):
        return self._engine.submit(prompt, **self._scripted(options))

    def stream(self, prompt, **options):
        return self._engine.stream(prompt, **self._scripted(options))

    def _scripted(self, options):
        wanted = options.get("token_mask")

        def script(token_ids):
            mask = np.zeros(self._decoder.vocab_size, bool)
            done = len(token_ids)
            eos = self._decoder.eos_token_ids[0]
            mask[self._ids[done] if done < len(self._ids) else eos] = True
            if wanted is None:
                return mask
            allowed = wanted(token_ids)
            return mask if allowed is None or (mask & allowed).any() else allowed

        return options | {"token_mask": script}


@pytest.fixture(scope="module")
def engine(models):
    return models.get("stories").engine


@pytest.fixture(scope="module")
def server(models, engine, stories_bundle):
    """A server that has models which write given texts, too."""
    texts = {
        "hermes": f"I add. {HERMES}\n{HERMES}",
        "wrong": 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 7, "b": "x"}}\n</tool_call>',
        "prose": "I do not need a tool, 1 < 2.",
    }
    for name, text in texts.items():
        scripted = ScriptedEngine(stories_bundle, engine, text)
        models.add(Served(name, stories_bundle, scripted, 1))
    with running(models, Settings(max_tokens=250)) as found:
        yield found


@pytest.fixture(scope="module")
def complete(client):
    """Asks for a completion, a greedy one of ONCE if nothing else is said."""
    return partial(client.completions.create, model="stories", prompt=ONCE, temperature=0)


def together(found, count=1):
    """The texts of completions, which may be streamed."""
    texts = [""] * count
    for chunk in found if isinstance(found, openai.Stream) else [found]:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts


def test_a_completion_is_what_the_bundle_generates(complete, stories_bundle):
    expected = stories_bundle.generate(ONCE, max_new_tokens=20, temperature=0)
    for prompt in (ONCE, stories_bundle.tokenizer.encode(ONCE)):
        found = complete(prompt=prompt, max_tokens=20)
        assert found.choices[0].text == expected.text
        assert (found.choices[0].finish_reason, found.model) == ("length", "stories")
        assert found.usage.prompt_tokens == expected.stats.prompt_tokens
        assert found.usage.completion_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
def test_several_texts_come_in_order(complete, stories_bundle, stream):
    seeded = stories_bundle.generate_n(ONCE, 3, max_new_tokens=12, temperature=1.0, seed=7)
    found = complete(max_tokens=12, temperature=1, seed=7, n=3, stream=stream)
    assert together(found, 3) == [each.text for each in seeded]
    prompts = [ONCE, "The cat", "Lily"]
    greedy = stories_bundle.generate_batch(prompts, max_new_tokens=8, temperature=0)
    found = complete(prompt=prompts, max_tokens=8, stream=stream)
    assert together(found, 3) == [each.text for each in greedy]
    text = complete(max_tokens=40).choices[0].text
    stop = text[20:26]
    cut = complete(max_tokens=40, stop=["never", stop], echo=True, stream=stream)
    assert together(cut) == [ONCE + text.partition(stop)[0]]


def test_options_reach_the_engine(complete, stories_bundle):
    def of_bundle(**options):
        return stories_bundle.generate(ONCE, max_new_tokens=80, **options)

    greedy = of_bundle(temperature=0)
    hot = {"seed": 3, "temperature": 1.5}
    cases = [
        *({name: 2.0, "temperature": 0} for name in ("presence_penalty", "frequency_penalty")),
        {"repetition_penalty": 2.0, "temperature": 0},
        {"logit_bias": {greedy.token_ids[0]: -100}, "temperature": 0},
        *(hot | each for each in ({"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.3})),
    ]
    for options in cases:
        expected = of_bundle(**options).text
        assert expected != greedy.text, options
        assert complete(max_tokens=80, extra_body=options).choices[0].text == expected, options
    unseeded = {complete(max_tokens=16, temperature=1).choices[0].text for _ in range(4)}
    assert len(unseeded) > 1


def test_streams_end_with_the_usage_where_it_is_wanted(complete):
    options = {"max_tokens": 5, "stream": True}
    *chunks, last = complete(stream_options={"include_usage": True}, **options)
    assert (last.choices, last.usage.completion_tokens) == ([], 5)
    assert last.usage.total_tokens == last.usage.prompt_tokens + 5
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in complete(**options))


def test_cached_tokens_are_counted_for_the_same_salt(complete):
    prompt = "Tim and Sue went to the park to play with a big red ball and a dog. " * 2
    first, again, other = (
        complete(prompt=prompt, max_tokens=2, extra_body={"cache_salt": salt}).usage
        for salt in ("mine", "mine", "other")
    )
    assert again.prompt_tokens_details.cached_tokens > 0
    for usage in (first, other):
        assert usage.prompt_tokens_details.cached_tokens == 0


def test_what_answers_of_one_request_share_is_not_cached(client):
    words = [{"role": "user", "content": "Tim and Sue went to the park to play with a ball. " * 2}]
    options = {"n": 4, "temperature": 1.5, "stop": ["e"], "stream": True, "messages": words}
    options |= {"model": "stories", "stream_options": {"include_usage": True}}
    for seed in range(4):  # so that any answer is the first to end
        salt = {"cache_salt": f"seed {seed}"}
        *_, last = client.chat.completions.create(seed=seed, extra_body=salt, **options)
        assert last.usage.prompt_tokens_details.cached_tokens == 0


def same_logprobs(found, expected):
    """Compare the tokens of two requests; what each has cached decides the last bits of its logits."""
    assert [each.token for each in found] == [each.token for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        likely = [each.logprob for each in other.top_logprobs]
        assert [each.logprob for each in one.top_logprobs] == pytest.approx(likely, abs=1e-4)


def test_a_chat_goes_through_the_template(client, stories_bundle):
    expected = stories_bundle.generate(ONCE, max_new_tokens=20, temperature=0, logprobs=2)
    options = {"model": "stories", "messages": USER, "temperature": 0}
    options |= {"max_completion_tokens": 20, "logprobs": True, "top_logprobs": 2}
    found = client.chat.completions.create(**options)
    [choice] = found.choices
    assert (choice.message.content, choice.message.role) == (expected.text, "assistant")
    assert choice.message.tool_calls is None
    assert found.usage.prompt_tokens == expected.stats.prompt_tokens
    tokens = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == expected.text
    for token, logprob in zip(tokens, expected.logprobs, strict=True):
        assert token.logprob == pytest.approx(logprob.logprob, abs=1e-4)
        likely = [each.logprob for each in token.top_logprobs]
        assert likely == pytest.approx([value for _, value in logprob.top], abs=1e-4)
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**options)
    parts = [chunk.choices[0] for chunk in chunks]
    assert "".join(part.delta.content or "" for part in parts) == expected.text
    assert [part.delta.role for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
    assert parts[-1].finish_reason == "length"
    same_logprobs([t for part in parts if part.logprobs for t in part.logprobs.content], tokens)
    details = {"prompt_tokens_details": last.usage.prompt_tokens_details}
    assert last.usage == found.usage.model_copy(update=details)


@pytest.mark.thorough
def test_arguments_of_a_strict_function_follow_its_schema(client):
    options = {"messages": USER, "max_tokens": 100, "temperature": 0}
    strict = {**ADD, "function": {**FUNCTION, "strict": True}}
    loose, tight = (
        client.chat.completions.create(model="wrong", tools=[tool], **options).choices[0]
        for tool in (ADD, strict)
    )
    [wrong], [right] = (
        [json.loads(call.function.arguments) for call in each.message.tool_calls or []]
        for each in (loose, tight)
    )
    assert wrong == {"a": 7, "b": "x"}  # what the model writes
    assert (right["a"] in (1, 2), right["b"] in (2, 3)) == (True, True)
    for each in (loose, tight):
        assert (each.message.content, each.finish_reason) == ("I add.", "tool_calls")
    prose = client.chat.completions.create(model="prose", tools=[strict], **options).choices[0]
    assert prose.message.tool_calls is None  # the model decides
    assert prose.message.content.strip() == "I do not need a tool, 1 < 2."
    schema = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
    refused = {"type": "function", "function": {"name": "a", "parameters": schema, "strict": True}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.parameters"):
        client.chat.completions.create(model="wrong", tools=[refused], **options)


def chat(client, model, *, stream, **options):
    """The choice of a chat, which may be streamed."""
    if not stream:
        return client.chat.completions.create(model=model, messages=USER, **options).choices[0]
    with client.chat.completions.stream(model=model, messages=USER, **options) as events:
        return events.get_final_completion().choices[0]


@pytest.mark.parametrize("stream", [True, False])
def test_calls_of_tools_are_taken_out_of_the_text(client, stream):
    choice = chat(client, "hermes", stream=stream, tools=[ADD], max_tokens=250, temperature=0)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content.strip() == "I add."
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}] * 2
    assert {call.function.name for call in calls} == {"add"}
    assert len({call.id for call in calls}) == 2
    hidden = chat(client, "hermes", stream=stream, tools=[ADD], tool_choice="none", max_tokens=250)
    assert hidden.message.tool_calls is None


def no_white_space(bundle):
    """A bias without which this model writes white space between the parts of JSON until its limit."""
    tokens = bundle.tokenizer.token_bytes
    return {str(each): -100 for each in range(512) if tokens[each].isspace()}


@pytest.mark.parametrize(
    ("choice", "stream"),
    [("required", True), ({"type": "function", "function": {"name": "add"}}, False)],
)
def test_a_grammar_forces_calls(client, stories_bundle, choice, stream):
    options = {"tools": [ADD], "tool_choice": choice, "parallel_tool_calls": False}
    options |= {"max_tokens": 250, "seed": 1, "logit_bias": no_white_space(stories_bundle)}
    [call] = chat(client, "stories", stream=stream, **options).message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"a", "b"}


BALL = {"colour": {"enum": ["red", "blue"]}, "big": {"type": "boolean"}}
SCHEMA = {**NUMBERS, "properties": BALL, "required": ["colour", "big"]}


def test_json_of_a_schema_is_what_comes(client, post, stories_bundle):
    bias = no_white_space(stories_bundle)
    wanted = {"type": "json_schema", "json_schema": {"name": "ball", "schema": SCHEMA}}
    found = client.chat.completions.create(
        model="stories", messages=USER, response_format=wanted, n=2, logit_bias=bias
    )
    for choice in found.choices:
        assert choice.finish_reason == "stop"
        value = json.loads(choice.message.content)
        assert value.keys() == {"colour", "big"}
        assert value["colour"] in ("red", "blue")
    form = {"format": {"type": "json_schema", "name": "ball", "schema": SCHEMA}}
    options = {"model": "stories", "input": ONCE, "extra_body": {"logit_bias": bias}}
    responded = client.responses.create(text=form, **options)
    assert json.loads(responded.output_text).keys() == {"colour", "big"}
    any_object = {"response_format": {"type": "json_object"}, "max_tokens": 30}
    found = client.chat.completions.create(model="stories", messages=USER, **any_object)
    assert found.choices[0].message.content.lstrip().startswith("{")
    for strict, status in ((True, 400), (False, 200)):  # no grammar enforces this one
        schema = {"type": "array", "uniqueItems": True, "maxItems": 0}
        wanted["json_schema"] = {"name": "s", "schema": schema, "strict": strict}
        body = {"model": "stories", "messages": USER, "response_format": wanted}
        answer = post("/v1/chat/completions", body)
        assert answer.status_code == status, answer.text
        assert ("uniqueItems" in answer.text) == strict


def test_responses_are_whole_and_streamed(client, stories_bundle):
    expected = stories_bundle.generate(ONCE, max_new_tokens=20, temperature=0)
    options = {"model": "stories", "input": ONCE, "max_output_tokens": 20, "temperature": 0}
    options |= {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**options)
    [[part]] = (message.content for message in whole.output)
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * 20
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode() == part.text
    assert (whole.output_text, whole.status) == (expected.text, "incomplete")
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 20
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert [kind.removeprefix("response.") for kind in kinds] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    [[again]] = (message.content for message in events[-1].response.output)
    assert again.text == part.text
    same_logprobs(again.logprobs, part.logprobs)
    # The last token belongs to the stop string: it has no text.
    stopping = {**options, "extra_body": {"stop": expected.text[20:30]}}
    [[part]] = (message.content for message in client.responses.create(**stopping).output)
    *_, last = client.responses.create(stream=True, **stopping)
    [[again]] = (message.content for message in last.response.output)
    assert again.text == part.text == expected.text[:20]
    same_logprobs(again.logprobs, part.logprobs)


@pytest.mark.parametrize("name", ["hermes", "prose"])
def test_the_client_accumulates_streamed_responses(client, name):
    tool = {"type": "function", "strict": True, **FUNCTION}
    options = {"model": name, "input": ONCE, "tools": [tool], "max_output_tokens": 250}
    with client.responses.stream(**options) as events:
        for event in events:
            if event.type == "response.output_item.done":
                assert event.item.status == "completed"
        streamed = events.get_final_response()
    whole = client.responses.create(**options)
    assert streamed.status == whole.status == "completed"
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["add"] * {"hermes": 2, "prose": 0}[name]
    assert all(json.loads(call.arguments) == {"a": 1, "b": 2} for call in calls)


def test_embeddings_are_those_of_the_bundle(client, encoder_bundle):
    texts = ["a b c", "d", "e f"]
    expected = encoder_bundle.encode(texts)
    packed = client.embeddings.create(model="tiny", input=texts)  # asks for base64
    plain = client.embeddings.create(
        model="tiny", input=texts, encoding_format="float", dimensions=expected.shape[1]
    )
    for found in (packed, plain):
        vectors = np.array([each.embedding for each in found.data], np.float32)
        assert np.abs(vectors - expected).max() <= 1e-5
        assert [each.index for each in found.data] == [0, 1, 2]
        assert found.usage.prompt_tokens == 5 + 3 + 4
    assert len(client.embeddings.create(model="tiny", input=[[2, 7, 3]]).data) == 1


def test_tokenize_and_back(post, stories_bundle):
    tokenizer = stories_bundle.tokenizer

    def tokens(**body):
        return post("/tokenize", {"model": "stories", **body}).json()

    found = tokens(prompt=ONCE)
    ids = tokenizer.encode(ONCE)
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 320, "token_strs": None}
    bare = tokens(prompt=ONCE, add_special_tokens=False, return_token_strs=True)
    assert bare["tokens"] == tokenizer.encode(ONCE, add_special_tokens=False)
    assert "".join(bare["token_strs"]).strip() == ONCE
    assert tokens(messages=USER)["tokens"] == stories_bundle.apply_chat_template(USER)
    long = "word " * 4000  # it is tokenized off the event loop
    assert tokens(prompt=long)["tokens"] == tokenizer.encode(long)
    assert post("/detokenize", {"model": "stories", "tokens": ids}).json() == {"prompt": ONCE}


def test_models_are_listed_and_described(client, stories_bundle):
    assert {"stories", "tiny"} <= {each.id for each in client.models.list()}
    found = client.models.retrieve("stories")
    assert (found.created, found.root) == (1_700_000_000, stories_bundle.digest)
    assert found.max_model_len == 320
    with pytest.raises(openai.NotFoundError, match="'missing'"):
        client.models.retrieve("missing")


def test_effort_is_a_variable_of_the_template(post, stories_bundle):
    expected = len(stories_bundle.tokenizer.encode(f"high{ONCE}"))
    chat = {"model": "stories", "messages": USER, "max_tokens": 1, "reasoning_effort": "high"}
    assert post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"] == expected
    respond = {"model": "stories", "input": ONCE, "max_output_tokens": 1}
    found = post("/v1/responses", {**respond, "reasoning": {"effort": "high"}}).json()
    assert (found["usage"]["input_tokens"], found["reasoning"]["effort"]) == (expected, "high")


def test_errors_have_their_status(client, post):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as raised:
            client.completions.create(model="stories", prompt="word " * 1000, stream=stream)
        assert raised.value.code == "context_length_exceeded"
    nested, latin = b'{"a":' * 20_000, b'{"prompt": "\xff"}'
    for body in (b"", b"[]", b"\xff", latin, nested, b'{"x": NaN}', HUGE):
        assert post("/v1/completions", body).status_code == 400, body[:20]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_requests(server, engine, stream):
    body = {"model": "stories", "prompt": ONCE, "max_tokens": 250, "ignore_eos": True}
    body |= {"n": 3, "stream": stream}
    before = engine.metrics().finished.get("cancelled", 0)
    for _ in range(3):
        with server.send("/v1/completions", body) as connection:
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            else:
                wait_for(lambda: engine.metrics().running > 0)
        wait_for(lambda: server.requests() == 0)
        wait_for(lambda: engine.metrics().running == 0)
    assert engine.metrics().finished["cancelled"] > before
    assert engine.metrics().waiting == 0


@pytest.fixture
def busy(stories_bundle):
    """A server whose only slot has work for long, until all that it does is cancelled."""
    engine = Engine(stories_bundle, slots=1, queue=64)
    models = Models(Served("busy", stories_bundle, engine, 1))
    waiting = [engine.submit(ONCE, max_new_tokens=250, stop_token_ids=()) for _ in range(50)]
    with running(models, Settings()) as server:
        yield engine, server
        for each in waiting:
            each.cancel()
        wait_for(lambda: engine.metrics().running + engine.metrics().waiting == 0)
        found = httpx.post(f"{server.url}/v1/completions", json={"prompt": ONCE}, timeout=60)
        assert found.status_code == 200
    models.close()


def test_a_busy_server_sends_heads_of_streams_and_refuses_more_than_its_queue_takes(busy):
    engine, server = busy
    bodies = {
        "completions": {"prompt": ONCE},
        "chat/completions": {"messages": USER},
        "responses": {"input": ONCE},
    }
    for path, prompt in bodies.items():
        url, body = f"{server.url}/v1/{path}", {"stream": True, **prompt}
        with httpx.stream("POST", url, json=body, timeout=60) as found:
            assert found.status_code == 200  # it does not wait in the queue
            assert engine.metrics().waiting > 1
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as raised:
                client.completions.create(model="busy", prompt=ONCE, n=64, stream=stream)
            assert int(raised.value.response.headers["retry-after"]) >= 1


def test_a_request_that_takes_too_long_is_a_504_or_an_event(stories_bundle):
    models = Models(Served("slow", stories_bundle, Engine(stories_bundle, slots=1), 1))
    common = {"model": "slow", "extra_body": {"ignore_eos": True}}
    with (
        running(models, Settings(timeout_seconds=0.005)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        calls = [
            (client.completions.create, {"prompt": ONCE, "max_tokens": 250}),
            (client.responses.create, {"input": ONCE}),
        ]
        for create, options in calls:
            with pytest.raises(openai.APIStatusError) as raised:
                create(**common, **options)
            assert raised.value.status_code == 504
            with contextlib.suppress(openai.APIError):  # a 504, or an event that the client raises
                last = [*create(stream=True, **common, **options)][-1]
                assert last.type == "response.failed"
    models.close()


REQUESTS = {
    **{"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest},
    **{"/v1/responses": ResponseRequest, "/v1/embeddings": EmbeddingRequest},
    **{"/v1/score": ScoreRequest, "/v1/rerank": RerankRequest, "/tokenize": TokenizeRequest},
    "/detokenize": DetokenizeRequest,
}
SMALLEST = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/embeddings": {"model": "tiny", "input": "a"},
    "/v1/score": {"model": "tiny", "text_1": "a", "text_2": "b"},
    "/v1/rerank": {"model": "tiny", "query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


def some(sample, every):
    """Settings of hypothesis for so many examples."""
    checks = list(hypothesis.HealthCheck)
    return hypothesis.settings(
        max_examples=examples(sample, every), database=None, suppress_health_check=checks
    )


@pytest.mark.parametrize("path", REQUESTS)
def test_no_value_of_a_field_is_an_internal_error(server, post, path):
    names = [each.name for each in msgspec.structs.fields(REQUESTS[path]) if each.name != "model"]

    @some(12, 120)
    @hypothesis.given(st.sampled_from(names), ANYTHING)
    def check(name, value):
        found = post(path, {"model": "stories", **SMALLEST[path], name: value})
        assert found.status_code in (200, 400), found.text
        if found.status_code == 400:
            assert found.json()["error"]["message"]

    check()
    wait_for(lambda: server.requests() == 0)


@pytest.mark.thorough
def test_the_published_document_holds(server):
    import schemathesis.checks

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    of = schemathesis.specs.openapi.checks
    wanted = (schemathesis.checks.not_a_server_error, of.status_code_conformance)
    wanted += (of.content_type_conformance, of.response_schema_conformance)
    for operation in schema.exclude(path_regex="^/v2").get_all_operations():

        @some(4, 40)
        @hypothesis.given(operation.ok().as_strategy())
        def check(case):
            if isinstance(case.body, dict) and "prompt" in case.body:
                case.body = {**case.body, "max_tokens": 1}
            case.call_and_validate(checks=wanted)

        check()
