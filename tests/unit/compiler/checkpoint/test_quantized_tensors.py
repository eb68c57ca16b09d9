"""Settings and tensors of matrices in few bits that prejit does not read, and those whose numbers decide."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors.numpy import load_file, save_file
from tests.parity.few_bits_cases import GPTQ, LLAMA, FewBits, words
from tests.parity.sibling_cases import cases as siblings

from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, STORED_DTYPES, Groups
from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.checkpoint.quantized_tensors import with_whole_matrices
from prejit.compiler.checkpoint.tensor_files import tensors as published
from prejit.compiler.models import config_file
from prejit.compiler.models.layers import int4_words
from prejit.compiler.models.published_integers import Integers, kept, kept_in_words
from prejit.compiler.models.quantization_settings import read_quantization
from prejit.runtime.errors import CheckpointError

WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
PACKED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm"}


def with_weights(**changes):
    return PACKED | {"config_groups": {"group_0": {"weights": WEIGHTS | changes}}}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"quant_method": "hqq"}, 'quant_method: expected "awq" or "bitsandbytes" or "compressed-'),
        ({"quant_method": ["gptq"]}, 'quant_method: expected "awq" or "bitsandbytes" or "compressed-'),
        ("gptq", 'quantization_config: expected an object, found "gptq"'),
        ({"quant_method": "gtpq"}, '(did you mean "gptq"?)'),
        (GPTQ | {"bits": 3}, "quantization_config.bits: expected 4 or 8, found 3"),
        (GPTQ | {"checkpoint_format": "marlin"}, 'checkpoint_format: expected "gptq" or "gptq_v2"'),
        (GPTQ | {"group_size": 0}, "group_size: expected a positive integer, or -1, found 0"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'version: expected "gemm"'),
        (PACKED | {"format": "marlin-24"}, 'format: expected "pack-quantized" or'),
        (PACKED | {"config_groups": ["Linear"]}, "config_groups: expected an object of objects"),
        (PACKED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config: expected none"),
        (with_weights(num_bits=3), "config_groups.group_0.weights.num_bits: expected 4 or 8, found 3"),
        (with_weights(type="float"), "weights.num_bits: expected 8, found 4"),
        (with_weights(strategy="tensor_group"), 'strategy: expected "tensor" or "channel"'),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: expected two"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, 'fmt: expected "e4m3"'),
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "int4"}, 'expected "nf4" or "fp4"'),
    ],
)  # fmt: skip
def test_settings_that_are_not_read_are_taken_for_others(settings, said, tmp_path):
    config = LLAMA | {"quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        config_file.load_config(tmp_path)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert said in str(caught.value)


Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"qzeros": None}, f"missing {Q}.qzeros"),
        ({"qweight": np.zeros((8, 64), np.float32)}, f"{Q}.qweight is F32, expected I32"),
        ({"scales": np.ones((2, 63), np.float16)}, f"the tensors of {Q} are [8, 64], [2, 8], [2, 63]"),
        ({"g_idx": np.zeros(63, np.int32)}, "expected [64] of g_idx"),
        ({"g_idx": np.full(64, 2, np.int32)}, f"{Q}: expected groups from 0 to 1 in g_idx, found 2"),
        ({"bias": np.ones(64, np.float16)}, f"unexpected {Q}.bias"),
        (
            {"scales": np.ones((3, 64), np.float16), "qzeros": np.zeros((3, 8), np.int32), "g_idx": None},
            f"the scales of {Q} are [64, 3], expected a divisor of its shape [64, 64]",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_read_or_dropped(change, said, tmp_path):
    FewBits("gptq", GPTQ, 1).write_packed(tmp_path)
    file = tmp_path / "model.safetensors"
    changed = load_file(file) | {f"{Q}.{name}": values for name, values in change.items()}
    save_file({name: each for name, each in changed.items() if each is not None}, file)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        open_checkpoint(tmp_path, out_in=True).read(f"{Q}.weight")


def matrix_of(directory, settings, tensors):
    """Return the matrix that tensors `m.NAME` stand for, or the problems with them."""
    file = directory / "model.safetensors"
    save_file({f"m.{name}": np.asarray(each, order="C") for name, each in tensors.items()}, file)
    read = read_quantization(directory / "config.json", settings)
    found, problems = with_whole_matrices(published(file), read)
    return problems or found["m.weight"].read()


def test_a_zero_point_of_float8_is_dropped(tmp_path):
    scale, zero = np.float32([[0.5], [2]]), [[1], [-0.5]]
    weight = np.array([[1, 2], [3, -4]], float8_e4m3fn)
    settings = with_weights(type="float", num_bits=8, strategy="channel", symmetric=False)
    for kind, zeros in ((float8_e4m3fn, zero), (np.int8, [[1], [-3]])):
        given = np.array(zeros, kind)
        tensors = {"weight": weight, "weight_scale": scale, "weight_zero_point": given}
        wanted = (weight.astype(np.float32) - np.float32(zeros)) * scale
        np.testing.assert_array_equal(matrix_of(tmp_path, settings, tensors), wanted)


def test_a_last_group_with_fewer_inputs_moves_the_others(tmp_path):
    random = np.random.default_rng(0)
    values, scales = random.integers(-8, 8, (32, 96)), random.uniform(0.5, 1, (32, 2))
    scales = scales.astype(np.float16)
    tensors = {
        "weight_packed": words(values + 8, 1, 4),
        "weight_shape": np.int64([32, 96]),
        "weight_scale": scales,
    }
    wanted = values * scales.astype(np.float32).repeat([64, 32], 1)
    np.testing.assert_array_equal(matrix_of(tmp_path, with_weights(group_size=64), tensors), wanted)


def test_packed_integers_with_one_scale_for_all_are_refused(tmp_path):
    """As compressed-tensors writes the strategy `tensor` of 8 bits without rounded activations."""
    values = np.random.default_rng(0).integers(-128, 128, (32, 40))
    tensors = {"weight_packed": words(values + 128, 1, 8), "weight_shape": np.int64([32, 40])}
    tensors["weight_scale"] = np.float16([0.5])
    settings = with_weights(num_bits=8, strategy="tensor", group_size=None)
    np.testing.assert_array_equal(matrix_of(tmp_path, settings, tensors), values * 0.5)
    for zeros, dtype in ((3, np.int8), (3 + 128, np.int32)):
        tensors["weight_zero_point"] = np.array([zeros], dtype)
        wanted = (values - 3) * 0.5
        np.testing.assert_array_equal(matrix_of(tmp_path, settings, tensors), wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_zero_point_of_0_moves_its_neighbour_in_the_first_form_of_gptq(bits, tmp_path):
    random = np.random.default_rng(0)
    values = random.integers(0, 1 << bits, (32, 64))
    zeros = random.integers(0, 1 << bits, (32, 2))
    zeros[::3] = 0
    stored = words(zeros.T, 1, bits).view(np.uint32)
    tensors = {
        "qweight": words(values.T, 0, bits),
        "qzeros": (stored - np.uint32(0x11111111 if bits == 4 else 0x01010101)).view(np.int32),
        "scales": np.ones((2, 32), np.float16),
    }
    found = matrix_of(tmp_path, GPTQ | {"bits": bits, "sym": False}, tensors)
    np.testing.assert_array_equal(found, values - zeros.repeat(32, 1))


def test_int8_of_bitsandbytes_is_read_in_another_order_than_rows(tmp_path):
    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    tensors = {"weight": np.ones((32, 64), np.int8), "SCB": np.ones(32, np.float32)}
    rows, other = (
        matrix_of(tmp_path, settings, tensors | {"weight_format": np.uint8(each)})
        for each in (0, 1)
    )
    assert rows.shape == (32, 64)
    assert other[0].startswith("m.weight_format is 1, expected 0: rows")


def test_float8_is_multiplied_by_scales_of_other_blocks(tmp_path):
    random = np.random.default_rng(0)
    weight = random.standard_normal((192, 320)).astype(float8_e4m3fn)
    scales = random.uniform(0.5, 2, (2, 3)).astype(np.float32)

    def found(scales, **more):
        tensors = {"weight": weight, "weight_scale_inv": scales}
        return matrix_of(tmp_path, {"quant_method": "fp8", **more}, tensors)

    for rows, more in ((128, {}), (96, {"weight_block_size": [96, 128]})):
        whole = scales.repeat(rows, 0)[:192].repeat(128, 1)[:, :320]
        np.testing.assert_array_equal(found(scales, **more), weight.astype(np.float32) * whole)
    for size, wanted in (([64, 64], [3, 5]), (None, [1, 1])):
        said = f"the scales of m are [2, 3], expected {wanted} for its shape"
        assert said in found(scales, weight_block_size=size)[0]
    assert "the scales of m are [1, 1], expected [2, 3]" in found(scales[:1, :1])[0]


STATE = {"shape": [32, 64], "blocksize": 64, "nested_blocksize": 16, "nested_offset": 0.5}
NF4 = {
    **{"weight": np.zeros((1024, 1), np.uint8), "weight.quant_map": np.ones(16, np.float32)},
    **{"weight.absmax": np.zeros(32, np.uint8), "weight.nested_absmax": np.ones(2, np.float32)},
    "weight.nested_quant_map": np.zeros(256, np.float32),
}


@pytest.mark.parametrize("storage", [bfloat16, np.float16, np.float32])
def test_bytes_that_are_stored_as_floats_are_refused(storage, tmp_path):
    random = np.random.default_rng(0)
    state = np.frombuffer(json.dumps({"shape": [36, 6], "blocksize": 8}).encode(), np.uint8)
    tensors = {
        "weight": random.integers(0, 256, (108, 1)).astype(np.uint8),
        "weight.quant_map": random.standard_normal(16, np.float32),
        "weight.absmax": random.uniform(1, 2, 27).astype(np.float32),
        "weight.quant_state.bitsandbytes__nf4": state,
    }
    settings = {"quant_method": "bitsandbytes"}
    wanted = matrix_of(tmp_path, settings, tensors)
    tensors["weight"] = tensors["weight"].reshape(-1).view(storage)[:, None]
    np.testing.assert_array_equal(matrix_of(tmp_path, settings, tensors), wanted)
    read = read_quantization(tmp_path / "config.json", settings)
    found, _ = with_whole_matrices(published(tmp_path / "model.safetensors"), read)
    parts = [found["m.weight"].read(slice(at, at + 1)) for at in range(36)]
    np.testing.assert_array_equal(np.concatenate(parts), wanted)


@pytest.mark.parametrize(
    "change",
    [
        {"blocksize": float("inf")},
        {"shape": [float("inf"), 64]},
        {"blocksize": 10**30, "weight.absmax": np.zeros(1, np.uint8)},
        {"nested_blocksize": 10**30, "weight.nested_absmax": np.ones(1, np.float32)},
        {"nested_offset": [1]},
        {"deep": True},
        {"weight.nested_absmax": np.ones(1, np.float32)},
        {"weight.nested_absmax": np.ones((1, 2), np.float32)},
        {"weight.nested_quant_map": np.zeros(10, np.float32)},
        {"weight.nested_quant_map": np.zeros((256, 1), np.float32)},
        {"weight.nested_quant_map": None},
    ],
)
def test_a_state_of_bitsandbytes_ends_in_a_traceback(change, tmp_path):
    settings, state = {"quant_method": "bitsandbytes"}, "weight.quant_state.bitsandbytes__nf4"

    def found(changes):
        content = json.dumps(STATE | {key: changes[key] for key in STATE.keys() & changes.keys()})
        text = "[" * 10**6 if "deep" in changes else content
        tensors = NF4 | {key: changes[key] for key in NF4.keys() & changes.keys()}
        tensors[state] = np.frombuffer(text.encode(), np.uint8)
        given = {name: each for name, each in tensors.items() if each is not None}
        return matrix_of(tmp_path, settings, given)

    np.testing.assert_array_equal(found({}), np.full((32, 64), 0.5, np.float32))
    problems = found(change)
    assert isinstance(problems, list)
    assert problems[0].startswith(("the tensors of m are", f"m.{state} is not what"))


def test_a_matrix_without_outputs_is_read(tmp_path):
    tensors = {"qzeros": np.zeros((2, 0), np.int32), "scales": np.zeros((2, 0), np.float16)}
    for method, inputs in (("gptq", 8), ("awq", 64)):
        tensors["qweight"] = np.zeros((inputs, 0), np.int32)
        found = matrix_of(tmp_path, GPTQ | {"quant_method": method}, tensors)
        assert "the scales of m are [0, 2], expected a divisor of its shape [0, 64]" in found[0]


def test_words_of_awq_without_an_axis_end_in_a_traceback(tmp_path):
    tensors = {"qweight": np.int32(1), "qzeros": np.ones((1, 1)), "scales": np.ones((1, 8))}
    tensors = {name: each.astype(np.int32) for name, each in tensors.items()}
    tensors["scales"] = tensors["scales"].astype(np.float16)
    assert matrix_of(tmp_path, AWQ, tensors) == [
        "the tensors of m are [], [1, 1], [1, 8], expected [inputs, outputs / 8], [groups, outputs / 8], "
        "[groups, outputs]"
    ]


def integers(values, scales):
    return Integers(np.asarray(values, np.int8), np.asarray(scales, np.float32))


def test_integers_are_kept_that_a_dtype_does_not_hold():
    random = np.random.default_rng(0)
    values = random.integers(-8, 8, (64, 128))
    scales = random.uniform(0.5, 1, (64, 2)).astype(np.float16)
    int8 = STORED_DTYPES["int8"]
    found = kept_in_words(integers(values, scales), GROUPS_OF_32)
    assert found is not None
    assert found[1].shape == (4, 4, 16)
    np.testing.assert_array_equal(found[1][1, :, 3], scales[19].repeat(2))
    # A scale that float16 does not hold is rounded to it.
    near = kept_in_words(integers(values, scales * np.float32(1 + 2**-13)), GROUPS_OF_32)
    np.testing.assert_array_equal(near[1], found[1])
    for other in (
        integers(values * 2, scales),  # beyond four bits
        integers(values[:, :48], scales[:, :1].repeat(3, 1)),  # groups of 16
        integers(values, scales * np.float16("inf")),
        integers(values, scales * np.float32(1e-6)),  # too few bits in float16
        integers(values, scales * np.float32(1e6)),
    ):
        assert kept_in_words(other, GROUPS_OF_32) is None
    # A small output, whose scales vanish in float16, does not hide behind the others; zeros and a group may.
    small = np.where(np.arange(64)[:, None] == 7, np.float32(3e-8), scales)
    assert kept_in_words(integers(values, small), GROUPS_OF_32) is None
    values[7] = 0
    assert kept_in_words(integers(values, small), GROUPS_OF_32) is not None
    small[5, 1] = 3e-8
    assert kept_in_words(integers(values, small), GROUPS_OF_32) is not None
    for other, into in (
        (integers(values, scales), int8),  # two scales for an output
        (integers(values[:, :64], scales[:, :1] * np.float16("inf")), int8),
        (integers(values, scales), STORED_DTYPES["bfloat16"]),
    ):
        assert kept(other, into, 1) is None
    # All scales of an output are equal, and -128 is more than prejit's own rounding gives.
    one = integers([[-128, 3], [127, 5]], [[0.5, 0.5], [0.25, 0.25]])
    for axis in (0, 1):
        found, scale = kept(one, int8, axis)
        np.testing.assert_array_equal(found if axis else found.T, [[-128, 3], [127, 5]])
        np.testing.assert_array_equal(scale, np.float32([0.5, 0.25]))


def test_zero_points_are_kept_that_a_dtype_does_not_hold():
    random = np.random.default_rng(0)
    values, zeros = random.integers(-8, 8, (40, 256)), random.integers(-8, 8, (40, 2))
    scales = random.uniform(0.5, 1, (40, 2)).astype(np.float16)
    found = replace(integers(values, scales), zeros=zeros.astype(np.float32))
    wide = (values - zeros.repeat(128, 1)) * scales.astype(np.float32).repeat(128, 1)
    for groups in (Groups(32, True), Groups(128, True)):
        words, stored = kept_in_words(found, groups)
        assert stored.shape == (3, 256 // groups.size, 32)
        np.testing.assert_array_equal(int4_words.unpacked(words, stored, 40), wide)
    assert kept_in_words(found, Groups(256, True)) is None
    assert kept_in_words(replace(found, zeros=found.zeros * 3000), Groups(128, True)) is None
    # Without room for zero points the integers must hold them.
    assert kept_in_words(found, GROUPS_OF_32) is None
    moved = replace(found, values=np.clip(found.values, -4, 3), zeros=np.clip(found.zeros, -4, 4))
    words, stored = kept_in_words(moved, GROUPS_OF_32)
    wide = moved.values - moved.zeros.repeat(128, 1)
    np.testing.assert_array_equal(
        int4_words.unpacked(words, stored, 40), wide * scales.repeat(128, 1).astype(np.float32)
    )
    # One scale for each output, whose integers int8 holds.
    one = replace(found, scales=found.scales[:, :1].repeat(2, 1))
    whole, scale = kept(one, STORED_DTYPES["int8"], 1)
    np.testing.assert_array_equal(whole, values - zeros.repeat(128, 1))
    np.testing.assert_array_equal(scale, one.scales[:, 0])
    assert kept(replace(one, zeros=one.zeros + 0.5), STORED_DTYPES["int8"], 1) is None


@pytest.mark.parametrize(
    ("settings", "groups"),
    [
        (GPTQ, GROUPS_OF_32),
        (GPTQ | {"group_size": 128, "sym": False}, Groups(128, True)),
        (GPTQ | {"group_size": 1024}, Groups(128)),
        (GPTQ | {"bits": 8, "group_size": -1}, GROUPS_OF_32),
        (GPTQ | {"group_size": 128, "desc_act": True, "sym": False}, GROUPS_OF_32),
        (AWQ | {"group_size": -1}, Groups(128, True)),
        (AWQ | {"group_size": 64, "zero_point": False}, Groups(64)),
        (AWQ | {"group_size": 16}, Groups(32, True)),
        (with_weights(symmetric=False), Groups(32, True)),
        (with_weights(group_size=96), GROUPS_OF_32),
        (with_weights(num_bits=8, symmetric=False, strategy="channel"), GROUPS_OF_32),
        ({"quant_method": "bitsandbytes"}, GROUPS_OF_32),
    ],
)
def test_groups_are_others_than_those_of_the_settings(settings, groups):
    found = read_quantization(Path("config.json"), settings)
    assert found is not None
    assert found.groups == groups


def test_experts_lose_their_integers_or_are_in_another_order(tmp_path):
    case = next(case for case in siblings() if case.config["model_type"] == "qwen3_moe")
    case.write(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, random, wide = load_file(file), np.random.default_rng(0), {}
    for name in [name for name in tensors if ".experts." in name]:
        values = random.integers(-128, 128, tensors.pop(name).shape).astype(np.int8)
        scale = random.uniform(0.01, 0.02, (len(values), 1)).astype(np.float32)
        tensors |= {name: values, f"{name}_scale": scale}
        wide[name] = values * scale
        # as AutoGPTQ writes them for matrices without one
        tensors[name.replace(".weight", ".bias")] = np.zeros(len(values), np.float16)
    save_file(tensors, file)
    settings = {**with_weights(num_bits=8, strategy="channel"), "format": "int-quantized"}
    config = json.dumps(case.config | {"quantization_config": settings})
    (tmp_path / "config.json").write_text(config)
    checkpoint = open_checkpoint(tmp_path, out_in=True)
    down, up = sorted(name for name in checkpoint.forms if ".layers.0." in name)
    block = up.partition("gate_up")[0]
    gates, ups = (
        np.stack(
            [wide[f"{block}{n}.{part}_proj.weight"] for n in range(case.config["num_experts"])]
        )
        for part in ("gate", "up")
    )
    joined = np.concatenate([gates, ups], axis=1)
    np.testing.assert_array_equal(checkpoint.read(up), joined)
    found, scale = kept(checkpoint.rows(up).integers(), STORED_DTYPES["int8"], 2)
    np.testing.assert_array_equal(found * scale[..., None], joined)
    assert kept(checkpoint.rows(down).integers(), STORED_DTYPES["int8"], 2) is not None
