"""How the golden bundles of format 1 were made, once, with jax 0.10.2. For the record: never run it again.

    call/       two targets, two programs of the user's own, with weights and a licence
    decoder/    a GPT-2 of 500 parameters with a tokenizer; its executables are of a jaxlib that never was,
                so that every machine falls back to the portable programs (and the files stay small)

`expected.json` holds the digests of both and what their programs answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prejit.compiler.pipeline.pack.bundle_files import PackedTarget, assemble, layer
from prejit.runtime import load
from prejit.runtime.base.digests import digest_of
from prejit.runtime.format import limits
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, TITLE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import read_root
from prejit.runtime.format.schema import Segment
from prejit.runtime.format.writing import write_layout
from prejit.runtime.machine.fingerprint import Fingerprint

HERE = Path(__file__).parent
VOCABULARY, WIDTH, POSITIONS = 40, 4, 16
FUNCTIONS = """
import jax.numpy as jnp

def score(params, x):
    return jnp.tanh(x @ params["kernel"]) + params["bias"]

def nest(tree):
    half, (count, flag) = tree["half"], tree["pair"]
    return {"sums": (jnp.where(flag, half + half, half), count + 1), "scalar": jnp.float32(2.5)}
"""
CALL = """
[bundle]
name = "call"
license = "LICENSE"
[[program]]
name = "score"
function = "golden_functions:score"
params = "score.safetensors"
args = { x = "float32[{b}, 16]" }
buckets = { b = [2] }
[[program]]
name = "nest"
function = "golden_functions:nest"
args = { tree = { half = "bfloat16[3]", pair = ["int32[2, 2]", "bool[]"] } }
[[target]]
name = "cpu-x86-64-v2"
[[target]]
name = "cpu-x86-64-v3"
"""
DECODER = """
[bundle]
name = "decoder"
[model]
source = "model"
[generate]
batch = [1]
prompt = [4]
context = [16]
[[target]]
name = "cpu-x86-64-v2"
"""


def write_inputs(at: Path) -> None:
    random = np.random.default_rng(4)
    (at / "golden_functions.py").write_text(FUNCTIONS)
    (at / "LICENSE").write_text("CC0-1.0\n")
    (at / "call.toml").write_text(CALL)
    (at / "decoder.toml").write_text(DECODER)
    kernel = random.standard_normal((16, 4), np.float32)
    save_file({"kernel": kernel, "bias": np.arange(4, dtype=np.float32)}, at / "score.safetensors")
    model = at / "model"
    model.mkdir()
    config = {
        **{"model_type": "gpt2", "vocab_size": VOCABULARY, "n_positions": POSITIONS},
        **{"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "activation_function": "gelu_new"},
        **{"layer_norm_epsilon": 1e-5, "bos_token_id": 0, "eos_token_id": 0},
    }
    (model / "config.json").write_text(json.dumps(config))
    (model / "generation_config.json").write_text('{"eos_token_id": 0}')
    shapes = {
        **{"wte.weight": (VOCABULARY, WIDTH), "wpe.weight": (POSITIONS, WIDTH)},
        **{f"{name}.{leaf}": (WIDTH,) for leaf in ("weight", "bias") for name in ("ln_f",)},
        **{f"h.0.ln_{i}.{leaf}": (WIDTH,) for i in (1, 2) for leaf in ("weight", "bias")},
    }
    for name, rows, columns in (
        *(("attn.c_attn", WIDTH, 3 * WIDTH), ("attn.c_proj", WIDTH, WIDTH)),
        *(("mlp.c_fc", WIDTH, 4 * WIDTH), ("mlp.c_proj", 4 * WIDTH, WIDTH)),
    ):
        shapes |= {f"h.0.{name}.weight": (rows, columns), f"h.0.{name}.bias": (columns,)}
    weights = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, model / "model.safetensors")
    letters = {letter: i + 1 for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz Ġ.,:()_'0123")}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<|end|>": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(model / "tokenizer.json"))


def without_executables(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The files of a bundle whose executables are a few words, for a jaxlib that never was."""
    words = b"an executable for a jaxlib that never was"
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(words)
    segment = Segment(0, len(frame), digest_of(frame), len(words), digest_of(words))
    with Layout(path) as layout:
        root = read_root(layout)
        [target] = match(root, Fingerprint.current())
        contents = read_contents(layout, target)
        layers = [
            layer(
                kept.mediaType,
                frame
                if kept.mediaType == EXECUTABLES_MEDIA_TYPE
                else layout.read_blob(kept.digest, kept.size),
                (kept.annotations or {})[TITLE],
            )
            for kept in contents.manifest.layers
        ]
    config = contents.config
    config = dataclasses.replace(
        config,
        requirement=dataclasses.replace(config.requirement, jaxlib="0.0.0"),
        programs=tuple(dataclasses.replace(p, executable=segment) for p in config.programs),
    )
    return assemble(config.bundle, [PackedTarget(config, tuple(layers))])


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        write_inputs(at)
        environment = {**os.environ, "PREJIT_CACHE": str(at / "cache")}
        for name in ("call", "decoder"):
            command = [sys.executable, "-m", "prejit.runtime", "build", str(at / f"{name}.toml")]
            subprocess.run([*command, "-o", str(at)], env=environment, check=True)
        with Layout(at / "call") as layout:
            index = layout.read("index.json", limits.MAX_INDEX_BYTES)
        blobs = {f"sha256:{f.name}": f for f in (at / "call" / "blobs" / "sha256").iterdir()}
        write_layout(HERE / "call", index, blobs)
        write_layout(HERE / "decoder", *without_executables(at / "decoder"))
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    called, decoder = load(HERE / "call"), load(HERE / "decoder")
    generated = decoder.generate("a golden", max_new_tokens=8)
    expected = {
        "digests": {"call": called.digest, "decoder": decoder.digest},
        "score": called.call("score", x=x).tolist(),
        "prompt": "a golden",
        "token_ids": list(generated.token_ids),
        "text": generated.text,
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
