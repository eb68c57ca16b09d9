"""Parameters of experts in the forms in which checkpoints hold them."""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from tests.parity.cases import write_checkpoint

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, int4_rounding, model_registry, quantizing
from prejit.compiler.models.layers import kernel_calls
from prejit.compiler.models.parameters import flat_parameters, parameters_of, with_parameters
from prejit.runtime.errors import CheckpointError

EXPERTS, WIDTH, INNER = 3, 32, 64
CONFIG = {
    **{"model_type": "gpt_oss", "vocab_size": 11, "hidden_size": WIDTH, "num_hidden_layers": 1},
    **{"intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "pad_token_id": 0},
    **{"layer_types": ["full_attention"], "tie_word_embeddings": False},
}
PACKED = {**CONFIG, "quantization_config": {"quant_method": "mxfp4"}}
BLOCK = "model.layers.0.mlp.experts"
GRID = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def packed(seed, outputs, inputs):
    """Return blocks and exponents, and the matrices (out, in) that they stand for."""
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (EXPERTS, outputs, inputs // 32, 16), np.uint8)
    scales = random.integers(120, 131, blocks.shape[:3]).astype(np.uint8)
    wide = np.zeros((EXPERTS, outputs, inputs), np.float32)
    for place, byte in np.ndenumerate(blocks):
        factor = 2.0 ** (int(scales[place[:3]]) - 127)
        at = place[2] * 32 + 2 * place[3]
        wide[place[0], place[1], at] = GRID[byte % 16] * factor
        wide[place[0], place[1], at + 1] = GRID[byte // 16] * factor
    return {"blocks": blocks, "scales": scales}, wide


def common(directory):
    """Write config.json, and return the tensors that are no matrices of experts."""
    (directory / "config.json").write_text(json.dumps(CONFIG))
    module = model_registry.make_decoder(config_file.load_config(directory), out_in=True)
    random = np.random.default_rng(0)
    return {
        name: random.standard_normal(parameter.shape, np.float32)
        for name, parameter in parameters_of(module).items()
        if BLOCK not in name
    } | {
        f"{BLOCK}.gate_up_proj_bias": random.standard_normal((EXPERTS, 2 * INNER), np.float32),
        f"{BLOCK}.down_proj_bias": np.ones((EXPERTS, WIDTH), np.float32),
    }


def in_bits(**matrices):
    return {
        f"{BLOCK}.{which}_proj_{name}": values
        for which, each in matrices.items()
        for name, values in each.items()
    }


def in_turns(gate_up):
    return np.concatenate([gate_up[:, ::2], gate_up[:, 1::2]], axis=1)


def write(directory, config, tensors):
    write_checkpoint(directory, config, {n: np.ascontiguousarray(t) for n, t in tensors.items()})
    return open_checkpoint(directory, out_in=True)


def test_four_bits_and_gate_and_up_in_turns_are_read_as_what_they_stand_for(tmp_path):
    up, wide_up = packed(1, 2 * INNER, WIDTH)
    down, wide_down = packed(2, WIDTH, INNER)
    others, exact = common(tmp_path), in_bits(gate_up=up, down=down)
    both = {"gate_up": wide_up, "down": wide_down}
    plain = {f"{BLOCK}.{name}_proj": wide.swapaxes(1, 2) for name, wide in both.items()}
    bias = in_turns(others[f"{BLOCK}.gate_up_proj_bias"])
    for config, tensors in ((PACKED, exact), (CONFIG, plain)):
        found = write(tmp_path, config, others | tensors)
        assert np.array_equal(found.read(f"{BLOCK}.gate_up_proj.weight"), in_turns(wide_up))
        rows = found.rows(f"{BLOCK}.gate_up_proj.weight")
        assert np.array_equal(rows[1:2], in_turns(wide_up)[1:2])
        assert np.array_equal(found.read(f"{BLOCK}.down_proj.weight"), wide_down)
        assert np.array_equal(found.read(f"{BLOCK}.gate_up_proj.bias"), bias)
    blocks, scales = (f"{BLOCK}.down_proj_{name}" for name in ("blocks", "scales"))
    for change, said in (
        ({scales: None}, f"missing {scales}"),
        ({scales: exact[scales][:, :, :1]}, f"{blocks} and {scales} are"),
        ({blocks: exact[blocks].astype(np.float32)}, f"{blocks} is F32, expected U8"),
        ({f"{BLOCK}.down_proj": plain[f"{BLOCK}.down_proj"]}, "are given"),
    ):
        changed = (others | exact | change).items()
        tensors = {name: values for name, values in changed if values is not None}
        with pytest.raises(CheckpointError, match=re.escape(said)):
            _ = write(tmp_path, PACKED, tensors).names


def test_an_exponent_that_stands_for_nan_is_kept_beside_zeros(tmp_path):
    up, _ = packed(1, 2 * INNER, WIDTH)
    down, _ = packed(2, WIDTH, INNER)
    down["blocks"][1, 3, 0], down["scales"][1, 3, 0] = 0, 255
    checkpoint = write(tmp_path, PACKED, common(tmp_path) | in_bits(gate_up=up, down=down))
    rows = checkpoint.rows(f"{BLOCK}.down_proj.weight")
    for read in (rows.read, lambda: rows.mxfp4(1)):
        with pytest.raises(CheckpointError, match=r"found 32 of .* that are NaN or infinite"):
            read()
    assert rows.mxfp4(0) is not None


@pytest.mark.thorough
def test_four_bits_of_experts_are_rounded_again_in_int4(tmp_path, with_kernels, monkeypatch):
    for least in ("LEAST_INPUTS", "LEAST_ELEMENTS"):
        monkeypatch.setattr(int4_rounding, least, WIDTH)
    up, wide_up = packed(1, 2 * INNER, WIDTH)
    down, wide_down = packed(2, WIDTH, INNER)
    others = common(tmp_path)
    checkpoint = write(tmp_path, PACKED, others | in_bits(gate_up=up, down=down))
    config = config_file.load_config(tmp_path)
    module = model_registry.make_decoder(config, dtype="int4", out_in=True)
    errors = {}
    reads = quantizing.readers(module, checkpoint.rows, errors.__setitem__)
    stored = {
        name: reads[name]() if name in reads else checkpoint.read(name)
        for name in flat_parameters(nnx.state(module))
    }
    rows = quantizing.widened(module, stored)
    for kind, wide in (("gate_up", in_turns(wide_up)), ("down", wide_down)):
        name = f"{BLOCK}.{kind}_proj.weight"
        assert stored[name].dtype == np.uint32
        assert errors[name] == 0
        assert np.array_equal(rows[name][:], wide)
    # the kernel and both portable forms
    experts = module.model.layers[0].mlp.experts
    graph, state = nnx.split(experts.down_proj)
    held = {key: stored[f"{BLOCK}.down_proj.{key}"] for key in ("weight", "weight_scale", "bias")}
    layer = nnx.merge(graph, with_parameters(state, held))
    x = np.random.default_rng(3).standard_normal((20, INNER)).astype(ml_dtypes.bfloat16)
    x = x.astype(np.float32)
    for found in (
        jax.vmap(lambda one: layer.dot(one, jnp.int32(1)))(x),
        layer.dot(jnp.asarray(x), jnp.int32(1)),
        kernel_calls.experts(x, np.ones((20, 1), np.int32), layer.operand)[:, 0],
    ):
        np.testing.assert_allclose(found, x @ wide_down[1].T + 1, rtol=1e-5, atol=1e-3)
    plain = {f"{BLOCK}.down_proj": wide_down.swapaxes(1, 2)}
    checkpoint = write(tmp_path, PACKED, others | in_bits(gate_up=up) | plain)
    reads = quantizing.readers(module, checkpoint.rows)
    with pytest.raises(CheckpointError, match="expected a matrix in MXFP4"):
        reads[f"{BLOCK}.down_proj.weight"]()
