"""Fields of requests over HTTP: each is done, harmless or refused, and the limits of tokens hold."""

import itertools
import pkgutil
from typing import get_type_hints

import httpx
import numpy as np
import pytest
from tests.unit.server.running import running

from prejit.server.gate.server_settings import Settings
from prejit.server.grammar.grammars import Grammars

from .test_openai_api import ADD, ONCE, USER
from .test_openai_api import SMALLEST as FEWEST_FIELDS

TEXT = {"model": "stories", "prompt": ONCE, "max_tokens": 4, "temperature": 0}
SMALLEST = {path: {"model": "stories", **body} for path, body in FEWEST_FIELDS.items()}
SMALLEST["/v1/completions"] = TEXT


def test_an_unknown_field_is_refused_unless_the_server_ignores_them(post, models):
    with running(models, Settings(ignore_unknown_fields=True)) as lenient:
        for path, smallest in SMALLEST.items():
            body, url = {**smallest, "modle": "stories"}, lenient.url + path
            refused = post(path, body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "modle")
            assert error["code"] == "unknown_parameter"
            assert "did you mean 'model'?" in error["message"]
            assert httpx.post(url, json=body, timeout=60).status_code == 200
            assert httpx.post(url, json={**body, "model": 7}, timeout=60).status_code == 400


SAMPLING = {"stream": True, "temperature": 0.5, "top_p": 0.5, "user": "u", "model": "stories"}
PENALTIES = {
    **{"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 1}},
    **{"max_tokens": 2, "n": 2, "seed": 1},
}
UNUSED = {
    **{"metadata": {"a": "b"}, "safety_identifier": "s", "service_tier": "auto"},
    **{"prompt_cache_key": "k", "prompt_cache_options": {"mode": "implicit"}},
    "prompt_cache_retention": "24h",
}
OF_COMPLETIONS = {"echo": True, "logprobs": 1, "prompt": "a", "stop": "", "best_of": 1}
OF_CHATS = {
    **{"logprobs": True, "max_completion_tokens": 1, "max_tokens": 1, "messages": USER},
    **{"modalities": ["text"], "parallel_tool_calls": True, "reasoning_effort": "low"},
    **{"response_format": {"type": "text"}, "stop": [""], "store": False},
    **{"tool_choice": "auto", "tools": [ADD], "verbosity": "medium"},
}
NOT_OF_CHATS = {
    **{"audio": {"voice": "a", "format": "mp3"}, "function_call": "auto", "functions": []},
    **{"moderation": {"model": "m"}, "prediction": {"type": "content", "content": ""}},
    **{"store": True, "verbosity": "low", "web_search_options": {}},
}
OF_RESPONSES = {
    **{"include": ["message.output_text.logprobs"], "input": "a", "instructions": "b"},
    **{"max_output_tokens": 2, "parallel_tool_calls": True, "store": False, "background": False},
    **{"reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled"},
    **{"text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto"},
    "tools": [{"type": "function", **ADD["function"]}],
}
NOT_OF_RESPONSES = {
    **{"access_programs": ["x"], "background": True, "background_options": {}, "image": {}},
    **{"context_management": [], "conversation": "c", "max_tool_calls": 1, "store": True},
    **{"moderation": {"model": "m"}, "previous_response_id": "r", "prompt": {"id": "p"}},
}
OF_EMBEDDINGS = {"dimensions": 5, "encoding_format": "base64", "input": "a", "model": "tiny"}
OPENAI = {
    "/v1/completions": (
        "completion_create_params:CompletionCreateParamsBase",
        SAMPLING | PENALTIES | OF_COMPLETIONS,
        {"suffix": "x"},
    ),
    "/v1/chat/completions": (
        "chat.completion_create_params:CompletionCreateParamsBase",
        SAMPLING | PENALTIES | UNUSED | OF_CHATS,
        NOT_OF_CHATS,
    ),
    "/v1/responses": (
        "responses.response_create_params:ResponseCreateParamsBase",
        SAMPLING | UNUSED | OF_RESPONSES,
        NOT_OF_RESPONSES,
    ),
    "/v1/embeddings": (
        "embedding_create_params:EmbeddingCreateParams",
        OF_EMBEDDINGS | {"user": "u"},
        {},
    ),
}
"""For each endpoint: parameters of the openai package, values that are answered, and values that are not."""


@pytest.mark.parametrize("path", OPENAI)
def test_every_parameter_of_the_openai_package_is_done_or_harmless_or_refused(path, post):
    params, done, refused = OPENAI[path]
    names = set(get_type_hints(pkgutil.resolve_name(f"openai.types.{params}")))
    with_others = {"stream", "stream_options", "top_logprobs"}
    assert names - with_others <= done.keys() | refused.keys()
    for name, value in done.items():
        found = post(path, {**SMALLEST[path], name: value})
        assert found.status_code == 200, (name, found.text)
    for name, value in refused.items():
        error = post(path, {**SMALLEST[path], name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter"), error
    streamed = {**SMALLEST[path], "stream": True, "stream_options": {"include_obfuscation": False}}
    if "stream_options" in names:
        assert post(path, streamed).status_code == 200


VLLM = {
    **dict.fromkeys(("use_beam_search", "early_stopping", "include_stop_str_in_output"), True),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), False),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), True),
    **{"length_penalty": 2.0, "logits_processors": ["x"]},
    **{"kv_transfer_params": {}, "vllm_xargs": {}},
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_what_vllm_can_and_this_server_cannot_is_refused(path, post):
    for name, value in VLLM.items():
        found = post(path, {**SMALLEST[path], name: value})
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, name)
        assert error["code"] == "unsupported_parameter"
    default = {"use_beam_search": False, "length_penalty": 1, "skip_special_tokens": True}
    assert post(path, {**SMALLEST[path], **default}).status_code == 200


def test_the_client_sends_back_what_it_got(client):
    common = {"model": "stories", "metadata": {"a": "b"}, "user": "u"}
    of_response = {"include": ["message.output_text.logprobs"], "prompt_cache_key": "k"}
    of_response |= {"service_tier": "auto", "max_output_tokens": 2}
    messages, items = [*USER], [*USER]
    for _ in range(2):
        answer = client.chat.completions.create(messages=messages, max_tokens=2, **common)
        messages += [answer.choices[0].message.model_dump(), *USER]
        response = client.responses.create(input=items, **of_response, **common)
        # The Agents SDK, Codex and LiteLLM ask for it of every model.
        encrypted = ["reasoning.encrypted_content"]
        plain = client.responses.create(input="a", include=encrypted, model="stories")
        assert not plain.output[0].content[0].logprobs
        items += [*(each.model_dump() for each in response.output), *USER]


def test_nothing_stops_before_min_tokens_or_by_an_empty_stop(post, stories_bundle):
    bundle = stories_bundle
    expected = post("/v1/completions", TEXT).json()["choices"][0]
    assert expected["finish_reason"] == "length"
    for stop in ("", [""], ["", ""], None):
        assert post("/v1/completions", {**TEXT, "stop": stop}).json()["choices"][0] == expected
    more = {**TEXT, "max_tokens": 12}
    free = bundle.generate(ONCE, max_new_tokens=12)
    for limits in ({"stop_token_ids": [*set(free.token_ids)]}, {"stop": [free.text[:2]]}):
        assert post("/v1/completions", {**more, **limits}).json()["choices"][0]["text"] == ""
        found = post("/v1/completions", {**more, **limits, "min_tokens": 5}).json()
        assert 5 <= found["usage"]["completion_tokens"] <= 12
    token_ids = set(free.token_ids)
    kept = bundle.generate(ONCE, max_new_tokens=12, min_new_tokens=12, stop_token_ids=token_ids)
    assert len(kept.token_ids) == 12
    assert not token_ids & {*kept.token_ids}
    # Afterwards several steps run per call again, and the text goes on as without the limit.
    same = bundle.generate(ONCE, max_new_tokens=12, min_new_tokens=3)
    assert same.token_ids == free.token_ids
    refused = post("/v1/completions", {**TEXT, "min_tokens": 5})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "min_tokens")


def test_only_allowed_tokens_come(post, stories_bundle):
    bundle = stories_bundle
    ids = bundle.tokenizer.encode("a dog ran", add_special_tokens=False)
    body = {**TEXT, "max_tokens": 20, "allowed_token_ids": ids, "logprobs": 0, "temperature": 1}
    found = post("/v1/completions", body).json()["choices"][0]
    names = {bundle.tokenizer.token_bytes[each].decode() for each in ids}
    assert {*found["logprobs"]["tokens"]} <= names
    digits = np.flatnonzero(Grammars(bundle).regex("[0-9]{3}")([])).tolist()  # no stop token
    body = {**TEXT, "max_tokens": 9, "structured_outputs": {"regex": "[0-9]{3}"}}
    found = post("/v1/completions", {**body, "allowed_token_ids": digits}).json()["choices"][0]
    assert (len(found["text"].strip()), found["finish_reason"]) == (3, "stop")
    vocab = bundle.decoder.decoder.vocab_size
    for wrong in ([vocab], [-1], []):
        refused = post("/v1/completions", {**TEXT, "allowed_token_ids": wrong})
        assert refused.status_code == 400
        assert "allowed_token_ids" in refused.json()["error"]["message"]


def test_bad_words_do_not_come(post, stories_bundle):
    bundle = stories_bundle
    more = {**TEXT, "max_tokens": 30}
    free = post("/v1/completions", more).json()["choices"][0]["text"]
    words = [word for word in free.replace(",", " ").replace(".", " ").split() if len(word) > 3]
    longest = max(words, key=lambda word: len(_spelled(bundle, word)))
    shortest = min(words, key=lambda word: len(_spelled(bundle, word)))
    assert len(_spelled(bundle, longest)) > len(_spelled(bundle, shortest))
    for word in (longest, shortest):
        found = post("/v1/completions", {**more, "bad_words": [word], "logprobs": 0}).json()
        names = found["choices"][0]["logprobs"]["tokens"]
        spelled = [bundle.tokenizer.token_bytes[each].decode() for each in _spelled(bundle, word)]
        assert not any(names[at : at + len(spelled)] == spelled for at in range(len(names)))
        text = found["choices"][0]["text"]
        # All that came before the word is the same.
        assert text.startswith(free[: free.index(word)].rstrip())


def _spelled(bundle, word):
    return bundle.tokenizer.encode(word, add_special_tokens=False)


def test_only_the_end_of_a_prompt_is_kept(post, stories_bundle):
    bundle = stories_bundle
    ids = bundle.tokenizer.encode(ONCE)
    kept = post("/v1/completions", {**TEXT, "truncate_prompt_tokens": 2, "echo": True}).json()
    given = post("/v1/completions", {**TEXT, "prompt": ids[-2:], "echo": True}).json()
    assert kept["choices"][0]["text"] == given["choices"][0]["text"]
    assert kept["usage"]["prompt_tokens"] == 2
    assert kept["choices"][0]["text"].startswith(bundle.tokenizer.decode(ids[-2:]))
    long = {**TEXT, "prompt": "dog " * 3000, "max_tokens": 1}
    assert post("/v1/completions", long).status_code == 400
    found = post("/v1/completions", {**long, "truncate_prompt_tokens": -1}).json()
    assert found["usage"]["prompt_tokens"] == 320
    chat = {**SMALLEST["/v1/chat/completions"], "truncate_prompt_tokens": 3}
    assert post("/v1/chat/completions", chat).json()["usage"]["prompt_tokens"] == 3


WRONG_VALUES = (
    *(("prompt_logprobs", 21), ("model", None), ("best_of", 3), ("max_tokens", 0)),
    *(("max_tokens", 251), ("stream_options", {}), ("temperature", "hot")),
    *(("logit_bias", {"x": 1}), ("logit_bias", dict.fromkeys(range(5000), 1))),
    *(("stop", ["."] * 33), ("stop", "." * 513), ("stop_token_ids", [1] * 1025)),
)
SCORED = {"echo": True, "logprobs": 1}
LAST_TOKEN = {"allowed_token_ids": [400]}
INTEGER = {"structured_outputs": {"json": {"type": "integer"}}}
NOT_ONE = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
NO_GRAMMAR = {"type": "function", "function": {"name": "a", "parameters": NOT_ONE, "strict": True}}
SOUND = [{"role": "user", "content": [{"type": "input_audio"}]}]
WRONG = {
    "/v1/completions": [
        # Limits that leave no token; test_structured_outputs.py has what no grammar follows.
        (LAST_TOKEN | INTEGER, None, "bad_words"),
        ({"bad_words": ["   "]}, None, "bad_words"),
        (LAST_TOKEN | {"bad_words": ["do"]}, None, "bad_words"),
        # Prompts that are none, or too long, or cannot be scored.
        *(({"prompt": prompt}, "prompt", "prompt") for prompt in ([], [1, "a"], None)),
        *((SCORED | {"prompt": prompt}, None, "") for prompt in ([1, 9999], [1] * 321, [5] * 1000)),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens", ""),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ""),
        *(({name: value}, name, name) for name, value in WRONG_VALUES),
    ],
    "/v1/chat/completions": [
        ({"messages": []}, "messages", ""),
        ({"messages": SOUND}, "messages[0].content[0].type", "found 'input_audio': this server"),
        ({"max_completion_tokens": 2}, "max_tokens", "without max_completion_tokens"),
        ({"tools": [ADD] * 129}, "tools", "tools"),
        ({"tools": [ADD] * 2}, "tools", "each name once"),
        ({"tools": [NO_GRAMMAR]}, "tools[0].function.parameters/properties/a", "expected"),
        ({"modalities": ["audio"]}, "modalities[0]", "expected 'text', found 'audio': this server"),
        ({"reasoning_effort": 1}, "reasoning_effort", ""),
        ({"tool_choice": "some"}, "tool_choice", ""),
        ({"top_logprobs": 2}, "top_logprobs", "expected logprobs"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs.tools", "chat_template"),
    ],
    "/v1/responses": [
        ({"prompt_logprobs": 1}, "prompt_logprobs", ""),
        ({"top_logprobs": 2}, "top_logprobs", "expected include"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "found 'f'"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "expected 'function', found 'web_s"),
        ({"include": ["x"]}, "include[0]", "expected one of 'message.output_text.logprobs'"),
        ({"truncation": "auto"}, "truncation", "expected 'disabled', found 'auto'"),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "expected 'medium', found 'high'"),
    ],
    "/v1/embeddings": [
        ({"input": ""}, "input", "at place 0"),
        ({"input": ["a", ""]}, "input", "at place 1"),
        ({"input": [[1], []]}, "input", "at place 1"),
        ({"input": []}, "input", "an empty list"),
        ({"input": ["a"] * 2049}, "input", "expected at most 2048, found 2049"),
        ({"input": [1, "a"]}, "input", "token ids beside inputs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", ""),
    ],
    "/v1/score": [
        ({"model": "stories"}, "model", "expected an encoder"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "found 2"),
        ({"text_2": []}, "text_2", ""),
    ],
    "/v1/rerank": [
        ({"model": "stories"}, "model", "expected an encoder"),
        ({"documents": []}, "documents", ""),
        ({"max_tokens_per_doc": 5}, "max_tokens_per_doc", ""),
        ({"documents": ["a " * 70]}, None, "token"),
    ],
    "/tokenize": [({"prompt": None}, "prompt", "found neither")],
}


@pytest.mark.parametrize("path", WRONG)
def test_what_cannot_be_done_is_a_400_that_names_the_field(path, post):
    for body, param, named in WRONG[path]:
        found = post(path, {**SMALLEST[path], **body})
        assert found.status_code == 400, (body, found.text)
        error = found.json()["error"]
        found_param = error["param"] and error["param"].replace("[...]", "[0]")  # as older msgspecs
        assert (found_param, named in error["message"]) == (param, True), (body, error)


def test_a_wrong_model_names_what_would_do(post):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        error = post(path, {**SMALLEST[path], "model": "tiny"}).json()["error"]
        assert "'tiny', an encoder; POST its texts to /v1/embeddings" in error["message"]
        assert (error["param"], "layer" in error["message"]) == ("model", False)
    for path in ("/v1/completions", "/v1/embeddings"):
        found = post(path, {**SMALLEST[path], "model": "storeis"})
        assert found.status_code == 404
        assert "did you mean 'stories'?" in found.json()["error"]["message"]
    for wrong in ("/chat/completions", "/v1/v1/chat/completions"):  # of a client's base URL
        message = post(wrong, {}).json()["error"]["message"]
        assert message.endswith("another (did you mean '/v1/chat/completions'?)")


def _by_prefill(bundle, ids):
    """The log-probability of each token but the first, by a prefill of all that comes before it."""
    found = []
    for end in range(1, len(ids)):
        mask = np.zeros(bundle.decoder.decoder.vocab_size, bool)
        mask[ids[end]] = True
        options = {"max_new_tokens": 1, "logprobs": 0, "stop_token_ids": ()}
        result = bundle.generate(ids[:end], **options, token_mask=lambda _, m=mask: m)
        found.append(result.logprobs[0].logprob)
    return found


@pytest.mark.parametrize("new", [0, 6])
def test_echo_with_logprobs_has_those_of_the_prompt(new, client, stories_bundle):
    bundle = stories_bundle
    texts = ["Once upon a time, xyzzy", "Tom said: no"]
    prompts = [bundle.tokenizer.encode(text) for text in texts]
    body = {"model": "stories", "temperature": 0, "logprobs": 1, "echo": True}
    found = client.completions.create(prompt=prompts, max_tokens=new, **body)
    plain = client.completions.create(prompt=prompts, max_tokens=6, **{**body, "echo": False})
    generated = bundle.generate_batch(prompts, max_new_tokens=6, temperature=0, logprobs=1)
    for choice, ids, text in zip(found.choices, prompts, texts, strict=True):
        lists = choice.logprobs
        assert len(lists.tokens) == len(ids) + new
        places = [*lists.text_offset, len(choice.text)]
        cut = [choice.text[at:end] for at, end in itertools.pairwise(places)]
        # The text begins without space.
        assert cut[1:] == [lists.tokens[1].strip(), *lists.tokens[2:]]
        assert (lists.token_logprobs[0], lists.top_logprobs[0]) == (None, None)
        scores = pytest.approx(_by_prefill(bundle, ids), abs=1e-4)
        assert lists.token_logprobs[1 : len(ids)] == scores
        for logprob, top in zip(lists.token_logprobs[1:], lists.top_logprobs[1:], strict=True):
            assert logprob in top.values()
            assert 1 <= len(top) <= 2
        assert choice.text.startswith(text)
        likely = plain.choices[choice.index].logprobs
        scores = [each.logprob for each in generated[choice.index].logprobs]
        assert likely.token_logprobs == pytest.approx(scores, abs=1e-4)
        assert "".join(likely.tokens) == plain.choices[choice.index].text
        scores = pytest.approx(likely.token_logprobs[:new], abs=1e-4)
        assert lists.token_logprobs[len(ids) :] == scores
        assert choice.finish_reason == "length"
    counts = found.usage.prompt_tokens, found.usage.completion_tokens
    assert counts == (sum(map(len, prompts)), 2 * new)
    one = client.completions.create(prompt=[1], max_tokens=new, **body).choices[0].logprobs
    assert one.token_logprobs[0] is None  # nothing comes before it
    assert len(one.tokens) == 1 + new
    if new:
        streamed = [*client.completions.create(prompt=prompts, max_tokens=new, stream=True, **body)]
        for choice in found.choices:
            parts = [e.choices[0] for e in streamed if e.choices[0].index == choice.index]
            assert "".join(part.text for part in parts) == choice.text
            names = [name for part in parts if part.logprobs for name in part.logprobs.tokens or ()]
            assert names == choice.logprobs.tokens


def test_logprobs_of_prompts_are_in_the_form_of_vllm(post, stories_bundle):
    bundle = stories_bundle
    ids = bundle.tokenizer.encode(ONCE)
    found = post("/v1/completions", {**TEXT, "prompt_logprobs": 2}).json()["choices"][0]
    places = found["prompt_logprobs"]
    assert places[0] is None
    scores = _by_prefill(bundle, ids)
    for token_id, expected, likely in zip(ids[1:], scores, places[1:], strict=True):
        own = likely[str(token_id)]
        assert own["logprob"] == pytest.approx(expected, abs=1e-4)
        ranks = sorted(each["rank"] or 3 for each in likely.values())
        assert ranks in ([1, 2], [1, 2, 3])
    # What chooses the next token does not touch the scores.
    limits = {"stop_token_ids": ids, "stop": ["upon"], "bad_words": ["upon"]}
    limits |= {"repetition_penalty": 1.5, "frequency_penalty": 1, "prompt_logprobs": 2}
    again = post("/v1/completions", TEXT | limits).json()["choices"][0]["prompt_logprobs"]
    assert again == places
    chat = {**SMALLEST["/v1/chat/completions"], "prompt_logprobs": 0}
    answer = post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert "prompt_logprobs" not in post("/v1/completions", TEXT).json()["choices"][0]


def test_a_chat_echoes_the_message_that_it_goes_on_with(client, post):
    messages = [*USER, {"role": "assistant", "content": "There was"}]
    body = {"model": "stories", "messages": messages, "max_tokens": 4, "temperature": 0}
    body |= {"continue_final_message": True, "add_generation_prompt": False}
    plain = post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    found = post("/v1/chat/completions", {**body, "echo": True}).json()["choices"][0]
    assert found["message"]["content"] == "There was" + plain
    extra = {name: body.pop(name) for name in ("continue_final_message", "add_generation_prompt")}
    events = client.chat.completions.create(stream=True, extra_body={**extra, "echo": True}, **body)
    assert "".join(event.choices[0].delta.content or "" for event in events) == "There was" + plain


@pytest.mark.filterwarnings("ignore::prejit.runtime.errors.TruncationWarning")
def test_scores_and_ranks_are_cosines_of_texts_that_are_cut_if_the_client_wants_that(post, models):
    first, *others = texts = ["a b c", "c d e", "x y z", "a b d"]
    vectors = models.get("tiny").bundle.encode(texts).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = vectors[1:] @ vectors[0]
    body = {"model": "tiny", "text_1": first, "text_2": others}
    for path, text in (("/v1/score", first), ("/score", [first] * 3)):
        found = post(path, {**body, "text_1": text}).json()["data"]
        assert [each["score"] for each in found] == pytest.approx(expected, abs=1e-5)
    documents = [others[0], {"text": others[1]}, others[2]]
    query = {"model": "tiny", "query": first, "documents": documents}
    ranked = post("/v1/rerank", query).json()["results"]
    order = np.argsort(-expected).tolist()
    assert [each["index"] for each in ranked] == order
    assert [each["document"]["text"] for each in ranked] == [others[place] for place in order]
    best = post("/rerank", {**query, "top_n": 1, "return_documents": False}).json()
    assert [each.keys() for each in best["results"]] == [{"index", "relevance_score"}]
    assert best["usage"]["total_tokens"] > 0
    long = "a " * 70
    cut = {**SMALLEST["/v1/rerank"], "documents": [long], "truncate_prompt_tokens": -1}
    assert post("/v1/rerank", cut).status_code == 200
    cut = {**SMALLEST["/v1/embeddings"], "input": long, "truncate_prompt_tokens": -1}
    assert post("/v1/embeddings", cut).json()["usage"]["total_tokens"] == 16
