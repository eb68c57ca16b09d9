"""The text that describes the valid values of each key of a manifest, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from prejit.compiler.base.stored_dtypes import STORED_DTYPES
from prejit.compiler.base.suggestions import did_you_mean
from prejit.compiler.manifest.shape_string import EXAMPLE, SIZE
from prejit.compiler.targets.cpu_count import MAX_CPUS
from prejit.runtime.format.limits import MAX_MESH_DEVICES
from prejit.runtime.format.release_limits import DEFAULT_SHARES, ReleaseLimits

KeyPath = tuple[str | int, ...]
"""The keys and places that lead to a value of a manifest."""

SIZES = "a list of different positive integers such as [1, 8]"
STATIC = 'a list of different texts, numbers or booleans such as ["fast", "exact"]'
SHARDING = (
    'a list with an axis of the mesh, "a+b" for two, or "" for each dimension, each axis once'
)
READS = 'a list of paths and glob patterns such as ["vocab.txt", "data/*.json"]'
SHAPES = "a list of different pairs of batch and length such as [[1, 32], [8, 128]]"
MAX_DRAFT = 64
"""Largest number of draft tokens that one pass verifies."""
MAX_SLOTS, MAX_RANK = 256, 512
"""Largest number of adapters that a bundle holds at a time, and largest rank of one."""
LEAST_PACKED, MAX_PACKED = 16, 8192
"""Smallest and largest number of tokens of a packed batch. Kernels sum a shape of 8 tokens in another order;
without kernels, 12 heads need 3 GB for the scores of the largest."""
DTYPES = tuple(STORED_DTYPES)
"""The dtypes that matrices are stored in."""
CACHE_DTYPES = ("float32", "bfloat16", "int8")
"""The dtypes that a KV cache is stored in."""

_TARGET_TEXTS = (
    *("fingerprint", "jax", "tuning", "platform", "architecture", "cpu", "device_kind"),
    *("compute_capability", "driver", "generation", "topology"),
)
_BUCKETS = ("batch", "prompt", "context", "source", "images")
_TARGET_LISTS = ("cpu_features", "constraints", "xla_flags")
_GPU = ("core_count", "bandwidth_bytes", "l2_bytes", "clock_mhz")
_EXPECTED = {
    "bundle": "a [bundle] table with a name",
    "bundle.name": "lowercase letters and digits with single . _ - between them, at most 128",
    "bundle.license": "the path of a file",
    "model": "a [model] table with a source",
    "model.source": 'a directory, or a .gguf file, or "hf://org/name@revision"',
    "model.adapters": "a list of directories of adapters",
    "model.adapters[]": "the directory of an adapter",
    "model.module": '"package.module:attribute"',
    "model.params": "the path of a .safetensors file or of an orbax directory",
    "model.reads": READS,
    "model.reads[]": "a path or a glob pattern",
    "model.impure": "true or false",
    "model.dtype": " or ".join(", ".join(f'"{name}"' for name in DTYPES).rsplit(", ", 1)),
    "model.accuracy": "true or false",
    "model.evaluation": "the path of a text file",
    "generate.cache_dtype": '"float32", "bfloat16" or "int8"',
    "generate": "a [generate] table with batch, prompt and context",
    "draft": "a [draft] table with a source",
    "draft.source": 'a directory, or a .gguf file, or "hf://org/name@revision"',
    "draft.dtype": " or ".join(", ".join(f'"{name}"' for name in DTYPES).rsplit(", ", 1)),
    "adapters": "an [adapters] table with slots, rank and targets",
    "adapters.slots": f"an integer of 1 to {MAX_SLOTS}",
    "adapters.rank": f"an integer of 1 to {MAX_RANK}",
    "adapters.targets": 'a list of names of matrices such as ["q_proj", "v_proj"]',
    "adapters.targets[]": 'the name of a matrix such as "q_proj"',
    "encode": "an [encode] table with shapes, packed or images",
    "encode.shapes": SHAPES,
    "encode.shapes[]": "a batch and a length such as [8, 128]",
    "encode.shapes[][]": SIZE,
    "encode.packed": "a list of different numbers of tokens such as [64, 256, 1024]",
    "encode.packed[]": f"an integer of {LEAST_PACKED} to {MAX_PACKED}",
    "encode.images": SIZES,
    "encode.images[]": SIZE,
    "encode.heads": 'a list such as ["sparse", "multi_vector"]',
    "encode.heads[]": '"sparse" or "multi_vector"',
    "encode.answers": "a table with yes, and maybe no, template and instruction",
    **{f"encode.answers.{key}": "a text" for key in ("template", "instruction")},
    **{f"encode.answers.{key}": 'a token such as "yes"' for key in ("yes", "no")},
    "program": "[[program]] tables",
    "program[]": "a [[program]] table",
    "program[].name": "letters, digits and . _ -, starting with a letter or digit",
    "program[].function": '"package.module:attribute", or the path of a jax.export artifact or of StableHLO',
    "program[].args": "a table of keyword arguments, a list of positional ones, or "
    '"package.module:attribute"',
    "program[].args.*": f"{EXAMPLE}, or a table or list of such",
    "program[].buckets": "a table such as { batch = [1, 8] }",
    "program[].buckets.*": SIZES,
    "program[].buckets.*[]": SIZE,
    "program[].static": 'a table such as { mode = ["fast", "exact"] }',
    "program[].static.*": STATIC,
    "program[].static.*[]": "a text, a number or a boolean",
    "program[].donate": "a list of names or positions of arguments",
    "program[].donate[]": "the name or the position of an argument",
    "program[].pad": 'a list of variables of buckets, or "unchecked"',
    "program[].pad[]": "the name of a variable of buckets",
    "program[].mask": "the name or the position of an argument",
    "program[].open_sizes": 'a list of variables of buckets, or "unchecked"',
    "program[].open_sizes[]": "the name of a variable of buckets",
    "program[].repeat": SIZES,
    "program[].repeat[]": SIZE,
    "program[].carry": "a list of names or positions of arguments",
    "program[].carry[]": "the name or the position of an argument",
    "program[].shardings": 'a table such as { x = ["data", ""] }',
    "program[].shardings.*": SHARDING,
    "program[].shardings.*[]": 'an axis of the mesh, "a+b" for two, or ""',
    "program[].params": "the path of a .safetensors file or of an orbax directory",
    "program[].reads": READS,
    "program[].reads[]": "a path or a glob pattern",
    "program[].impure": "true or false",
    "program[].check": "a table with function or files, and tolerance",
    "program[].check.function": "a function as package.module:attribute",
    "program[].check.files": "a list of .npz files",
    "program[].check.files[]": "the path of a .npz file",
    "program[].check.tolerance": "a number between 0 and 1",
    "library": "[[library]] tables",
    "library[]": "a [[library]] table with a path and handlers",
    "library[].path": "the path of a shared library",
    "library[].handlers": 'a table such as { scale = "ScaleHandler" }: the exported symbol of each name',
    "library[].handlers.*": "the name of a symbol that the library exports",
    "library[].targets": "a list of names of targets",
    "library[].targets[]": "the name of a target of this manifest",
    "target": "at least one [[target]] table with a name",
    "target[]": "a [[target]] table with a name",
    "target[].name": "the name of a target (`prejit targets` lists them)",
    **{f"target[].{key}": "a text" for key in _TARGET_TEXTS},
    **{f"target[].{key}": "a list of texts" for key in _TARGET_LISTS},
    **{f"target[].{key}[]": "a text" for key in _TARGET_LISTS},
    "target[].memory_bytes": "an integer",
    "target[].cpus": f"an integer of 1 to {MAX_CPUS}",
    "target[].gpu": "a table with core_count, bandwidth_bytes, l2_bytes and clock_mhz",
    **{f"target[].gpu.{key}": "an integer" for key in _GPU},
    "slo": "a [slo] table with limits",
    **{
        f"slo.{each.name}": 'a share such as "5%"'
        if each.name in DEFAULT_SHARES
        else "an integer of 1 or more"
        for each in fields(ReleaseLimits)
    },
    "mesh": "a [mesh] table with data and tensor, or axes",
    "mesh.axes": "a table of names and sizes such as { fsdp = 2, tp = 4 }",
    **{f"mesh.{key}": f"an integer of 1 to {MAX_MESH_DEVICES}" for key in ("data", "tensor")},
    **{f"generate.{name}": SIZES for name in _BUCKETS},
    **{f"generate.{name}[]": SIZE for name in _BUCKETS},
    "generate.draft_tokens": f"an integer of 0 to {MAX_DRAFT}, below every context",
}


def expected(where: KeyPath | str) -> str:
    """Return in words what may stand at a place of a manifest, or at the nearest place above it.

    Args:
        where: the place, or its pattern: `program[].name`.
    """
    if isinstance(where, str):
        return _EXPECTED[where]
    pattern, found = "", ""
    for depth, key in enumerate(where):
        free = (
            isinstance(key, str)
            and depth == 3
            and where[2] in ("args", "buckets", "static", "shardings", "handlers")
        )
        pattern += "[]" if isinstance(key, int) else ".*" if free else f".{key}"
        found = _EXPECTED.get(pattern.removeprefix("."), found)
    return found


def unknown_key(name: str, allowed: Iterable[str]) -> str:
    """Return the problem with a key that does not exist."""
    return f"unknown key{did_you_mean(name, allowed)}; allowed: {', '.join(allowed)}"
