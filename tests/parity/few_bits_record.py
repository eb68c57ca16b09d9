"""Records what the libraries that publish matrices in few bits write and read, and what torch says of models.

python -m tests.parity.few_bits_record
# needs torch, transformers, compressed-tensors and bitsandbytes; writes few_bits_reference.npz
"""

import json
import tempfile
from pathlib import Path

import numpy as np

from .few_bits_cases import LLAMA, REFERENCE, STEPS, cases

OUTPUTS, INPUTS = 40, 96
"""Of the matrices: no power of two."""


def _matrix(seed, outputs=OUTPUTS, inputs=INPUTS):
    import torch

    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_normal((outputs, inputs), np.float32))


def _compressed():
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    four = {"num_bits": 4, "strategy": "group", "group_size": 32}
    eight, block = {"num_bits": 8, "strategy": "channel"}, {"block_structure": [8, 32]}
    kinds = (
        ("int4", "pack-quantized", four, torch.bfloat16),
        ("int4-zeros", "pack-quantized", {**four, "symmetric": False}, torch.float16),
        ("int8-packed", "pack-quantized", eight, torch.float32),
        ("int8", "int-quantized", eight, torch.bfloat16),
        ("fp8-tensor", "float-quantized", {"strategy": "tensor"}, torch.float32),
        ("fp8-channel", "float-quantized", {"strategy": "channel"}, torch.bfloat16),
        ("fp8-block", "float-quantized", {"strategy": "block", **block}, torch.float32),
    )
    for number, (name, form, arguments, dtype) in enumerate(kinds):
        if form == "float-quantized":
            arguments = {"type": "float", **arguments}
        args = QuantizationArgs(**arguments)
        weight = _matrix(number)
        blocks = {
            "group": weight.reshape(OUTPUTS, -1, 32),
            "channel": weight.reshape(OUTPUTS, 1, -1),
            "tensor": weight.reshape(1, 1, -1),
            "block": weight.reshape(OUTPUTS // 8, 8, INPUTS // 32, 32).swapaxes(1, 2).flatten(2),
        }[arguments["strategy"]]
        scale, zeros = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        if arguments["strategy"] == "tensor":
            scale, zeros = scale.reshape(1), zeros.reshape(1)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        scale = scale.to(dtype)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": zeros.to(torch.int8)}
        if arguments.get("symmetric", True):
            del given["weight_zero_point"]
        kind = BaseCompressor.get_value_from_registry(form)
        packed = kind.compress(given, scheme)
        wide = {**packed, "weight_scale": scale.float()}  # its dtype is that of the result
        dumped = args.model_dump(mode="json")
        settings = {
            **{"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]},
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": dumped}},
        }
        yield f"compressed-{name}", settings, packed, kind.decompress(wide, scheme)["weight"]


def _fp8():
    """Matrices of transformers' FP8."""
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    for number, (name, block) in enumerate((("block", [8, 32]), ("tensor", None))):
        rows, columns = block or (OUTPUTS, INPUTS)
        weight = _matrix(20 + number)
        blocks = weight.reshape(OUTPUTS // rows, rows, INPUTS // columns, columns)
        scale = blocks.abs().amax((1, 3)) / 448
        found = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
        scale = scale if block else scale.reshape(())
        settings = {"quant_method": "fp8", "weight_block_size": block, "fmt": "e4m3"}
        tensors = {"weight": found, "weight_scale_inv": scale}
        scales = scale if block else scale.reshape(-1, 1)
        wide = Fp8Dequantize(None)._dequantize_one(found, scales)
        yield f"fp8-{name}", settings, tensors, wide


def _bitsandbytes():
    import torch
    from bitsandbytes.functional import dequantize_4bit, int8_vectorwise_quant, quantize_4bit

    common = {"quant_method": "bitsandbytes"}
    for number, (kind, nested) in enumerate((("nf4", True), ("fp4", False))):
        weight = _matrix(30 + number, 41, 75)  # blocks of 64 elements end within rows
        packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        tensors = {"weight": packed}
        for name, value in state.as_dict(packed=True).items():
            tensors[f"weight.{name}"] = value
        settings = {**common, "load_in_4bit": True, "bnb_4bit_quant_type": kind}
        yield f"bitsandbytes-{kind}", settings, tensors, dequantize_4bit(packed, state)
    found, largest, _ = int8_vectorwise_quant(_matrix(33).half())
    tensors = {"weight": found, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    wide = found.float() * (largest[:, None] / 127)
    yield "bitsandbytes-int8", {**common, "load_in_8bit": True}, tensors, wide


def _torch_logits(case):
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as directory:
        case.write(Path(directory))
        model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokens = torch.from_numpy(case.prompt)[None].long()
    steps = []
    with torch.no_grad():
        for _ in range(STEPS):
            steps.append(model(tokens, use_cache=False).logits[:, -1])
            tokens = torch.cat([tokens, steps[-1].argmax(1)[:, None]], 1)
    return torch.cat(steps).numpy()


def main():
    from safetensors.torch import save

    recorded = {}
    for name, settings, tensors, values in (*_compressed(), *_fp8(), *_bitsandbytes()):
        content = save({f"m.{key}": value.contiguous() for key, value in tensors.items()})
        recorded[f"{name}/tensors"] = np.frombuffer(content, np.uint8)
        recorded[f"{name}/settings"] = np.array(json.dumps(settings))
        recorded[f"{name}/values"] = values.float().numpy()
    for case in cases():
        recorded[f"{case.name}/logits"] = _torch_logits(case)
    assert LLAMA["model_type"] == "llama"
    np.savez_compressed(REFERENCE, **recorded)
    print(f"{REFERENCE}: {REFERENCE.stat().st_size} bytes, {sorted(recorded)}")


if __name__ == "__main__":
    main()
