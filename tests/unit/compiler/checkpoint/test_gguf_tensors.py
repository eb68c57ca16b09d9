"""GGUF files, as llama.cpp's converter writes them, beside config.json."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tests.manifests import write_manifest
from tests.parity.cases import cases
from tests.parity.few_bits_cases import GPTQ, FewBits

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.checkpoint.gguf_tensors import GgufTensor
from prejit.compiler.checkpoint.model_source import resolve_source
from prejit.compiler.manifest.reading import read_manifest
from prejit.compiler.models import config_file, model_registry, quantizing
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.published_integers import kept_in_words
from prejit.compiler.pipeline.model import find_model, open_weights, read_model
from prejit.compiler.pipeline.pack.weights_layer import few_bits
from prejit.runtime.errors import CheckpointError, ManifestError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
KINDS = gguf.GGMLQuantizationType


def as_llama_cpp(name, values, config):
    """Return a tensor as the converter changes it."""
    if config["model_type"] in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        size = values.shape[0] // heads
        order = [
            head * size + half * (size // 2) + place
            for head in range(heads)
            for place in range(size // 2)
            for half in range(2)
        ]
        return values[order]
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def write(directory, architecture, config, tensors, kind_of=lambda name: KINDS.F32):
    """Write config.json and model.gguf, with each tensor in a type; return what they stand for."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    writer = gguf.GGUFWriter(directory / "model.gguf", architecture)
    kind = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config["num_hidden_layers"])
    wide = {}
    for name, values in tensors.items():
        into = kind_of(name)
        theirs = names.get_name(name, (".weight", ".bias"))
        packed = gguf.quants.quantize(as_llama_cpp(name, values, config), into)
        writer.add_tensor(theirs, packed, raw_dtype=into)
        wide[name] = gguf.quants.dequantize(gguf.quants.quantize(values, into), into)
    writer.add_tensor("rope_freqs.weight", np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return wide


def of_family(family, directory):
    """Write the first case that llama.cpp can hold, whose Gemma 2 has no head of its own."""
    case = next(
        case
        for case in cases()
        if case.config["model_type"] == family
        and (family != "gemma2" or case.config.get("tie_word_embeddings", True))
    )
    case.write(directory)
    published = open_checkpoint(directory, out_in=True)
    return case.config, {name: published.read(name) for name in published.names}


@pytest.mark.parametrize(
    ("family", "architecture"),
    [
        *(("llama", "llama"), ("mistral", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3")),
        *(("gemma2", "gemma2"), ("gemma3_text", "gemma3"), ("phi3", "phi3")),
    ],
)
def test_a_file_of_llama_cpp_gives_other_parameters(family, architecture, tmp_path):
    config, tensors = of_family(family, tmp_path / "published")
    write(tmp_path / "gguf", architecture, config, tensors)
    places = {}
    found = open_checkpoint(
        tmp_path / "gguf", out_in=True, reading=lambda path, *place: places.update({place: path})
    )
    assert list(found.names) == list(tensors)
    assert found.forms == {}
    for name, values in tensors.items():
        rounding = 1e-6 if "norm" in name and "gemma" in family else 0
        np.testing.assert_allclose(found.read(name), values, rtol=0, atol=rounding, err_msg=name)
    file = tmp_path / "gguf" / "model.gguf"
    assert set(places.values()) == {file}
    assert sum(end - start for start, end in places) == sum(x.nbytes for x in tensors.values())


def of_q4_k(random, outputs, inputs):
    """Return blocks of Q4_K, which the package reads and does not write."""
    blocks = random.integers(0, 256, (outputs, inputs // 256, 144), dtype=np.uint8)
    scales = random.uniform(0.001, 0.003, (outputs, inputs // 256, 2)).astype("<f2")
    blocks[:, :, :4] = scales.view(np.uint8).reshape(*blocks.shape[:2], 4)
    return blocks.reshape(outputs, -1)


def test_scales_and_minimums_are_kept_as_other_values(tmp_path):
    random = np.random.default_rng(0)
    values = random.standard_normal((48, 512)).astype(np.float32)
    values[3, :32], values[4, :32], values[5, 32:64] = 0, 0.7, 1000 + values[5, 32:64] / 1000
    values[6:9] += [[70], [300], [4000]]  # minimums of many scales
    plain = gguf.quants.quantize(values, KINDS.Q4_1)
    for kind, data in (("Q4_1", plain), ("Q4_K", of_q4_k(random, 48, 512))):
        wide = gguf.quants.dequantize(data, KINDS[kind])
        for rows in (None, random.permutation(48)):
            found = GgufTensor(kind, data, lambda values: values, rows).integers()
            stored = int4_words.unpacked(*kept_in_words(found, Groups(zeros=True)), 48)
            expected = wide if rows is None else wide[rows]
            error = np.linalg.norm(stored - expected, axis=1) / np.linalg.norm(expected, axis=1)
            assert error.max() < 4e-4, kind
            if rows is None and kind == "Q4_1":
                np.testing.assert_array_equal(stored[3:5, :32], expected[3:5, :32])


def tensors_of(case):
    others, matrices = case.tensors()
    return others | {f"{name}.weight": each.values for name, each in matrices.items()}


def manifest_of(path, source, more=""):
    return read_manifest(write_manifest(path, source, model=more, context=(32,)))


def test_a_file_with_minimums_gets_no_zero_points(tmp_path):
    case, kinds = FewBits("gguf", GPTQ, 7), {False: KINDS.F32, True: KINDS.Q4_1}
    write(tmp_path, "llama", case.config, tensors_of(case), lambda name: kinds["o_proj" in name])
    manifest = manifest_of(tmp_path / "demo.toml", tmp_path, 'dtype = "int4"\n')
    files = find_model(manifest, (SimpleNamespace(architecture="x86_64"),), tmp_path)
    assert files.groups == Groups(zeros=True)
    assert files.matrices.endswith("groups of 32 with zero points")
    module = read_model(manifest, files).module
    errors, checkpoint = {}, open_weights(files)
    for read in quantizing.readers(module, checkpoint.rows, errors.__setitem__).values():
        read()
    assert len(errors) == 2
    assert 0 < max(errors.values()) < 4e-4


def test_q4_0_is_rounded_again_and_others_are_read_as_other_values(tmp_path):
    def kind_of(name):
        if "norm" in name:
            return KINDS.F32
        ends = {"v_proj": KINDS.Q8_0, "down_proj": KINDS.Q5_1, "embed_tokens": KINDS.F16}
        return next((kind for end, kind in ends.items() if f"{end}." in name), KINDS.Q4_0)

    case = FewBits("gguf", GPTQ, 7)
    wide = write(tmp_path, "llama", case.config, tensors_of(case), kind_of)
    checkpoint = open_checkpoint(tmp_path, out_in=True)
    assert checkpoint.groups == GROUPS_OF_32
    for name, values in wide.items():
        np.testing.assert_array_equal(checkpoint.read(name), values, err_msg=name)
        np.testing.assert_array_equal(checkpoint.rows(name)[3:21], values[3:21], err_msg=name)
    config = config_file.load_config(tmp_path)
    module = model_registry.make_decoder(config, dtype="int4", out_in=True)
    errors, packed = {}, {}
    for name, read in quantizing.readers(module, checkpoint.rows, errors.__setitem__).items():
        packed[name] = read()
    found = few_bits(checkpoint.forms, errors)
    assert found.forms == {"GGUF, Q4_0": 11, "GGUF, Q5_1": 2, "GGUF, Q8_0": 2}
    # k and v are too small for four bits, and the head is in eight.
    assert (found.kept, found.converted) == (8, 7)
    rows = quantizing.widened(module, packed)
    for name in (f"model.layers.1.{part}.weight" for part in ("self_attn.q_proj", "mlp.up_proj")):
        np.testing.assert_array_equal(rows[name][0:64], wide[name][:64])


def test_a_file_that_does_not_fit_is_read(tmp_path):
    config, tensors = of_family("qwen2", tmp_path / "published")
    there, norm = tmp_path / "gguf", "model.norm.weight"
    there.mkdir()
    (there / "config.json").write_text(json.dumps(config))
    for content in (b"GGUF" + b"\0" * 99, b""):
        (there / "model.gguf").write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged or cut off"):
            _ = open_checkpoint(there).names
    write(there, "qwen2", config, {name: tensors[name] for name in tensors if name != norm})
    with pytest.raises(CheckpointError, match=f"missing {norm}"):
        _ = open_checkpoint(there).names
    write(there, "llama", config, tensors)
    with pytest.raises(CheckpointError, match='expected "qwen2", for model_type "qwen2"'):
        _ = open_checkpoint(there).names
    (there / "other.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found model\.gguf, other\.gguf") as caught:
        open_checkpoint(there)
    assert f'"{there}/model.gguf"' in str(caught.value.hint)


def test_another_file_is_read_than_the_manifest_names(tmp_path):
    of_family("qwen3", tmp_path / "model")
    for name in ("model.gguf", "other.gguf"):
        (tmp_path / "model" / name).write_bytes(name.encode())
    for source, name in (("model/other.gguf", "other.gguf"), ("model", "model.safetensors")):
        manifest = manifest_of(tmp_path / "demo.toml", source)
        directory = resolve_source(manifest.model.source, manifest.directory)
        files = find_model(manifest, (SimpleNamespace(architecture="x86_64"),), directory)
        assert [file.name for file in open_weights(files).files] == ["config.json", name]
    with pytest.raises(ManifestError, match=r"or a \.gguf file, found none at .*third\.gguf"):
        resolve_source("model/third.gguf", tmp_path)
