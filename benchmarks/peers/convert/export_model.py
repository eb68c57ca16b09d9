"""Write a model of the benchmark in a peer's format. Runs in an environment that only exports.

    peers/convert/export_model.py onnx        MODEL OUTPUT TASK
    peers/convert/export_model.py onnx-int8   ONNX  OUTPUT          of an export, products quantized
    peers/convert/export_model.py onnx-int4   ONNX  OUTPUT          of an export, weights in blocks of 32
    peers/convert/export_model.py ctranslate2 MODEL OUTPUT TYPE
    peers/convert/export_model.py openvino    MODEL OUTPUT TASK FORMAT

Each format is written by the tool that its users run: optimum, ONNX Runtime's dynamic quantization (per
channel), CTranslate2's converter. MODEL is a directory in Hugging Face layout; the tools need a tokenizer.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

_POSITIONS = {
    "gpt2": "n_positions",
    **dict.fromkeys(("llama", "qwen3"), "max_position_embeddings"),
}
"""Decoders, which have no tokenizer of their own, and the names of their longest contexts."""


def with_tokenizer(model: Path, directory: Path) -> Path:
    """Copy a model, with links to its weights and a tokenizer of as many meaningless tokens."""
    copy = directory / model.name
    shutil.copytree(model, copy, symlinks=True, ignore=shutil.ignore_patterns("*.safetensors"))
    for weights in model.glob("*.safetensors"):
        (copy / weights.name).symlink_to(weights)
    config = json.loads((copy / "config.json").read_text())
    size = config["vocab_size"]
    if config["model_type"] in _POSITIONS:
        names = [f"t{place}" for place in range(size - 1)] + ["<|endoftext|>"]
        (copy / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
        (copy / "merges.txt").write_text("#version: 0.2\n")
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), names[-1])
        about = {
            "tokenizer_class": "GPT2Tokenizer",
            "model_max_length": config[_POSITIONS[config["model_type"]]],
        }
        (copy / "tokenizer_config.json").write_text(json.dumps({**about, **special}))
    elif not (copy / "tokenizer_config.json").exists():
        # Its tokenizer.json is there; CTranslate2's converter reads vocab.txt's order.
        content = json.loads((copy / "tokenizer.json").read_text())["model"]["vocab"]
        (copy / "vocab.txt").write_text("\n".join(sorted(content, key=content.__getitem__)) + "\n")
        about = {"tokenizer_class": "BertTokenizer", "model_max_length": 512}
        (copy / "tokenizer_config.json").write_text(json.dumps(about))
    return copy


def onnx(model: Path, output: Path, task: str) -> None:
    """Export a graph with float32 weights."""
    from optimum.exporters.onnx import main_export

    main_export(
        str(model), str(output), task=task, do_validation=False, library_name="transformers"
    )


def onnx_int8(exported: Path, output: Path) -> None:
    """Quantize weights to int8 with a scale for each channel; activations are quantized at run time."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    output.mkdir(parents=True)
    graph = str(exported / "model.onnx")
    quantize_dynamic(
        graph, str(output / "model.onnx"), weight_type=QuantType.QInt8, per_channel=True
    )


def onnx_int4(exported: Path, output: Path) -> None:
    """Quantize weights to int4 with a scale for 32, products on int8 activations, which is the fastest.

    The quantizer takes MatMul alone, so GPT-2's Gemm becomes MatMul and Add.
    """
    import onnx as onnx_package
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    model = onnx_package.load(str(exported / "model.onnx"))
    nodes = []
    for node in model.graph.node:
        if node.op_type != "Gemm":
            nodes.append(node)
            continue
        x, weight, bias = node.input
        made, inner = onnx_package.helper.make_node, f"{node.output[0]}_product"
        nodes += [
            made("MatMul", [x, weight], [inner]),
            made("Add", [inner, bias], list(node.output)),
        ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True, accuracy_level=4)
    quantizer.process()
    output.mkdir(parents=True)
    quantizer.model.save_model_to_file(str(output / "model.onnx"), False)


def ctranslate2_model(model: Path, output: Path, kind: str) -> None:
    """Convert to CTranslate2's format with float32 or int8 weights."""
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(model)).convert(str(output), quantization=kind)


def openvino_model(model: Path, output: Path, task: str, weights: str) -> None:
    """Convert to OpenVINO: weights fp32, int8 or int4; decoders with the tokenizers that GenAI needs."""
    cli = Path(sys.executable).with_name("optimum-cli")
    options = ("--task", task, "--library", "transformers", "--weight-format", weights)
    command = (str(cli), "export", "openvino", "--model", str(model), *options, str(output))
    subprocess.run(command, check=True)
    if task.startswith("text-generation") and not (output / "openvino_tokenizer.xml").exists():
        import openvino
        import openvino_tokenizers
        from transformers import AutoTokenizer

        tokenizers = openvino_tokenizers.convert_tokenizer(
            AutoTokenizer.from_pretrained(model), with_detokenizer=True
        )
        for name, made in zip(("tokenizer", "detokenizer"), tokenizers, strict=True):
            openvino.save_model(made, output / f"openvino_{name}.xml")


def main(form: str, source: Path, output: Path, *options: str) -> None:
    """Write to a temporary path and rename it when it is complete."""
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    if form.startswith("onnx-"):
        {"onnx-int8": onnx_int8, "onnx-int4": onnx_int4}[form](source, partial)
    else:
        with tempfile.TemporaryDirectory() as directory:
            model = with_tokenizer(source, Path(directory))
            writers: dict[str, Callable[..., None]] = {
                "onnx": onnx,
                "ctranslate2": ctranslate2_model,
                "openvino": openvino_model,
            }
            writers[form](model, partial, *options)
    partial.rename(output)


if __name__ == "__main__":
    form, source, output, *options = sys.argv[1:]
    main(form, Path(source), Path(output), *options)
