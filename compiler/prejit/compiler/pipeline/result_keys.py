"""The keys of a build's results: the named ingredients that decide each one, and nothing else.

lower     a model's program, portable              manifest, configuration files, our code, versions
inputs    what tracing a user's code reads, and    manifest, our code, versions, all that it read
trace     the portable program (see `traces`)
native    the same program with calls of kernels   as lower, and the forms of products that differ
compile   an executable                            StableHLO, target, compiler, flags, kernels
weights   the weights layer                        files of the checkpoint, dtype, our code
accuracy  what the dtypes cost                     files of the checkpoint, dtypes, the text
bits      the dtype of each matrix of an encoder   files of the checkpoint, dtype, the text, our code
...-outline  that weights or bits were made        as those, of each file size and last bytes
tokenizer a check that passed                      tokenizer.json, config.json
chunks    digests of a layer's chunks and of its   digest of the layer, hash function, size, size of
          fs-verity tree                           the tree's blocks
cost      microseconds of an encoder's program     as compile, and the machine
sizes     that a program was compared with its     the portable programs, parameters, our code
          function at other sizes
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from prejit.compiler.lowering.user.trace_inputs import version_of
from prejit.compiler.manifest.manifest import Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.model import (
    ModelFiles,
    cache_dtype,
    file_digest,
    int4_text,
    longest_context,
    longest_source,
)
from prejit.compiler.pipeline.published_files import Digests
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.lowering_settings import jax_configuration
from prejit.compiler.store.prejit_code import (
    ACCURACY,
    BITS,
    GOLDEN,
    INT4_TEXT,
    LOWERING,
    OWN_ACCURACY,
    OWN_WEIGHTS,
    PACKING,
    SIZES,
    TOKENIZER,
    WEIGHTS,
    code_digest,
)
from prejit.runtime.base.files import digest_of
from prejit.runtime.format.names import ADAPTED
from prejit.runtime.machine.fingerprint import Fingerprint

Contents = Mapping[str, str]
"""Parameters by name, each as `content_of` describes it."""

Ingredients = tuple[tuple[str, str], ...]


def lower_key(manifest: Manifest, model: ModelFiles, spec: ProgramSpec) -> Key:
    """Return the key of a model's portable program."""
    sizes = ", ".join(f"{name}={size}" for name, size in sorted(spec.bucket.items()))
    mesh = manifest.mesh
    assert manifest.model is not None
    return Key(
        "lower",
        f"{manifest.bundle.name}/{spec.name}",
        (
            ("program", spec.kind),
            ("bucket", sizes),
            ("dtype", manifest.model.dtype),
            ("cache_dtype", cache_dtype(manifest)),
            ("longest context", str(longest_context(manifest))),
            ("longest source", str(longest_source(manifest))),
            ("mesh", "none" if mesh is None else str(mesh)),
            ("matrices", model.matrices),
            *_adapters(manifest, spec),
            *model.configuration,
            ("our code", code_digest(*LOWERING)),
            *_jax("jax", "flax", "transformers"),
        ),
    )


def _adapters(manifest: Manifest, spec: ProgramSpec) -> Ingredients:
    """Return the room for adapters, for programs whose rows may have some."""
    if (room := manifest.adapters) is None or not spec.kind.startswith(ADAPTED):
        return ()
    targets = ", ".join(room.targets) or "all"
    return (("adapters", f"{room.slots} of rank {room.rank} for {targets}"),)


def own_lower_key(manifest: Manifest, spec: ProgramSpec, portable: str) -> Key:
    """Return the key of what a decoder of the user computes, from which its program with kernels is made.

    `portable` is the digest of the portable program.
    """
    return Key(
        "lower",
        f"{manifest.bundle.name}/{spec.name}",
        (
            ("portable program", portable),
            ("our code", code_digest(*LOWERING, *OWN_WEIGHTS)),
            *_jax("jax", "flax"),
        ),
    )


def native_key(lowered: Key, forms: Mapping[Product, str]) -> Key:
    """Return the key of a program with kernels, from its portable key and the forms without a kernel."""
    differing = ((f"form of {product}", form) for product, form in sorted(forms.items()))
    return Key("native", lowered.name, (*lowered.ingredients, *differing))


def weights_key(
    manifest: Manifest,
    model: ModelFiles | None,
    files: Digests,
    user: Mapping[str, Contents],
    own: Contents | None = None,
    own_orders: Mapping[str, tuple[int, ...]] | None = None,
    draft: ModelFiles | None = None,
) -> Key:
    """Return the key of the weights layer.

    The files of a checkpoint count, and not its tensors: a checkpoint in other files is converted again. To
    hash all tensors takes as long: for 500 MB 1.0 s of CPU time, and to convert them 0.8 s (bfloat16) to
    1.5 s (float32), 2026-11-22.

    `files` are those of the checkpoint, and of that of `draft`, the draft model. `user` has the parameters of
    the user's functions by section, and `own` those of the user's decoder (None: the manifest has none).
    `own_orders` has those whose axes are stored in another order, with that order.
    """
    ingredients = [("our code", code_digest(*PACKING))]
    if own is not None:
        assert manifest.model is not None
        ingredients += [
            ("our code for decoders of the user", code_digest(*OWN_WEIGHTS)),
            ("dtype", manifest.model.dtype),
            *((f"parameter {name}", content) for name, content in own.items()),
            *((f"order of {name}", str([*axes])) for name, axes in (own_orders or {}).items()),
        ]
    elif manifest.model is not None and model is not None:
        ingredients += [
            ("our code for published models", code_digest(*WEIGHTS)),
            ("dtype", manifest.model.dtype),
            ("matrices", model.matrices),
            *_int4_text(manifest, model),
            *_files(files),
        ]
    if draft is not None and manifest.draft is not None:
        ingredients += [("draft dtype", manifest.draft.dtype), ("draft matrices", draft.matrices)]
    for section, contents in user.items():
        for name, content in contents.items():
            ingredients.append((f"{section}:{name}", content))
    return Key("weights", manifest.bundle.name, tuple(ingredients))


def _int4_text(manifest: Manifest, model: ModelFiles) -> Ingredients:
    """Return what decides the weights beside the checkpoint: a text on which the model is evaluated."""
    if (text := int4_text(manifest, model)) is None:
        return ()
    return (
        *_texts(text, model.transformer / "tokenizer.json"),
        ("longest context", str(longest_context(manifest))),
        ("our code for texts", code_digest(*INT4_TEXT)),
        *_jax("jax", "flax", "transformers"),
    )


def _texts(text: Path, tokenizer: Path) -> Ingredients:
    """Return what a text that a model reads consists of. Reading it says whether a tokenizer is missing."""
    held = file_digest(tokenizer) if tokenizer.is_file() else "none"
    return (("text", f"{text.name} {file_digest(text)}"), ("tokenizer", held))


def bits_key(manifest: Manifest, model: ModelFiles, files: Digests) -> Key:
    """Return the key of the dtypes of an encoder's matrices."""
    stored = manifest.model
    assert stored is not None
    text = None if stored.evaluation is None else manifest.resolve(stored.evaluation)
    ingredients = (
        ("dtype", stored.dtype),
        ("matrices", model.matrices),
        *(() if text is None else _texts(text, model.transformer / "tokenizer.json")),
        *model.configuration,
        ("our code", code_digest(*BITS)),
        *_jax("jax", "flax", "transformers"),
        *_files(files),
    )
    return Key("bits", manifest.bundle.name, ingredients)


def accuracy_key(
    manifest: Manifest, model: ModelFiles, files: Digests, text: str, tokenizer: str
) -> Key:
    """Return the key of what the dtypes of weights and cache cost.

    `text` is the name and digest of the evaluation text and `tokenizer` the digest of tokenizer.json, or
    `none`.
    """
    assert manifest.model is not None
    ingredients = (
        ("dtype", manifest.model.dtype),
        ("cache_dtype", cache_dtype(manifest)),
        ("text", text),
        ("tokenizer", tokenizer),
        ("matrices", model.matrices),
        *(
            (name, value)
            for name, value in _int4_text(manifest, model)
            if name.startswith("our code")
        ),
        ("our code", code_digest(*ACCURACY)),
        ("jax configuration", jax_configuration(os.environ)),
        *_files(files),
        *versions("jaxlib").items(),
        *installed("jax", "flax", "transformers").items(),
    )
    return Key("accuracy", manifest.bundle.name, ingredients)


def own_accuracy_key(
    manifest: Manifest, weights: str, programs: Iterable[str], text: str, tokenizer: str, bos: int
) -> Key:
    """Return the key of what the dtypes cost a decoder of the user.

    `weights` is the digest of the key of the weights layer, which holds the exact values, and `programs` are
    those of the portable programs, which hold what the decoder computes. A text begins with the token `bos`.
    """
    ingredients = (
        ("cache_dtype", cache_dtype(manifest)),
        ("text", text),
        ("tokenizer", tokenizer),
        ("bos", str(bos)),
        ("weights", weights),
        ("programs", " ".join(sorted(set(programs)))),
        ("our code", code_digest(*OWN_ACCURACY)),
        *_jax("jax", "flax"),
    )
    return Key("accuracy", manifest.bundle.name, ingredients)


def tokenizer_key(manifest: Manifest, tokenizer: bytes, config: str) -> Key:
    """Return the key of a check of tokenizer.json that passed.

    `config` is the digest of config.json, which holds the size of the vocabulary. Reading that takes
    transformers, which a build that changes nothing does not import. For a decoder of the user it is that
    size itself. It holds tokenizer_config.json too, and for an encoder whether it scores.
    """
    ingredients = (
        ("file", digest_of(tokenizer)),
        ("config", config),
        ("our code", code_digest(*TOKENIZER)),
        *versions("tokenizers").items(),
        *installed("transformers").items(),
    )
    return Key("tokenizer", manifest.bundle.name, ingredients)


def cost_key(compiled: Key) -> Key:
    """Return the key of what a full bucket costs on this machine, from the key of its executable."""
    here = Fingerprint.current()
    machine = ("measured on", f"{here.cpu_model}, {here.cpu_count} CPUs")
    return Key("cost of a full bucket", compiled.name, (*compiled.ingredients, machine))


def golden_key(
    name: str,
    *,
    program: str,
    executable: str,
    weights: str,
    signature: str,
    tolerance: int,
    seed: int,
) -> Key:
    """Return the key of a program's golden answer.

    Args:
        name: names of the bundle and the program, for people.
        program: digest of its StableHLO.
        executable: digest of the executable that answers, or `portable`.
        weights: digest of the weights layer, or `none`.
        signature: digest of what the recipe looks at: kind, bucket, arguments, results.
        tolerance: tolerance of the answer.
        seed: seed of the arguments.
    """
    ingredients = (
        ("program", program),
        ("executable", executable),
        ("weights", weights),
        ("signature", signature),
        ("tolerance", str(tolerance)),
        ("seed", str(seed)),
        ("our code", code_digest(*GOLDEN)),
        *versions("jaxlib", "numpy").items(),
    )
    return Key("golden", name, ingredients)


def sizes_key(name: str, compared: str, parameters: Contents) -> Key:
    """Return the key of a program that was compared with its function at other sizes.

    `compared` is the digest of what is compared, which names the programs by their digests.
    """
    ingredients = (
        ("compared", compared),
        *((f"parameter {name}", content) for name, content in parameters.items()),
        ("our code", code_digest(*SIZES)),
        *versions("jaxlib", "numpy").items(),
    )
    return Key("sizes", name, ingredients)


def measuring_key(what: str, *ingredients: tuple[str, str]) -> Key:
    """Return the key of a lock: a build holds it while it measures `what`."""
    return Key("measure", what, ingredients)


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages."""
    return {package: _version(package) for package in packages}


_version = cache(metadata.version)


def installed(*packages: str) -> dict[str, str]:
    """Return the versions of installed packages with the digests of their files.

    It is for wheels that are the same on every machine. Those of jaxlib differ between Pythons and CPUs, and
    machines with different ones would share nothing.
    """
    return {package: _installed(package) for package in packages}


_installed = cache(version_of)


def content_of(value: np.ndarray[Any, Any]) -> str:
    """Return dtype, shape and digest of a parameter."""
    return f"{value.dtype}{list(value.shape)} {digest_of(value.tobytes())}"


def _jax(*packages: str) -> Ingredients:
    """Return what decides a trace: settings and versions."""
    settings = ("jax configuration", jax_configuration(os.environ))
    return (settings, *versions("jaxlib").items(), *installed(*packages).items())


def _files(files: Digests) -> list[tuple[str, str]]:
    return [(f"file {name}", digest) for name, digest in files]
