"""Each option of a generation is defined once; a bundle's own generation_config.json gives its defaults."""

import json
import math
import shutil
from dataclasses import fields

import click
import numpy as np
import pytest

from prejit.runtime import Defaults, Options, Request, Sampling, load
from prejit.runtime.cli.commands import commands
from prejit.runtime.cli.model_commands import generate
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.generation.decode import CALL_SECONDS, steps_per_call
from prejit.runtime.generation.options import OPTIONS, check_generation, parse_defaults, resolve

PROMPT = [1, 2, 3]
SAMPLED = {
    **{"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    **{"repetition_penalty": 1.5, "max_new_tokens": 9, "min_new_tokens": 3},
}
SUPPRESSED = {"logit_bias": dict.fromkeys(range(20), -math.inf)}
SAID = {"do_sample": True, **SAMPLED, "suppress_tokens": [*range(20), 10**6]}
SAID["begin_suppress_tokens"] = [10**6]


def test_options_are_typed_published_flags_and_checked():
    assert Options.__annotations__.keys() == OPTIONS.keys()
    defined = {f.name: str(f.type) for kind in (Sampling, Request) for f in fields(kind)}
    for name in OPTIONS.keys() - {"stop"}:  # text, which no request has
        assert defined[name].startswith(Options.__annotations__[name].__forward_arg__), name
    names = {field.name for field in fields(Defaults)} - {"do_sample", "suppress_tokens"}
    assert names == {option.name for option in OPTIONS.values() if option.published}
    given = ["bundle", "--prompt-ids", "1"]
    top = click.Context(commands, **commands.context_settings)
    plain = generate.make_context("generate", [*given], top).params
    for option in OPTIONS.values():
        flag = f"--{option.name.replace('_', '-')}"
        if option.flag is None:
            assert option.name not in plain
            continue
        value = [] if option.flag is bool else ["1"]
        found = generate.make_context("generate", [*given, flag, *value], top).params[option.name]
        assert found == {bool: True, list: ("1",), int: 1, float: 1.0, str: "1"}[option.flag], flag
        if option.flag is not str:  # the command line opens it first
            resolve({option.name: found})
    for name, option in OPTIONS.items():
        assert option.check(name, option.default) == option.default
        with pytest.raises(UsageError, match=name):
            option.check(name, object())


@pytest.mark.parametrize(
    ("step_seconds", "most", "steps"),
    [
        *((CALL_SECONDS / 4.5, 16, 4), (CALL_SECONDS / 100, 16, 16), (CALL_SECONDS * 3, 16, 1)),
        *((0.0, 16, 16), (CALL_SECONDS, 1, 1)),
    ],
)
def test_a_call_takes_the_steps_that_fit(step_seconds, most, steps):
    assert steps_per_call(step_seconds, most) == steps


@pytest.fixture(scope="module")
def sampling_dir(make_decoder, decoder_dir, tmp_path_factory):
    """The model of a bundle with a generation_config.json."""
    source = tmp_path_factory.mktemp("sampling")
    shutil.copytree(decoder_dir.parent / "gpt2", source, dirs_exist_ok=True)
    (source / "generation_config.json").write_text(json.dumps(SAID))
    return make_decoder(source, batch=(1, 3), prompt=(3, 10), context=(24, 72))


@pytest.fixture(scope="module")
def sampling(sampling_dir):
    return load(sampling_dir)


def test_a_bundle_generates_as_its_config_says_unless_ignored(sampling, bundle, sampling_dir):
    expected = bundle.generate(PROMPT, seed=5, **SAMPLED, **SUPPRESSED).token_ids
    assert len(expected) == 9
    assert expected != bundle.generate(PROMPT, seed=5, **SAMPLED).token_ids
    allowed = sampling.generate(PROMPT, seed=5, logit_bias={3: 99.0, 45: -math.inf}).token_ids
    assert 3 in allowed
    assert not {*range(20), 45} - {3} & {*allowed}
    assert expected != bundle.generate(PROMPT, max_new_tokens=9).token_ids
    none = dict.fromkeys((*SAMPLED, "stop", "stop_token_ids", "logprobs", "prefix"))
    for result in (
        sampling.generate(PROMPT, seed=5),
        sampling.generate(PROMPT, seed=5, **none),  # None: not given
        sampling.generate_n(PROMPT, 1, seed=5)[0],
        sampling.generate_batch([PROMPT], seed=5)[0],
        sampling.session().generate(PROMPT, seed=5),
    ):
        assert result.token_ids == expected
    assert tuple(piece.token_id for piece in sampling.stream(PROMPT, seed=5)) == expected
    request = sampling.request(PROMPT, seed=5)
    assert (request.sampling.temperature, request.sampling.min_p) == (1.3, 0.01)
    assert request.max_new_tokens == 9
    given = {"temperature": 0, "repetition_penalty": 1, "max_new_tokens": 5}
    found = sampling.generate(PROMPT, **given)
    greedy = bundle.generate(PROMPT, max_new_tokens=5, **SUPPRESSED)
    assert found.token_ids == greedy.token_ids
    [found] = sampling.generate_batch([PROMPT], sampling=[Sampling(temperature=0.7, seed=3)])
    alike = bundle.generate(PROMPT, temperature=0.7, seed=3, max_new_tokens=9)
    assert found.token_ids == alike.token_ids
    bare = load(sampling_dir, generation_config=False)
    assert bare.defaults == Defaults()
    given = {"max_new_tokens": 9}
    expected = bundle.generate(PROMPT, **given).token_ids
    assert bare.generate(PROMPT, **given).token_ids == expected
    assert bare.session().generate(PROMPT, **given).token_ids == expected
    with pytest.raises(UsageError, match="generation_config: expected True or False, found 'no'"):
        load(sampling_dir, generation_config="no")


def test_a_first_token_is_none_suppressed_there(bundle, make_decoder, decoder_dir, tmp_path, said):
    free = bundle.generate(PROMPT, max_new_tokens=6).token_ids
    first = free[0]
    shutil.copytree(decoder_dir.parent / "gpt2", tmp_path / "model")
    config = {"begin_suppress_tokens": [first, -1, 10**6]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(config))
    directory = make_decoder(tmp_path / "model", batch=(1, 3), prompt=(3, 10), context=(24, 72))
    vocab = bundle.decoder.decoder.vocab_size

    def not_first(token_ids):
        return None if token_ids else np.arange(vocab) != first

    expected = bundle.generate(PROMPT, max_new_tokens=6, token_mask=not_first).token_ids
    assert expected[0] != first
    suppressing = load(directory)
    for result in (
        suppressing.generate(PROMPT, max_new_tokens=6),
        suppressing.session().generate(PROMPT, max_new_tokens=6),
        *suppressing.generate_batch([PROMPT, PROMPT], max_new_tokens=6),
    ):
        assert result.token_ids == expected
    session, others = suppressing.session(), [each for each in range(vocab) if each != expected[0]]
    for _ in range(4):  # from the second on a decode call of several steps gives the first token
        found = session.generate(PROMPT, max_new_tokens=6, begin_suppress_tokens=others)
        assert found.token_ids == expected
    begun = suppressing.generate([*PROMPT, free[0]], max_new_tokens=1).token_ids
    assert begun == (free[1],) or free[1] == first
    for bare, options in (
        (load(directory, generation_config=False), {}),
        (suppressing, {"begin_suppress_tokens": [-3, 10**6]}),
    ):
        assert bare.generate(PROMPT, max_new_tokens=6, **options).token_ids == free
    assert "3 suppressed at the beginning" in said("inspect", directory)


def test_the_commands_use_and_show_the_defaults(sampling, sampling_dir, decoder_dir, said):
    ran = said("generate", sampling_dir, "--prompt-ids", "1,2,3", "--seed", "5", "--json")
    assert json.loads(ran)["token_ids"] == list(sampling.generate(PROMPT, seed=5).token_ids)
    assert json.loads(said("inspect", sampling_dir, "--json"))["defaults"] == SAID
    shown = said("inspect", sampling_dir)
    assert "by default with: temperature 1.3, top_k 20, top_p 0.9, min_p 0.01, repetition" in shown
    assert "21 tokens suppressed" in shown
    assert "by default with: the most likely tokens" in said("inspect", decoder_dir)
    said("verify", sampling_dir)


@pytest.mark.parametrize(
    ("said", "options"),
    [
        ({}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, {"top_p": 0.9}),
        ({"temperature": 0.6}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": None, "top_k": None}, {"temperature": 1.0}),
        ({"do_sample": None, "max_new_tokens": 7, "max_length": 20}, {"max_new_tokens": 7}),
        ({"suppress_tokens": [5, -1]}, {"logit_bias": {5: -math.inf}}),
        ({"begin_suppress_tokens": [5]}, {"begin_suppress_tokens": [5]}),
        ({"do_sample": True, **SAMPLED}, SAMPLED),
    ],
)
def test_options_of_a_generation_config(said, options):
    assert parse_defaults(json.dumps(said).encode()).options() == options


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected JSON: "),
        (b"[" * 100_000, "expected JSON, found objects nested too deeply"),
        (b"[]", "expected a JSON object, found list"),
        (b'{"do_sample": "yes"}', "do_sample: expected true or false, found 'yes'"),
        (b'{"temperature": "hot"}', "temperature: expected .*, found 'hot'"),
        (b'{"temperature": NaN}', "temperature: expected .*, found nan"),
        (b'{"top_k": true}', "top_k: expected .*, found True"),
        (b'{"max_new_tokens": 0}', "max_new_tokens: expected 1 or more, found 0"),
        (b'{"suppress_tokens": 5}', "suppress_tokens: expected a list of integers, found 5"),
    ],
)
def test_a_generation_config_that_cannot_be_used_is_rejected(content, message):
    with pytest.raises(RejectError, match=f"somewhere: {message}"):
        check_generation(content, "somewhere")
