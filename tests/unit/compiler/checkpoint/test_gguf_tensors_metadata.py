"""GGUF files whose metadata contradicts config.json, or counts what the file does not hold."""

import struct
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from prejit.compiler.checkpoint import gguf_tensors
from prejit.compiler.checkpoint.gguf_config import check_agreement
from prejit.compiler.checkpoint.gguf_tensors import read_metadata
from prejit.runtime.errors import CheckpointError

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
CONFIG = {
    **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6},
    "rope_parameters": ROPE,
}
SCALING = "rope.scaling."


def text(value):
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def start(tensors, entries):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, entries)


ARCHITECTURE = text("general.architecture") + struct.pack("<I", 8) + text("llama")


def array(*numbers):
    return start(0, 2) + ARCHITECTURE + text("x") + struct.pack("<IIQ", 9, *numbers)


def agree(metadata, tensors=None, **changes):
    said = {f"llama.{key}": each for key, each in metadata.items()}
    held = {name: SimpleNamespace(data=np.float32(each)) for name, each in (tensors or {}).items()}
    config = SimpleNamespace(**CONFIG | changes)
    check_agreement(Path("m.gguf"), {"general.architecture": "llama"} | said, config, held)


@pytest.mark.parametrize(
    ("metadata", "tensors", "said"),
    [
        ({"rope.freq_base": 1e6}, {}, "rope.freq_base: expected 10000.0, as config.json gives rope_theta"),
        ({"attention.layer_norm_rms_epsilon": 1e-5}, {}, "rms_norm_eps; found 1e-05"),
        ({"attention.head_count": 8}, {}, "head_count: expected 4, as config.json gives num_attention_heads"),
        ({"attention.head_count_kv": [2, 4]}, {}, "expected 2, as config.json gives num_key_value_heads"),
        ({"embedding_length": 32}, {}, "expected 64, as config.json gives hidden_size; found 32"),
        ({"feed_forward_length": "128"}, {}, 'gives intermediate_size; found "128"'),
        ({"block_count": 3}, {}, "block_count: expected 2, as config.json gives num_hidden_layers"),
        ({f"{SCALING}type": "yarn"}, {}, 'expected "none", as config.json gives rope_type; found "yarn"'),
        ({f"{SCALING}factor": 8.0}, {}, "expected 1.0, as config.json gives no factor; found 8.0"),
        ({}, {"rope_freqs.weight": [1, 8]}, "rope_freqs.weight: expected ones, as config.json gives no"),
    ],
)  # fmt: skip
def test_a_file_that_contradicts_config_json_is_read(metadata, tensors, said):
    with pytest.raises(CheckpointError) as caught:
        agree(metadata, tensors)
    assert str(caught.value).startswith("m.gguf: ")
    assert said in str(caught.value)


def test_what_a_converter_writes_is_refused():
    sizes = {"block_count": 2, "attention.head_count_kv": [2, 2], "rope.freq_base": 10000.0}
    none = {f"{SCALING}original_context_length": 4096, f"{SCALING}type": "none"}
    epsilon = float(np.float32(1e-6))
    agree(sizes | none | {"attention.layer_norm_rms_epsilon": epsilon, f"{SCALING}factor": 1.0})
    agree({f"{SCALING}type": "linear"}, {"rope_freqs.weight": [1, 1]})
    agree({}, {"rope_freqs.weight": [1, 8]}, rope_parameters=ROPE | {"rope_type": "llama3"})
    linear = ROPE | {"rope_type": "linear", "factor": 8.0}
    layers = {"full_attention": linear, "sliding_attention": ROPE | {"rope_theta": 1.0}}
    scaled = {f"{SCALING}type": "linear", f"{SCALING}factor": 8.0, "rope.freq_base": 10000.0}
    for each in (linear, layers):
        agree(scaled, rope_parameters=each)
        with pytest.raises(CheckpointError, match=r"expected 8\.0, as config\.json gives factor"):
            agree(scaled | {f"{SCALING}factor": 4.0}, rope_parameters=each)
    with pytest.raises(CheckpointError, match=r'expected "linear", as config\.json'):
        agree({f"{SCALING}type": "none"}, rope_parameters=linear)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (array(0, 1 << 60), f"x: expected up to 0 bytes, found {1 << 60:,}"),
        (array(8, 1 << 60), "x: expected up to 0 bytes"),
        (array(0, (1 << 22) + 1) + bytes((1 << 22) + 1), "x: expected up to 4,194,304 elements"),
        (array(9, 1), "x: expected a type of numbers or texts, found 9"),
        (start(0, 1 << 62) + ARCHITECTURE, "the metadata: expected up to 45 bytes"),
        (start(1 << 62, 1) + ARCHITECTURE, "the tensors: expected up to 0 bytes"),
        (start(1, 1) + ARCHITECTURE + text("t") + struct.pack("<I", 1 << 31) + bytes(99), "4 dimensions"),
        (start(0, 1) + struct.pack("<Q", 1 << 62) + bytes(9), "a key: expected up to 9 bytes"),
        (start(0, 1) + text("general.architecture") + struct.pack("<I", 8) + text(b"\xff"), "utf-8"),
        (start(0, 2) + ARCHITECTURE, "damaged or cut off"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "expected a little-endian file, found a big-endian one"),
        (
            start(0, 2) + ARCHITECTURE + text("split.count") + struct.pack("<IH", 2, 3),
            "split.count: expected a whole model, found one of 3 files",
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)  # fmt: skip
def test_counts_of_a_file_are_believed(content, said, tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    monkeypatch.setattr(gguf, "GGUFReader", None)
    with pytest.raises(CheckpointError) as caught:
        gguf_tensors.gguf_tensors(file, SimpleNamespace(**CONFIG), ())
    assert str(caught.value).startswith(f"{file}: ")
    assert said in str(caught.value)


def test_metadata_is_read_as_other_values(tmp_path):
    entries = (
        ("a", struct.pack("<If", 6, 0.5), 0.5),
        ("b", struct.pack("<I?", 7, True), True),
        ("c", struct.pack("<Iq", 11, -(1 << 40)), -(1 << 40)),
        ("d", struct.pack("<IIQHH", 9, 2, 2, 7, 9), [7, 9]),
        ("e", struct.pack("<IIQ", 9, 8, 2) + text("x") + text(b"\xff"), None),
        ("f", struct.pack("<I", 8) + text("é"), "é"),
    )
    file = tmp_path / "m.gguf"
    content = b"".join(text(key) + value for key, value, _ in entries)
    tensor = text("t") + struct.pack("<IQQIQ", 2, 1, 1, 0, 0)
    file.write_bytes(start(1, len(entries)) + content + tensor)
    assert read_metadata(file) == {key: value for key, _, value in entries}
