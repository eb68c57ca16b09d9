"""How the golden bundles of format 5 were made, with jax 0.10.2. For the record.

    chunks/     a program with 150 KB of weights, whose layer has three chunks of 64 KB
    recorded/   two recorded files of jax's compilation cache, which are a few words
    decoder/    the GPT-2 of format 3, whose config lists the arrays of its cache
    reader/     a T5 that reads sources of two sizes, with its start token and a tokenizer

All executables are of a jaxlib that never was, so that every machine falls back to the portable programs (and
the files stay small). `expected.json` holds the digests and what the programs answer.

Format 5 is not released yet: a change of the format before its release may make these bundles again. When the
bundle's index became a blob, `decoder` and `reader` kept all their other blobs. After the release they are
never made again. From the root of the repository, with the names of the bundles
to make:

    .venv/bin/python -m tests.format.v5.make decoder reader
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from blake3 import blake3
from jax import export
from tests.format.v2.make import CPU, NO_JAXLIB, frame_of, without_executables
from tests.format.v3 import make as v3
from tests.layouts import index_file
from tests.parity import t5_cases
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from prejit.compiler.pipeline.pack.bundle_files import (
    PackedTarget,
    PackedTensor,
    assemble,
    check_readable,
    layer,
    write_weights,
)
from prejit.compiler.store.directory import DirectoryStore
from prejit.runtime import load
from prejit.runtime.base.digests import digest_of
from prejit.runtime.bundle import Bundle
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.limits import MIN_CHUNK_BYTES
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.schema import (
    Chunks,
    Config,
    Memory,
    Portable,
    ProgramEntry,
    RecordedProgram,
)
from prejit.runtime.format.writing import write_layout
from prejit.runtime.machine.requirement import Requirement

HERE = Path(__file__).parent
PARTS = 3
ROWS = 800
X = tuple((place - 8) / 4 for place in range(16))
WORDS = (
    *("<pad>", "</s>", "<unk>", "a", "golden", "bundle", "reads", "two", "sources", "of"),
    *("the", "format", "and", "writes", "what", "it", "has", "read"),
)
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": len(WORDS),
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MANIFESTS = {
    "decoder": """
[model]
source = "gpt2"
[generate]
batch = [1, 2]
prompt = [8]
context = [16, 32]
draft_tokens = 2
""",
    "reader": """
[model]
source = "t5"
[generate]
batch = [1, 2]
prompt = [4]
context = [8, 16]
source = [4, 8]
draft_tokens = 2
""",
}
SOURCES = ["a golden bundle", "the format of two sources", "what it has read and writes"]
"""With the end behind each: four places, which fill the smaller program; six, and seven."""


def values_of(part: int) -> np.ndarray:
    """Float32 [800, 16]: multiples of 1/8 that repeat, so that git stores little and sums are exact."""
    places = np.arange(part * ROWS * len(X), (part + 1) * ROWS * len(X))
    return ((places % 61 - 30) / 8).astype(np.float32).reshape(ROWS, len(X))


def score(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Float32 [3]: one sum for each tensor, so that a wrong byte in any of them changes a result."""
    return jnp.stack([jnp.sum(part, axis=0) @ x for part in weights])


def weights_file() -> bytes:
    tensors = [
        PackedTensor(f"score:part{part}", "float32", (ROWS, len(X)), lambda p=part: values_of(p))
        for part in range(PARTS)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        store = DirectoryStore.open(Path(scratch))
        with store.blob_writer() as blob:
            write_weights(tensors, blob)
        content = store.read_blob(blob.digest)
    assert content is not None
    return content


def chunked(content: bytes) -> Chunks:
    pieces = [content[at : at + MIN_CHUNK_BYTES] for at in range(0, len(content), MIN_CHUNK_BYTES)]
    digests = tuple(blake3(piece).hexdigest() for piece in pieces)
    return Chunks("blake3", MIN_CHUNK_BYTES, digests)


def recorded() -> None:
    """Write the bundle of recorded files, which answer nothing."""
    programs, content = [], b""
    for name, arguments in (("jit_score", ("float32[16]",)), ("jit_scale", None)):
        frame, segment = frame_of(f"what jax would keep of {name}".encode())
        key = hashlib.sha256(name.encode()).hexdigest()
        programs.append(
            RecordedProgram(
                name=name,
                file=f"{name}-{key}-cache",
                entry=dataclasses.replace(segment, offset=len(content)),
                ingredients={} if arguments is None else {"computation": key, "XLA flags": key},
                conditions={} if arguments is None else {"XLA flags": "--xla_x=1"},
                arguments=arguments,
                function=None if arguments is None else "serve:score",
            )
        )
        content += frame
    config = Config(
        format=5,
        bundle="recorded",
        target="cpu-x86-64-v2",
        requirement=Requirement("cpu", "x86_64", CPU.cpu_features, NO_JAXLIB),
        versions={"jax": jax.__version__, "jaxlib": NO_JAXLIB, "prejit": "0.1.0"},
        programs=(),
        weight_sets={},
        recorded=tuple(sorted(programs, key=lambda program: program.file)),
    )
    layers = (layer(RECORDED_MEDIA_TYPE, content, "programs.jax-cache"),)
    shutil.rmtree(HERE / "recorded", ignore_errors=True)
    index, blobs = assemble("recorded", [PackedTarget(config, layers)])
    check_readable(index, blobs)
    write_layout(HERE / "recorded", index, blobs)


def chunks() -> dict[str, Any]:
    """Write the bundle of chunks, and return what it answers."""
    jax.config.update("jax_traceback_in_locations_limit", 0)
    shape = jax.ShapeDtypeStruct((len(X),), jnp.float32)
    part = jax.ShapeDtypeStruct((ROWS, len(X)), jnp.float32)
    exported = export.export(jax.jit(score), platforms=("cpu",))([part] * PARTS, shape)
    portable, portable_at = frame_of(bytes(exported.mlir_module_serialized))
    executable, executable_at = frame_of(b"an executable for a jaxlib that never was")
    weights = weights_file()
    program = ProgramEntry(
        name="score",
        kind="call",
        bucket={},
        key=digest_of(b"score"),
        arguments=(str(Array(("x",), "float32", (len(X),))),),
        results=(str(Array((), "float32", (PARTS,))),),
        executable=executable_at,
        portable=portable_at,
        memory=Memory(PARTS * ROWS * len(X) * 4 + len(X) * 4, PARTS * 4, 0, 0),
        weights="program:score",
    )
    config = Config(
        format=5,
        bundle="chunks",
        target="cpu-x86-64-v2",
        requirement=CPU,
        versions={"jax": jax.__version__, "jaxlib": NO_JAXLIB, "prejit": "0.1.0"},
        programs=(program,),
        weight_sets={"program:score": tuple(f"score:part{part}" for part in range(PARTS))},
        portable=Portable(jax.__version__, "1.14.0", "2027-05-20"),
        chunks={WEIGHTS_MEDIA_TYPE: chunked(weights)},
    )
    layers = (
        layer(EXECUTABLES_MEDIA_TYPE, executable, "programs.xla"),
        layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"),
        layer(WEIGHTS_MEDIA_TYPE, weights, "weights.safetensors"),
    )
    shutil.rmtree(HERE / "chunks", ignore_errors=True)
    write_layout(HERE / "chunks", *assemble("chunks", [PackedTarget(config, layers)]))
    found = load(HERE / "chunks").call("score", x=np.array(X, np.float32)).tolist()
    return {"x": X, "score": found}


def built(name: str) -> Bundle:
    """Build a bundle from its manifest, write it without its executables, and return it loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        v3.write_models(at)
        t5_cases.Case("t5", T5, 5, old=False).write(at / "t5")
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = processors.TemplateProcessing(
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
        words.save(str(at / "t5" / "tokenizer.json"))
        target = '[[target]]\nname = "cpu-x86-64-v2"\n'
        manifest = at / f"{name}.toml"
        manifest.write_text(f'[bundle]\nname = "{name}"\n{MANIFESTS[name]}{target}')
        command = [sys.executable, "-m", "prejit.runtime", "build", str(manifest), "-o", str(at)]
        environment = {**os.environ, "PREJIT_CACHE": str(at / "cache")}
        subprocess.run(command, env=environment, check=True)
        shutil.rmtree(HERE / name, ignore_errors=True)
        write_layout(HERE / name, *without_executables(at / name))
    return load(HERE / name)


def decoder() -> dict[str, Any]:
    """Write the GPT-2, and return what it answers."""
    loaded = built("decoder")
    prompts = ["a golden", "two"]
    greedy = loaded.generate_batch(prompts, max_new_tokens=20, logprobs=2)
    options: Any = {**v3.SAMPLED, "logit_bias": v3.BIAS, "max_new_tokens": 20}
    return {
        "prompts": prompts,
        "token_ids": [one.token_ids for one in greedy],
        "texts": [one.text for one in greedy],
        "logprobs": [[one.logprob for one in result.logprobs or ()] for result in greedy],
        "options": v3.SAMPLED,
        "bias": v3.BIAS,
        "sampled": [loaded.generate(prompt, **options).token_ids for prompt in prompts],
        **v3.looked_up(loaded),
    }


def reader() -> dict[str, Any]:
    """Write the T5, and return what it answers."""
    loaded = built("reader")
    greedy = loaded.generate_batch(
        sources=SOURCES, max_new_tokens=12, logprobs=2, stop_token_ids=[]
    )
    prompt = [0, 4, 3]
    options: Any = {**v3.SAMPLED, "source": SOURCES[1], "max_new_tokens": 12}
    return {
        "sources": SOURCES,
        "token_ids": [one.token_ids for one in greedy],
        "texts": [one.text for one in greedy],
        "logprobs": [[one.logprob for one in result.logprobs or ()] for result in greedy],
        "prompt": prompt,
        "prompted": loaded.generate(
            prompt, source=SOURCES[2], max_new_tokens=12, stop_token_ids=[]
        ).token_ids,
        "options": v3.SAMPLED,
        "sampled": loaded.generate(**options).token_ids,
    }


MAKERS = {"chunks": chunks, "recorded": recorded, "decoder": decoder, "reader": reader}


def main() -> None:
    warnings.simplefilter("ignore")  # of fallback
    expected = json.loads((HERE / "expected.json").read_bytes())
    for name in sys.argv[1:]:
        if (answers := MAKERS[name]()) is not None:
            expected[name] = answers
        expected["digests"][name] = digest_of(index_file(HERE / name).read_bytes())
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
