"""OpenAI's API over HTTP: the `openai` package against a server, and clients that send anything else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import msgspec
import numpy as np
import openai
import pytest
import schemathesis
from hypothesis import strategies as st
from schemathesis import checks as schemathesis_checks
from tests.extent import examples
from tests.unit.server.running import Running, running, wait_for

from prejit.runtime import load
from prejit.runtime.bundle import Bundle
from prejit.server.engine.engine import Engine
from prejit.server.gate.server_settings import Settings
from prejit.server.openai.chat_completions import ChatRequest
from prejit.server.openai.completions import CompletionRequest
from prejit.server.openai.embeddings import EmbeddingRequest
from prejit.server.openai.models_and_tokens import DetokenizeRequest, TokenizeRequest
from prejit.server.openai.responses_schema import ResponseRequest
from prejit.server.openai.similarity import RerankRequest, ScoreRequest
from prejit.server.served.served import Models, Served

ONCE = "Once upon a time"
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [2, 3]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
HUGE = b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"
USER: list[Any] = [{"role": "user", "content": ONCE}]


class ScriptedEngine:
    """An engine whose model writes a given text, where the request's own token mask allows that."""

    def __init__(self, bundle: Bundle, engine: Engine, text: str) -> None:
        self._engine: Any = engine
        self._decoder = bundle.decoder.decoder
        self._ids = bundle.tokenizer.encode(text, add_special_tokens=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, prompt: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = self._engine.submit(prompt, **self._scripted(options))
        return future

    def stream(self, prompt: Any, **options: Any) -> Any:
        return self._engine.stream(prompt, **self._scripted(options))

    def _scripted(self, options: dict[str, Any]) -> dict[str, Any]:
        wanted = options.get("token_mask")

        def script(token_ids: Any) -> np.ndarray[Any, Any] | None:
            mask = np.zeros(self._decoder.vocab_size, bool)
            done = len(token_ids)
            eos = self._decoder.eos_token_ids[0]
            mask[self._ids[done] if done < len(self._ids) else eos] = True
            if wanted is None:
                return mask
            allowed: np.ndarray[Any, Any] | None = wanted(token_ids)
            return mask if allowed is None or (mask & allowed).any() else allowed

        return options | {"token_mask": script}


@pytest.fixture(scope="module")
def stories_bundle(stories_dir: Path) -> Bundle:
    return load(stories_dir)


@pytest.fixture(scope="module")
def encoder_bundle(encoder_dir: Path) -> Bundle:
    """A tiny encoder with a tokenizer of letters."""
    return load(encoder_dir)


@pytest.fixture(scope="module")
def engine(stories_bundle: Bundle) -> Engine:
    """The engine of the decoder."""
    return Engine(stories_bundle, slots=4, queue=64)


@pytest.fixture(scope="module")
def server(engine: Engine, stories_bundle: Bundle, encoder_bundle: Bundle) -> Iterator[Running]:
    """A server of both, and of models that write given texts."""
    texts = {
        "hermes": f"I add. {HERMES}\n{HERMES}",
        "llama": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        "mistral": '[{"name": "add", "arguments": {"a": 1, "b": 2}}]',
        "wrong": 'I add. <tool_call>\n{"name": "add", "arguments": {"a": 7, "b": "x"}}\n</tool_call>',
        "prose": "I do not need a tool, 1 < 2.",
    }
    scripted: Any = {
        name: ScriptedEngine(stories_bundle, engine, text) for name, text in texts.items()
    }
    models = Models(
        Served("stories", stories_bundle, engine, 1_700_000_000),
        Served("tiny", encoder_bundle, Engine(encoder_bundle), 1_700_000_001),
        *(Served(name, stories_bundle, each, 1) for name, each in scripted.items()),
    )
    try:
        with running(models, Settings(max_tokens=250)) as found:
            yield found
    finally:
        models.close()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def post(server: Running) -> Iterator[Callable[[str, Any], httpx.Response]]:
    """Sends a body: `post("/v1/completions", {...})`, or bytes as they are."""
    with httpx.Client(base_url=server.url, timeout=60) as http:

        def send(path: str, body: Any) -> httpx.Response:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            return http.post(path, content=content, headers=headers)

        yield send


# ---------------------------------------------------------------------- completions


def test_a_completion_is_what_the_bundle_generates(
    client: openai.OpenAI, stories_bundle: Bundle
) -> None:
    expected = stories_bundle.generate(ONCE, max_new_tokens=20, temperature=0)
    found = client.completions.create(model="stories", prompt=ONCE, max_tokens=20, temperature=0)
    assert found.choices[0].text == expected.text
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.stats.prompt_tokens
    assert found.usage.completion_tokens == 20
    assert found.model == "stories"
    ids = stories_bundle.tokenizer.encode(ONCE)
    of_ids = client.completions.create(model="stories", prompt=ids, max_tokens=20, temperature=0)
    assert of_ids.choices[0].text == expected.text


def test_a_seed_gives_the_tokens_of_generate_and_n_the_next_seeds(
    client: openai.OpenAI, stories_bundle: Bundle
) -> None:
    expected = stories_bundle.generate_n(ONCE, 3, max_new_tokens=12, temperature=1.0, seed=7)
    for stream in (False, True):
        options: Any = {"prompt": ONCE, "max_tokens": 12, "temperature": 1, "seed": 7, "n": 3}
        found = client.completions.create(model="stories", stream=stream, **options)
        texts = ["", "", ""]
        for chunk in found if stream else [found]:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [each.text for each in expected]


def test_requests_without_a_seed_differ(client: openai.OpenAI) -> None:
    texts = {
        client.completions.create(model="stories", prompt=ONCE, max_tokens=16).choices[0].text
        for _ in range(4)
    }
    assert len(texts) > 1


def test_several_prompts_are_answered_in_order(
    client: openai.OpenAI, stories_bundle: Bundle
) -> None:
    prompts = [ONCE, "The cat", "Lily"]
    expected = [
        each.text
        for each in stories_bundle.generate_batch(prompts, max_new_tokens=8, temperature=0)
    ]
    options: Any = {"prompt": prompts, "max_tokens": 8, "temperature": 0}
    found = client.completions.create(model="stories", **options)
    assert [choice.text for choice in found.choices] == expected
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    streamed = ["", "", ""]
    for chunk in client.completions.create(model="stories", stream=True, **options):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == expected


def test_stop_ends_a_text_before_it_and_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="stories", prompt=ONCE, max_tokens=40, temperature=0)
    text = whole.choices[0].text
    stop = text[20:26]
    cut = client.completions.create(
        model="stories", prompt=ONCE, max_tokens=40, temperature=0, stop=["never", stop], echo=True
    )
    assert cut.choices[0].text == ONCE + text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"
    for stream in (False, True):
        options: Any = {"prompt": ONCE, "max_tokens": 40, "temperature": 0, "stop": stop}
        found = client.completions.create(model="stories", stream=stream, **options)
        chunks = list(found) if stream else [found]
        assert "".join(each.choices[0].text for each in chunks) == text.partition(stop)[0]


def test_options_reach_the_engine(client: openai.OpenAI, stories_bundle: Bundle) -> None:
    def of_server(**options: Any) -> str:
        extra = {
            k: options.pop(k) for k in ("top_k", "min_p", "repetition_penalty") if k in options
        }
        found = client.completions.create(
            model="stories", prompt=ONCE, max_tokens=80, extra_body=extra, **options
        )
        return found.choices[0].text

    def of_bundle(**options: Any) -> str:
        return stories_bundle.generate(ONCE, max_new_tokens=80, **options).text

    greedy = of_bundle(temperature=0)
    cases: list[dict[str, Any]] = [
        {"presence_penalty": 2.0, "temperature": 0},
        {"frequency_penalty": 2.0, "temperature": 0},
        {"repetition_penalty": 2.0, "temperature": 0},
        {"top_p": 0.5, "seed": 3, "temperature": 1.5},
        {"top_k": 2, "seed": 3, "temperature": 1.5},
        {"min_p": 0.3, "seed": 3, "temperature": 1.5},
    ]
    for options in cases:
        expected = of_bundle(**options)
        assert expected != greedy, options
        assert of_server(**options) == expected, options
    first = stories_bundle.generate(ONCE, max_new_tokens=1, temperature=0).token_ids[0]
    biased = of_bundle(temperature=0, logit_bias={first: -100})
    assert biased != greedy
    assert of_server(temperature=0, logit_bias={str(first): -100}) == biased


def test_streams_end_with_the_usage_where_it_is_wanted(client: openai.OpenAI) -> None:
    options: Any = {"prompt": ONCE, "max_tokens": 5, "temperature": 0, "stream": True}
    *chunks, last = client.completions.create(
        model="stories", stream_options={"include_usage": True}, **options
    )
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert last.usage.total_tokens == last.usage.prompt_tokens + 5
    assert all(chunk.usage is None for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert all(
        chunk.usage is None for chunk in client.completions.create(model="stories", **options)
    )


def test_cached_tokens_are_counted_for_the_same_salt(client: openai.OpenAI) -> None:
    prompt = "Tim and Sue went to the park to play with a big red ball and a dog. " * 2
    counts = []
    for salt in ("mine", "mine", "other"):
        found = client.completions.create(
            model="stories", prompt=prompt, max_tokens=2, extra_body={"cache_salt": salt}
        )
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        counts.append(found.usage.prompt_tokens_details.cached_tokens)
    assert counts[1] is not None
    assert counts[1] > 0
    assert counts[0] == counts[2] == 0


def test_logprobs_of_completions_are_those_of_the_bundle(
    client: openai.OpenAI, stories_bundle: Bundle
) -> None:
    expected = stories_bundle.generate(ONCE, max_new_tokens=6, temperature=0, logprobs=3)
    assert expected.logprobs is not None
    options: Any = {"prompt": ONCE, "max_tokens": 6, "temperature": 0, "logprobs": 3}
    whole = client.completions.create(model="stories", **options).choices[0]
    assert whole.logprobs is not None
    tokens, offsets = whole.logprobs.tokens, whole.logprobs.text_offset
    assert tokens is not None
    assert offsets is not None
    assert "".join(tokens) == whole.text
    assert offsets == [sum(map(len, tokens[:place])) for place in range(6)]
    assert whole.logprobs.token_logprobs == pytest.approx([p.logprob for p in expected.logprobs])
    assert whole.logprobs.top_logprobs is not None
    assert all(len(top) == 3 for top in whole.logprobs.top_logprobs)
    streamed: list[str] = []
    for chunk in client.completions.create(model="stories", stream=True, **options):
        if (found := chunk.choices[0].logprobs) is not None and found.tokens:
            assert found.text_offset == [len("".join(streamed))]
            streamed += found.tokens
    assert streamed == tokens


# ---------------------------------------------------------------------- chat


def test_a_chat_goes_through_the_template(client: openai.OpenAI, stories_bundle: Bundle) -> None:
    expected = stories_bundle.generate(ONCE, max_new_tokens=20, temperature=0)
    options: Any = {"messages": USER, "max_completion_tokens": 20, "temperature": 0}
    found = client.chat.completions.create(model="stories", **options)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].message.tool_calls is None
    assert found.usage is not None
    assert found.usage.prompt_tokens == expected.stats.prompt_tokens
    text, roles, reasons = "", [], []
    for chunk in client.chat.completions.create(
        model="stories", stream=True, stream_options={"include_usage": True}, **options
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles.append(choice.delta.role)
            reasons.append(choice.finish_reason)
    assert text == expected.text
    assert roles[0] == "assistant"
    assert not any(roles[1:])
    assert reasons[-1] == "length"
    assert chunk.usage == found.usage.model_copy(
        update={"prompt_tokens_details": chunk.usage and chunk.usage.prompt_tokens_details}
    )


def test_chat_logprobs_have_bytes_and_alternatives(
    client: openai.OpenAI, stories_bundle: Bundle
) -> None:
    expected = stories_bundle.generate(ONCE, max_new_tokens=5, temperature=0, logprobs=2)
    assert expected.logprobs is not None
    options: Any = {"messages": USER, "max_tokens": 5, "temperature": 0, "logprobs": True}
    options["top_logprobs"] = 2
    whole = client.chat.completions.create(model="stories", **options).choices[0].logprobs
    assert whole is not None
    assert whole.content is not None
    text = b"".join(bytes(token.bytes or []) for token in whole.content).decode()
    assert text == expected.text
    for token, logprob in zip(whole.content, expected.logprobs, strict=True):
        assert token.logprob == pytest.approx(logprob.logprob)
        assert [each.logprob for each in token.top_logprobs] == pytest.approx(
            [value for _, value in logprob.top]
        )
    streamed = [
        token
        for chunk in client.chat.completions.create(model="stories", stream=True, **options)
        for choice in chunk.choices
        if choice.logprobs is not None
        for token in choice.logprobs.content or ()
    ]
    assert streamed == whole.content


def test_many_asynchronous_streams_get_their_own_texts(
    server: Running, stories_bundle: Bundle
) -> None:
    words = ["Tom", "Lily", "The dog", "A cat", "One day", "Mum", "The sun", "Ben"]
    expected = [
        each.text for each in stories_bundle.generate_batch(words, max_new_tokens=16, temperature=0)
    ]

    async def ask(client: openai.AsyncOpenAI, word: str) -> str:
        stream = await client.completions.create(
            model="stories", prompt=word, max_tokens=16, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(ask(client, word) for word in words))

    assert asyncio.run(main()) == expected


# ---------------------------------------------------------------------- tools


def test_arguments_of_a_strict_function_follow_its_schema(client: openai.OpenAI) -> None:
    options: Any = {"messages": USER, "max_tokens": 100, "temperature": 0}
    strict = {**ADD, "function": {**ADD["function"], "strict": True}}
    loose, tight = (
        client.chat.completions.create(model="wrong", tools=[tool], **options).choices[0]
        for tool in (ADD, strict)
    )
    found = [
        json.loads(call.function.arguments)
        for each in (loose, tight)
        for call in each.message.tool_calls or []
    ]
    assert len(found) == 2
    assert found[0] == {"a": 7, "b": "x"}  # what the model writes
    assert found[1]["a"] in (1, 2)
    assert found[1]["b"] in (2, 3)
    for each in (loose, tight):
        assert each.message.content == "I add."
        assert each.finish_reason == "tool_calls"
    prose = client.chat.completions.create(model="prose", tools=[strict], **options).choices[0]
    assert prose.message.tool_calls is None  # the model decides
    assert prose.message.content.strip() == "I do not need a tool, 1 < 2."
    wrong = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
    refused = {"type": "function", "function": {"name": "a", "parameters": wrong, "strict": True}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].function.parameters"):
        client.chat.completions.create(model="wrong", tools=[refused], **options)


@pytest.mark.parametrize("name", ["hermes", "llama", "mistral"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_are_taken_out_of_the_text(
    client: openai.OpenAI, name: str, stream: bool
) -> None:
    count = 2 if name == "hermes" else 1
    options: Any = {"messages": USER, "tools": [ADD], "max_tokens": 250, "temperature": 0}
    if stream:
        with client.chat.completions.stream(model=name, **options) as events:
            completion: Any = events.get_final_completion()
    else:
        completion = client.chat.completions.create(model=name, **options)
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "").strip() == ("I add." if count == 2 else "")
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"a": 1, "b": 2}] * count
    assert {call.function.name for call in calls} == {"add"}
    assert len({call.id for call in calls}) == count


def test_text_beside_tools_is_text(client: openai.OpenAI) -> None:
    options: Any = {"messages": USER, "tools": [ADD], "max_tokens": 250}
    whole = client.chat.completions.create(model="prose", **options).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.message.tool_calls is None
    chunks = list(client.chat.completions.create(model="prose", stream=True, **options))
    pieces = [c.choices[0].delta.content for c in chunks if c.choices[0].delta.content]
    assert "".join(pieces) == whole.message.content
    assert len(pieces) > 3  # it comes as it is generated
    hidden = client.chat.completions.create(model="llama", tool_choice="none", **options)
    assert hidden.choices[0].message.tool_calls is None


def test_the_result_of_a_call_goes_back_into_the_conversation(
    client: openai.OpenAI, stories_bundle: Bundle
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: Any = [
        {"role": "user", "content": "Once"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    found = client.chat.completions.create(model="stories", messages=messages, max_tokens=1)
    assert found.usage is not None
    assert found.usage.prompt_tokens == len(stories_bundle.tokenizer.encode("Once13"))


def no_white_space(bundle: Bundle) -> dict[str, float]:
    """A bias without which this model writes white space between the parts of JSON until its limit."""
    tokens = bundle.tokenizer.token_bytes
    return {str(each): -100 for each in range(512) if tokens[each].isspace()}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_forces_calls(
    client: openai.OpenAI, stories_bundle: Bundle, choice: Any, stream: bool
) -> None:
    options: Any = {"messages": USER, "tools": [ADD], "max_tokens": 250, "seed": 1}
    options |= {"tool_choice": choice, "parallel_tool_calls": False}
    options["logit_bias"] = no_white_space(stories_bundle)
    if stream:
        with client.chat.completions.stream(model="stories", **options) as events:
            completion: Any = events.get_final_completion()
    else:
        completion = client.chat.completions.create(model="stories", **options)
    [call] = completion.choices[0].message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"a", "b"}


# ---------------------------------------------------------------------- JSON

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "big": {"type": "boolean"}},
    "required": ["colour", "big"],
    "additionalProperties": False,
}


def test_json_of_a_schema_is_what_comes(client: openai.OpenAI, stories_bundle: Bundle) -> None:
    bias: Any = no_white_space(stories_bundle)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "ball", "schema": SCHEMA}}
    for n in (1, 2):
        found = client.chat.completions.create(
            model="stories", messages=USER, response_format=schema, n=n, logit_bias=bias
        )
        for choice in found.choices:
            assert choice.finish_reason == "stop"
            value = json.loads(choice.message.content or "")
            assert value.keys() == {"colour", "big"}
            assert value["colour"] in ("red", "blue")
    responded = client.responses.create(
        model="stories",
        input=ONCE,
        text={"format": {"type": "json_schema", "name": "ball", "schema": SCHEMA}},
        extra_body={"logit_bias": bias},
    )
    assert json.loads(responded.output_text).keys() == {"colour", "big"}
    found = client.chat.completions.create(
        model="stories", messages=USER, response_format={"type": "json_object"}, max_tokens=30
    )
    assert (found.choices[0].message.content or "").lstrip().startswith("{")


def test_a_strict_schema_that_no_grammar_enforces_is_refused(
    post: Callable[[str, Any], httpx.Response],
) -> None:
    for strict in (True, False):
        schema = {"type": "array", "uniqueItems": True, "maxItems": 0}
        wanted = {"name": "s", "schema": schema, "strict": strict}
        format = {"type": "json_schema", "json_schema": wanted}
        body = {"model": "stories", "messages": USER, "response_format": format}
        found = post("/v1/chat/completions", body)
        assert found.status_code == (400 if strict else 200), found.text
        if strict:
            assert "uniqueItems" in found.json()["error"]["message"]


# ---------------------------------------------------------------------- responses


def test_responses_are_whole_and_streamed(client: openai.OpenAI, stories_bundle: Bundle) -> None:
    expected = stories_bundle.generate(ONCE, max_new_tokens=20, temperature=0)
    options: Any = {"model": "stories", "input": ONCE, "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**options)
    assert whole.output_text == expected.text
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 20
    events = list(client.responses.create(stream=True, **options))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == expected.text
    assert events[-1].response.output_text == expected.text  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["hermes", "llama", "prose"])
def test_the_client_accumulates_streamed_responses(client: openai.OpenAI, name: str) -> None:
    tool: Any = {"type": "function", "strict": True, **ADD["function"]}
    options: Any = {"model": name, "input": ONCE, "tools": [tool], "max_output_tokens": 250}
    with client.responses.stream(**options) as events:
        for event in events:
            if event.type == "response.output_item.done":
                assert event.item.status == "completed"  # type: ignore[union-attr]
        streamed = events.get_final_response()
    whole = client.responses.create(**options)
    assert streamed.status == whole.status == "completed"
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["add"] * {"hermes": 2, "llama": 1, "prose": 0}[name]
    assert all(json.loads(call.arguments) == {"a": 1, "b": 2} for call in calls)
    # What came is input of the next turn.
    answers: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"} for call in calls
    ]
    turn: Any = [{"role": "user", "content": ONCE}, *whole.output, *answers]
    if len(calls) < 2:
        assert client.responses.create(model="stories", input=turn, max_output_tokens=2).output


def test_responses_have_logprobs(client: openai.OpenAI) -> None:
    found = client.responses.create(
        model="stories",
        input=ONCE,
        max_output_tokens=4,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    [message] = found.output
    assert message.type == "message"
    [part] = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [len(token.top_logprobs) for token in part.logprobs] == [2] * 4
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode() == part.text


# ---------------------------------------------------------------------- embeddings, tokens, models


def test_embeddings_are_those_of_the_bundle(
    client: openai.OpenAI, post: Callable[[str, Any], httpx.Response], encoder_bundle: Bundle
) -> None:
    texts = ["a b c", "d", "e f"]
    expected = encoder_bundle.encode(texts)
    packed = client.embeddings.create(model="tiny", input=texts)  # asks for base64
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    for found in (packed, plain):
        vectors = np.array([each.embedding for each in found.data], np.float32)
        assert np.abs(vectors - expected).max() <= 1e-5
        assert [each.index for each in found.data] == [0, 1, 2]
        assert found.usage.prompt_tokens == 5 + 3 + 4
    body = {"model": "tiny", "input": "a b c", "encoding_format": "base64"}
    [packed_one] = post("/v1/embeddings", body).json()["data"]
    vector = np.frombuffer(base64.b64decode(packed_one["embedding"]), "<f4")
    assert np.abs(vector - expected[0]).max() <= 1e-5
    width = expected.shape[1]
    same = client.embeddings.create(model="tiny", input="d", dimensions=width)
    assert len(same.data[0].embedding) == width
    of_ids = client.embeddings.create(model="tiny", input=[[2, 7, 3]])
    assert len(of_ids.data) == 1


def test_tokenize_and_back(
    post: Callable[[str, Any], httpx.Response], stories_bundle: Bundle
) -> None:
    tokenizer = stories_bundle.tokenizer
    found = post("/tokenize", {"model": "stories", "prompt": ONCE}).json()
    assert found["tokens"] == tokenizer.encode(ONCE)
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 320
    assert found["token_strs"] is None
    body = {"model": "stories", "prompt": ONCE, "add_special_tokens": False}
    bare = post("/tokenize", {**body, "return_token_strs": True}).json()
    assert bare["tokens"] == tokenizer.encode(ONCE, add_special_tokens=False)
    assert "".join(bare["token_strs"]).strip() == ONCE
    chat = post("/tokenize", {"model": "stories", "messages": USER}).json()
    assert chat["tokens"] == stories_bundle.apply_chat_template(USER)
    back = post("/detokenize", {"model": "stories", "tokens": found["tokens"]}).json()
    assert back == {"prompt": ONCE}


def test_long_texts_are_tokenized_off_the_event_loop_and_give_the_same(
    post: Callable[[str, Any], httpx.Response], stories_bundle: Bundle
) -> None:
    text = "word " * 4000
    found = post("/tokenize", {"model": "stories", "prompt": text}).json()
    assert found["tokens"] == stories_bundle.tokenizer.encode(text)
    messages = [{"role": "user", "content": "word"}] * 400
    found = post("/tokenize", {"model": "stories", "messages": messages}).json()
    assert found["tokens"] == stories_bundle.tokenizer.encode("word" * 400)


def test_models_are_listed_and_described(client: openai.OpenAI, stories_bundle: Bundle) -> None:
    listed = {each.id: each for each in client.models.list()}
    assert {"stories", "tiny"} <= listed.keys()
    found: Any = client.models.retrieve("stories")
    assert found.created == 1_700_000_000
    assert found.root == stories_bundle.digest
    assert found.max_model_len == 320
    with pytest.raises(openai.NotFoundError, match="'missing'"):
        client.models.retrieve("missing")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": ONCE, "best_of": 3}, "best_of"),
        ("/v1/completions", {"prompt": ONCE, "suffix": "."}, "suffix"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, "a"]}, "prompt"),
        ("/v1/completions", {"prompt": ONCE, "max_tokens": 251}, "max_tokens"),
        ("/v1/completions", {"prompt": ONCE, "stream_options": {}}, "stream_options"),
        ("/v1/completions", {"prompt": ONCE, "temperature": "hot"}, "temperature"),
        ("/v1/completions", {"prompt": ONCE, "logit_bias": {"x": 1}}, "logit_bias"),
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"model": None, "prompt": ONCE}, "model"),
        (
            "/v1/chat/completions",
            {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
        ),
        ("/v1/responses", {"input": ONCE, "top_logprobs": 2}, "top_logprobs"),
        (
            "/v1/responses",
            {"input": ONCE, "tool_choice": {"type": "function", "name": "f"}},
            "tool_choice",
        ),
        ("/v1/completions", {"prompt": [5] * 1000}, None),
        ("/v1/completions", {"prompt": ONCE, "stop": ["."] * 33}, "stop"),
        ("/v1/completions", {"prompt": ONCE, "stop": "." * 513}, "stop"),
        ("/v1/completions", {"prompt": ONCE, "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        (
            "/v1/completions",
            {"prompt": ONCE, "logit_bias": dict.fromkeys(range(5000), 1)},
            "logit_bias",
        ),
        ("/v1/chat/completions", {"messages": USER, "tools": [ADD] * 129}, "tools"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": USER, "functions": []}, "functions"),
        ("/v1/chat/completions", {"messages": USER, "audio": {"voice": "x"}}, "audio"),
        ("/v1/chat/completions", {"messages": USER, "modalities": ["audio"]}, "modalities[...]"),
        ("/v1/chat/completions", {"messages": USER, "store": True}, "store"),
        ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        (
            "/v1/chat/completions",
            {"messages": USER, "chat_template_kwargs": {"tools": 1}},
            "chat_template_kwargs.tools",
        ),
        (
            "/v1/chat/completions",
            {"messages": USER, "tools": [ADD], "guided_choice": ["a"]},
            "guided_choice",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/responses", {"input": ONCE, "store": True}, "store"),
        ("/v1/responses", {"input": ONCE, "previous_response_id": "r"}, "previous_response_id"),
        ("/v1/responses", {"input": ONCE, "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ("/v1/embeddings", {"model": "tiny", "input": "a", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"model": "tiny", "input": []}, "input"),
        ("/tokenize", {}, "prompt"),
    ],
)
def test_what_is_not_supported_is_a_400_that_names_the_field(
    post: Callable[[str, Any], httpx.Response], path: str, body: dict[str, Any], param: str | None
) -> None:
    found = post(path, {"model": "stories", **body})
    error = found.json()["error"]
    assert found.status_code == 400, error
    named = (error["param"] or "").replace("[...]", "[0]")
    assert named == (param or "").replace("[...]", "[0]"), error
    assert not param or param.partition("[")[0] in error["message"]


def test_effort_is_a_variable_of_the_template(
    post: Callable[[str, Any], httpx.Response], stories_bundle: Bundle
) -> None:
    expected = len(stories_bundle.tokenizer.encode(f"high{ONCE}"))
    chat = {"model": "stories", "messages": USER, "max_tokens": 1, "reasoning_effort": "high"}
    found = post("/v1/chat/completions", chat).json()
    assert found["usage"]["prompt_tokens"] == expected
    respond = {"model": "stories", "input": ONCE, "max_output_tokens": 1}
    found = post("/v1/responses", {**respond, "reasoning": {"effort": "high"}}).json()
    assert found["usage"]["input_tokens"] == expected
    assert found["reasoning"]["effort"] == "high"


def test_errors_have_their_status(
    client: openai.OpenAI, post: Callable[[str, Any], httpx.Response]
) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="missing", prompt="a")
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="stories", prompt="word " * 1000)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        list(client.completions.create(model="stories", prompt="word " * 1000, stream=True))
    with pytest.raises(openai.BadRequestError, match="expected an encoder"):
        client.embeddings.create(model="stories", input="a")
    for body in (
        b"",
        b"[]",
        b"\xff",
        b'{"prompt": "\xff"}',
        b'{"a":' * 20_000,
        b'{"x": NaN}',
        HUGE,
    ):
        assert post("/v1/completions", body).status_code == 400, body[:20]


# ---------------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_requests(
    server: Running, engine: Engine, stream: bool
) -> None:
    body = json.dumps(
        {"model": "stories", "prompt": ONCE, "max_tokens": 250, "n": 3, "stream": stream}
        | {"ignore_eos": True}
    ).encode()
    before = engine.metrics().finished.get("cancelled", 0)
    for _ in range(5):
        with server.connect() as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            if stream:
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
            else:
                wait_for(lambda: engine.metrics().running > 0)
        wait_for(lambda: server.requests() == 0)
        wait_for(lambda: engine.metrics().running == 0)
    assert engine.metrics().finished["cancelled"] > before
    assert engine.metrics().waiting == 0


# ---------------------------------------------------------------------- a server that is busy


def fill(engine: Engine, count: int) -> list[Any]:
    """Requests that an engine of one slot will need long for."""
    return [engine.submit(ONCE, max_new_tokens=250, stop_token_ids=()) for _ in range(count)]


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_the_head_of_a_stream_does_not_wait_in_the_queue(stories_bundle: Bundle, path: str) -> None:
    engine = Engine(stories_bundle, slots=1, queue=64)
    models = Models(Served("busy", stories_bundle, engine, 1))
    prompt = {
        "completions": {"prompt": ONCE},
        "chat/completions": {"messages": [{"role": "user", "content": "a"}]},
        "responses": {"input": ONCE},
    }[path]
    with running(models, Settings()) as server:
        waiting = fill(engine, 50)
        body = {"stream": True, **prompt}
        with httpx.stream("POST", f"{server.url}/v1/{path}", json=body, timeout=60) as found:
            assert found.status_code == 200
            assert engine.metrics().waiting > 1
        for each in waiting:
            each.cancel()
        wait_for(lambda: engine.metrics().running + engine.metrics().waiting == 0)
    models.close()


@pytest.mark.parametrize("stream", [False, True])
def test_more_texts_than_the_queue_takes_are_400(stories_bundle: Bundle, stream: bool) -> None:
    models = Models(Served("busy", stories_bundle, Engine(stories_bundle, slots=1, queue=5), 1))
    with running(models, Settings()) as server:
        url = f"{server.url}/v1/completions"
        asked = {"prompt": [ONCE, ONCE], "max_tokens": 1, "stream": stream}
        found = httpx.post(url, json={**asked, "n": 3}, timeout=60)
        assert (found.status_code, found.json()["error"]["param"]) == (400, "n")
        assert httpx.post(url, json={**asked, "n": 2}, timeout=60).status_code == 200
    models.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_that_says_when_to_come_again(
    stories_bundle: Bundle, stream: bool
) -> None:
    engine = Engine(stories_bundle, slots=1, queue=64)
    models = Models(Served("busy", stories_bundle, engine, 1))
    waiting = fill(engine, 50)
    with (
        running(models, Settings()) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model="busy", prompt=ONCE, n=64, stream=stream)
        assert int(raised.value.response.headers["retry-after"]) >= 1
        for each in waiting:
            each.cancel()
        wait_for(lambda: engine.metrics().running + engine.metrics().waiting == 0)
        assert client.completions.create(model="busy", prompt=ONCE, max_tokens=1).choices
    models.close()


@pytest.mark.parametrize("path", ["completions", "responses"])
def test_a_request_that_takes_too_long_is_a_504_or_an_event(
    stories_bundle: Bundle, path: str
) -> None:
    models = Models(Served("slow", stories_bundle, Engine(stories_bundle, slots=1), 1))
    options: Any = {"model": "slow", "extra_body": {"ignore_eos": True}}
    with (
        running(models, Settings(timeout_seconds=0.005)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        if path == "completions":
            options |= {"prompt": ONCE, "max_tokens": 250}
            create: Any = client.completions.create
        else:
            options |= {"input": ONCE}
            create = client.responses.create
        with pytest.raises(openai.APIStatusError) as raised:
            create(**options)
        assert raised.value.status_code == 504
        with contextlib.suppress(openai.APIError):  # a 504, or an event that the client raises
            assert [*create(stream=True, **options)][-1].type == "response.failed"
    models.close()


# ---------------------------------------------------------------------- anything

REQUESTS: dict[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponseRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SMALLEST: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("path", REQUESTS)
def test_no_value_of_a_field_is_an_internal_error(
    server: Running, post: Callable[[str, Any], httpx.Response], path: str
) -> None:
    names = [each.name for each in msgspec.structs.fields(REQUESTS[path]) if each.name != "model"]

    @hypothesis.settings(
        max_examples=examples(40, 120),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.sampled_from(names), ANYTHING)
    def check(name: str, value: Any) -> None:
        found = post(path, {"model": "stories", **SMALLEST[path], name: value})
        assert found.status_code in (200, 400), found.text
        if found.status_code == 400:
            assert found.json()["error"]["message"]

    check()
    wait_for(lambda: server.requests() == 0)


def test_the_published_document_holds(server: Running) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wanted = (
        schemathesis_checks.not_a_server_error,
        schemathesis.specs.openapi.checks.status_code_conformance,
        schemathesis.specs.openapi.checks.content_type_conformance,
        schemathesis.specs.openapi.checks.response_schema_conformance,
    )
    for operation in schema.exclude(path_regex="^/v2").get_all_operations():
        api = operation.ok()

        @hypothesis.settings(
            max_examples=examples(12, 40),
            deadline=None,
            database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(api.as_strategy())
        def check(case: Any) -> None:
            if isinstance(case.body, dict):
                case.body = {**case.body, "max_tokens": 1} if "prompt" in case.body else case.body
            case.call_and_validate(checks=wanted)

        check()
