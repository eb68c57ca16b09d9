"""What is wrong with the files beside a model's weights is found before anything compiles."""

import json
import os
import time

import pytest

from prejit.compiler.models.chat_files import read_chat
from prejit.compiler.pipeline.pack.model_layers import Published, check_generation, special_ids
from prejit.runtime.base.files import Identity
from prejit.runtime.errors import CheckpointError, StoreError


def test_a_configuration_that_cannot_be_read_fails_the_build(tmp_path):
    path = tmp_path / "generation_config.json"
    check_generation(path, b'{"temperature": 0.5, "unknown": {}}')
    with pytest.raises(CheckpointError, match=r"config\.json: top_p: expected .* 'x'"):
        check_generation(path, b'{"top_p": "x"}')
    with pytest.raises(CheckpointError, match=r"expected at most 1048576 bytes, found 1048577"):
        check_generation(path, b" " * (1 << 20) + b"1")
    deep = "[" * 100_000
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: cannot read JSON"):
        special_ids(tmp_path, 50)
    (tmp_path / "tokenizer_config.json").write_text(deep)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot read JSON"):
        read_chat(tmp_path)


def test_weights_that_change_behind_their_digest_are_not_packed(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    published = Published(None, (), {file: Identity.of(file.stat())})
    published.check_unchanged()
    time.sleep(0.02)  # a tick of the kernel's clock
    file.write_bytes(b"two")
    os.utime(file, ns=times)
    with pytest.raises(CheckpointError, match="changed while the build read it"):
        published.check_unchanged()
    file.unlink()
    with pytest.raises(StoreError):
        published.check_unchanged()


def ids_of(directory, config, generation):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return special_ids(directory, 50)[:2]


def test_tokens_that_begin_and_end_texts(tmp_path):
    eos, bos = "eos_token_id", "bos_token_id"
    for config, generation, expected in (
        ({}, {}, ((), None)),
        ({eos: 3, bos: 2}, {}, ((3,), 2)),
        ({eos: 3}, {eos: [7, 5, 7]}, ((5, 7), None)),
        ({eos: 3, bos: 1}, {eos: None}, ((), 1)),
        # Ids that no token has cannot end a text; -1 would be taken for "no token".
        ({eos: [-1, 3, 50, 2**70], bos: -1}, {}, ((3,), None)),
    ):
        assert ids_of(tmp_path, config, generation) == expected


def test_tokens_that_begin_answers_keep_order_and_have_a_type(tmp_path):
    for value, start in ((7, (7,)), ([9, 3, 9], (9, 3, 9)), (None, ())):
        (tmp_path / "config.json").write_text(json.dumps({"decoder_start_token_id": value}))
        assert special_ids(tmp_path, 50)[2] == start
    eos = "eos_token_id"
    for name, wrong in (("bos_token_id", "2"), (eos, 1.0), (eos, True), (eos, [1, "2"]), (eos, {})):
        for file in ("generation_config.json", "config.json"):
            both = ({name: wrong}, {}) if file == "config.json" else ({}, {name: wrong})
            with pytest.raises(CheckpointError, match=rf"/{file}: {name}: expected a token"):
                ids_of(tmp_path, *both)


def test_beside_a_decoder_of_the_user_the_tokenizer_gives_what_no_file_says(tmp_path):
    assert special_ids(tmp_path, 50, own=True) == ((), None, ())
    added = [{"content": name, "id": at} for name, at in (("<s>", 1), ("</s>", 2), ("<x>", 70))]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "decoder_start_token": "<x>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    assert special_ids(tmp_path, 50, own=True) == ((2,), 1, ())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert special_ids(tmp_path, 50, own=True) == ((7,), 1, ())
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    assert special_ids(tmp_path, 50, own=True) == ((7,), None, ())
