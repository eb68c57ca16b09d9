"""An adapter is a stranger's file: what it says may neither hang the process nor be read in two ways."""

import json
import os
import re
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import load_file, save, save_file
from tests.parity.adapter_cases import write_adapter

from prejit.runtime.errors import CheckpointError, UntrustedError
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.checks.adapter_stacks import StackPair
from prejit.runtime.lora import peft_files
from prejit.runtime.lora.adapter_trust import _signatures
from prejit.runtime.lora.peft_files import read_adapter

LLAMA = "model.layers.{}.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def pairs(name=LLAMA, layers=12):
    sizes = (1, layers)
    down, up = (Array((end,), "float32", (*sizes, *shape)) for end, shape in ENDS.items())
    return (StackPair(down, up, tuple(name.format(layer) for layer in range(layers))),)


ENDS = {"A": (4, 6), "B": (4, 8)}


def write(at, config=CONFIG, name=LLAMA, layers=12):
    shapes = {}
    for layer in range(layers):
        start = f"base_model.model.{name.format(layer)}.lora_"
        shapes |= {f"{start}A.weight": (2, 6), f"{start}B.weight": (8, 2)}
    write_adapter(at, config, shapes, 1)
    return at


HOSTILE = {
    "repeated": r"((\w|\.)*)*!",
    "once or not": r"((\w|\.)*)?" * 4 + "!",
    "alternatives": "(m|.)" * 50 + "!",
    "empty": "(|l)" * 50 + "!",
    "quantifiers": ".*" * 6 + "!",
    "optional": ".?" * 50 + "!",
    "flags": "(?i)q_proj",
    "looks ahead": "(?=.*)q_proj",
    "long": "q" * 300,
    "damaged": "(q_proj",
}


@pytest.mark.parametrize("pattern", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "key",
    [
        *("target_modules", "rank_pattern", "alpha_pattern"),
        *("exclude_modules", "layers_pattern", "modules_to_save"),
    ],
)
def test_a_pattern_that_may_take_for_ever_is_refused(key, pattern, tmp_path):
    value = {pattern: 2} if key in ("rank_pattern", "alpha_pattern") else pattern
    value = [pattern] if key == "modules_to_save" else value
    at, began = write(tmp_path, CONFIG | {key: value}), time.process_time()
    with pytest.raises(CheckpointError, match=r"config\.json: a pattern of modules") as caught:
        read_adapter(at, pairs())
    assert "by name" in caught.value.hint
    assert time.process_time() - began < 1


def test_layers_that_a_pattern_does_not_find_are_left_out():
    config = {"target_modules": ["q"], "layers_to_transform": [1], "layers_pattern": "h|layers"}
    for module, key in (("x.h.1.q", "layers_to_transform"), ("layers.1.q", ""), ("q", "")):
        assert peft_files.left_out_by(config, module) == key


def test_numbers_that_become_infinite_are_errors_that_name_what_made_them(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"config\.json: lora_alpha: expected .* 1e\+30"
    ) as large:
        read_adapter(write(tmp_path, CONFIG | {"lora_alpha": 1e30}), pairs())
    assert "trained" in large.value.hint
    at = write(tmp_path, CONFIG | {"lora_alpha": 1e6})
    file = at / "adapter_model.safetensors"
    save_file({name: each * np.float32(1e34) for name, each in load_file(file).items()}, file)
    with pytest.raises(CheckpointError, match="expected finite numbers, found others in"):
        read_adapter(at, pairs())


GOOD = (
    "all-linear",
    r".*\.(self_attn|mlp)\.(q|k|v|o|gate|up|down)_proj",
    r"model\.layers\.\d+\.(?:self_attn|mlp)\..*",
    r".*layers\.[0-9]{1,2}\..*q_proj",
)


def test_patterns_of_people_match_and_the_slowest_that_may_pass_takes_seconds_at_most(tmp_path):
    for pattern in GOOD:
        assert read_adapter(write(tmp_path, CONFIG | {"target_modules": pattern}), pairs()).rank
    ranks = {re.escape(LLAMA.format(layer)): 2 for layer in range(12)}
    many = CONFIG | {"r": 3, "rank_pattern": ranks | {f"other.{n}": 3 for n in range(4000)}}
    assert read_adapter(write(tmp_path, many), pairs()).rank == 2
    slow = CONFIG | {"rank_pattern": {".*.*.*[^x]!": 3, "(.*.*)?(|.)(.|)!": 3}}
    began = time.process_time()
    assert read_adapter(write(tmp_path, slow), pairs()).rank == 2
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    ("ours", "starts"),
    [
        ("backbone.layers.{}.mixer.q_proj", ("model.", "backbone.", "")),
        # of a text model alone, and as a part of one that reads images, in transformers 5 and 4
        (LLAMA, ("model.", "model.language_model.", "language_model.model.", "")),
    ],
)
def test_names_of_transformers_classes_are_those_of_the_checkpoint(ours, starts, tmp_path):
    room, last = pairs(ours), ours.partition(".")[2]
    for at, start in enumerate(starts):
        found = read_adapter(write(tmp_path / str(at), name=start + last), room)
        assert found.changes.keys() == {*room[0].modules}


A, B = (f"base_model.model.{LLAMA.format(0)}.lora_{end}.weight" for end in "AB")


def twice(text):
    entry = json.dumps(json.loads(text)[A])
    return f'{text.rstrip()[:-1]}, "{A}": {entry}}}'


def moved(by):
    def change(text):
        header = json.loads(text)
        header[A]["data_offsets"] = [at + by for at in header[A]["data_offsets"]]
        return json.dumps(header)

    return change


DAMAGED = {"a key twice": twice, "overlapping": moved(4), "negative": moved(-64)}


@pytest.mark.parametrize("change", DAMAGED.values(), ids=DAMAGED)
def test_a_header_that_can_be_read_in_two_ways_is_refused(change, tmp_path):
    file = write(tmp_path, layers=1) / "adapter_model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = change(content[8:end].decode()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    with pytest.raises(CheckpointError, match=re.escape(str(file))):
        read_adapter(tmp_path, pairs())


def test_a_matrix_with_two_names_is_refused_and_trust_is_asked_before_files_are_read(tmp_path):
    values = {A: np.ones((2, 6), np.float32), B: np.ones((8, 2), np.float32)}
    both = values | {A.removeprefix("base_model.model."): values[A]}
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(save(both))
    with pytest.raises(CheckpointError, match=r"q_proj.lora_A, which has two names"):
        read_adapter(tmp_path, pairs())

    def refuse(digest):
        raise UntrustedError(str(tmp_path), digest, case="unsigned")

    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text("no JSON")
    with pytest.raises(UntrustedError, match="sha256:"):
        read_adapter(tmp_path, pairs(), refuse)


def test_a_fifo_in_place_of_signatures_is_none(tmp_path):
    os.mkfifo(tmp_path / peft_files.SIGNATURES)
    found = list[object]()
    thread = threading.Thread(
        target=lambda: found.append(_signatures(tmp_path / peft_files.SIGNATURES)), daemon=True
    )
    thread.start()
    thread.join(5)
    assert found == [[]]
