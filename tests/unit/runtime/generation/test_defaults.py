"""A bundle generates as its publisher's generation_config.json says, where the caller says nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prejit.runtime import Bundle, Sampling, __main__, load
from prejit.runtime.errors import RejectError, UsageError
from prejit.runtime.generation.options import Defaults, check_generation, parse_defaults

PROMPT = [1, 2, 3]
SAID = {
    "do_sample": True,
    "temperature": 1.3,
    "top_k": 20,
    "top_p": 0.9,
    "min_p": 0.01,
    "repetition_penalty": 1.5,
    "max_new_tokens": 9,
    "min_new_tokens": 3,
}
SAMPLED: dict[str, Any] = {name: value for name, value in SAID.items() if name != "do_sample"}


def publish(decoder_dir: Path, to: Path, said: dict[str, Any]) -> Path:
    """The model of a bundle with another generation_config.json."""
    shutil.copytree(decoder_dir.parent / "gpt2", to, dirs_exist_ok=True)
    (to / "generation_config.json").write_text(json.dumps(said))
    return to


@pytest.fixture(scope="module")
def sampling_dir(
    make_decoder: Callable[..., Path], decoder_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    source = publish(decoder_dir, tmp_path_factory.mktemp("sampling"), SAID)
    return make_decoder(source, batch=(1, 3), prompt=(3, 10), context=(24, 72))


@pytest.fixture(scope="module")
def sampling(sampling_dir: Path) -> Bundle:
    return load(sampling_dir)


@pytest.fixture(scope="module")
def plain(decoder_dir: Path) -> Bundle:
    """The same model without a generation config."""
    return load(decoder_dir)


def test_a_bundle_generates_as_its_config_says_or_its_caller(
    sampling: Bundle, plain: Bundle
) -> None:
    expected = plain.generate(PROMPT, seed=5, **SAMPLED).token_ids
    assert len(expected) == 9
    assert expected != plain.generate(PROMPT, max_new_tokens=9).token_ids
    assert sampling.generate(PROMPT, seed=5).token_ids == expected
    none: dict[str, Any] = dict.fromkeys((*SAMPLED, "stop", "stop_token_ids", "logprobs", "prefix"))
    assert sampling.generate(PROMPT, seed=5, **none).token_ids == expected, "None: not given"
    assert sampling.generate_n(PROMPT, 1, seed=5)[0].token_ids == expected
    assert sampling.generate_batch([PROMPT], seed=5)[0].token_ids == expected
    assert sampling.session().generate(PROMPT, seed=5).token_ids == expected
    assert tuple(piece.token_id for piece in sampling.stream(PROMPT, seed=5)) == expected
    request = sampling.request(PROMPT, seed=5)
    assert (request.sampling.temperature, request.sampling.min_p) == (1.3, 0.01)
    assert request.max_new_tokens == 9
    given: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1, "max_new_tokens": 5}
    assert (
        sampling.generate(PROMPT, **given).token_ids
        == plain.generate(PROMPT, max_new_tokens=5).token_ids
    )
    complete = [Sampling(temperature=0.7, seed=3)]
    assert (
        sampling.generate_batch([PROMPT], sampling=complete)[0].token_ids
        == plain.generate(PROMPT, temperature=0.7, seed=3, max_new_tokens=9).token_ids
    )


def test_a_load_may_ignore_the_generation_config(sampling_dir: Path, plain: Bundle) -> None:
    bare = load(sampling_dir, generation_config=False)
    assert bare.defaults == Defaults()
    given: dict[str, Any] = {"max_new_tokens": 9}
    expected = plain.generate(PROMPT, **given).token_ids
    assert bare.generate(PROMPT, **given).token_ids == expected
    assert bare.session().generate(PROMPT, **given).token_ids == expected
    with pytest.raises(UsageError, match="generation_config: expected True or False, found 'no'"):
        load(sampling_dir, generation_config="no")  # type: ignore[arg-type]


def test_the_commands_use_and_show_the_defaults(
    sampling: Bundle,
    sampling_dir: Path,
    decoder_dir: Path,
    prejit: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ran = prejit("generate", sampling_dir, "--prompt-ids", "1,2,3", "--seed", 5, "--json")
    found = json.loads(ran.stdout)
    assert found["start"]["first_run_seconds"] > 0
    first = found["first_token_seconds_since_exec"]
    assert found["start"]["total_seconds"] == pytest.approx(first, abs=0.5)
    assert found["token_ids"] == list(sampling.generate(PROMPT, seed=5).token_ids)

    def said(*command: str | Path) -> str:
        assert __main__.main([*map(str, command)]) == 0
        return capsys.readouterr().out

    assert json.loads(said("inspect", sampling_dir, "--json"))["defaults"] == SAID
    shown = said("inspect", sampling_dir)
    assert "by default with: temperature 1.3, top_k 20, top_p 0.9, min_p 0.01, repetition" in shown
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
        (SAID, SAMPLED),
    ],
)
def test_options_of_a_generation_config(said: dict[str, Any], options: dict[str, Any]) -> None:
    assert parse_defaults(json.dumps(said).encode()).options() == options


BROKEN = [
    (b"", "expected JSON: "),
    (b"[" * 100_000, "expected JSON, found objects nested too deeply"),
    (b"[]", "expected a JSON object, found list"),
    (b'{"do_sample": "yes"}', "do_sample: expected true or false, found 'yes'"),
    (b'{"temperature": "hot"}', "temperature: expected .*, found 'hot'"),
    (b'{"temperature": NaN}', "temperature: expected .*, found nan"),
    (b'{"top_k": true}', "top_k: expected .*, found True"),
    (b'{"max_new_tokens": 0}', "max_new_tokens: expected 1 or more, found 0"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_generation_config_that_cannot_be_used_is_rejected(content: bytes, message: str) -> None:
    with pytest.raises(RejectError, match=f"somewhere: {message}"):
        check_generation(content, "somewhere")
