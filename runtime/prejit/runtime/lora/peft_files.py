"""Read an adapter of PEFT: adapter_config.json and adapter_model.safetensors, without torch and peft."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prejit.runtime.base.wording import few
from prejit.runtime.device.transfer import dtype_of
from prejit.runtime.errors import CheckpointError, RejectError
from prejit.runtime.format.checks.adapter_stacks import StackPair
from prejit.runtime.format.checks.layers import check_weights
from prejit.runtime.lora.peft_config import (
    CONFIG,
    MERGE,
    PREFIX,
    WEIGHTS,
    is_target,
    rank_and_factor,
    read_config,
    wrong,
)

Values = np.ndarray[Any, np.dtype[np.float32]]
_SHOWN = 3
_FLOATS = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True)
class AdapterValues:
    """The changes of an adapter.

    Attributes:
        digest: of both files.
        rank: the largest of its ranks.
        changes: A [rank, in] and B [out, rank], times the factor, for each matrix by name.
    """

    digest: str
    rank: int
    changes: Mapping[str, tuple[Values, Values]]


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """Return the files of an adapter.

    Raises:
        CheckpointError: one is missing.
    """
    files = (directory / CONFIG, directory / WEIGHTS)
    for file in files:
        if not file.is_file():
            others = sorted(path.name for path in directory.glob("adapter_model*"))
            raise CheckpointError(
                f"{file}: expected a file, found {few(others, _SHOWN) or 'none'}",
                hint="give the directory that PEFT's save_pretrained wrote, in safetensors",
            )
    return files


def adapter_digest(directory: Path) -> str:
    """Return the digest of an adapter: of the digests of its files.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    config, weights = map(_read, adapter_files(directory))
    return _digest(config, weights)


def _digest(config: bytes, weights: bytes) -> str:
    both = "".join(hashlib.sha256(content).hexdigest() for content in (config, weights))
    return f"sha256:{hashlib.sha256(both.encode()).hexdigest()}"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot read it: {error}") from error


def read_adapter(
    directory: Path, pairs: Sequence[StackPair], check: Callable[[str], object] = str
) -> AdapterValues:
    """Return the changes that an adapter makes to matrices of a bundle.

    Args:
        directory: has its files.
        pairs: the stacks of the bundle.
        check: takes the digest of the files before anything in them is read, and raises to refuse them.

    Raises:
        CheckpointError: the adapter is of another model or kind, changes other matrices than those of
            `pairs`, or a file is damaged. The error names all tensors that do not fit.
    """
    config_file, file = adapter_files(directory)
    contents = _read(config_file), _read(file)
    digest = _digest(*contents)
    check(digest)
    config = read_config(config_file, contents[0])
    if config.get("use_dora"):
        raise wrong(config_file, "use_dora", "false for an adapter that is not merged", True)
    for key, without in (("bias", (None, "none")), ("modules_to_save", (None, []))):
        if (value := config.get(key)) not in without:
            raise wrong(config_file, key, "none for an adapter that is not merged", value)
    known = {name: pair for pair in pairs for name in pair.modules}
    changes: dict[str, dict[str, Values]] = {}
    problems: list[str] = []
    others: list[str] = []
    for published, values in _tensors(contents[1], file).items():
        module, end = published.removeprefix(PREFIX), ""
        for each in ("lora_A", "lora_B"):
            if module.endswith(f".{each}.weight"):
                module, end = module.removesuffix(f".{each}.weight"), each
        if not end:
            problems.append(f"{published}, which is neither lora_A nor lora_B")
        elif _name(module, known) is None:
            problems.append(f"{module}, which is no matrix that the bundle lets adapters change")
            others.append(module)
        elif not is_target(config, module):
            problems.append(f"{module}, which target_modules of {CONFIG} does not name")
        elif end in changes.setdefault(module, {}):
            problems.append(f"{module}.{end}, which has two names")
        else:
            changes[module][end] = values
    result: dict[str, tuple[Values, Values]] = {}
    for module, parts in changes.items():
        name = _name(module, known)
        assert name is not None
        pair = known[name]
        most, inputs, outputs = pair.down.shape[2], pair.down.shape[3], pair.up.shape[3]
        rank, factor = rank_and_factor(config, config_file, module)
        if rank > most:
            hint = f"build with rank = {rank} in [adapters], or {MERGE}"
            expected = f"at most {most}, [adapters] rank of the bundle"
            raise wrong(config_file, "r", expected, rank, hint)
        wanted = {"lora_A": (rank, inputs), "lora_B": (outputs, rank)}
        if name in result:
            problems.append(f"{module}, which has two names")
        elif {end: values.shape for end, values in parts.items()} != wanted:
            found = ", ".join(f"{end} {list(values.shape)}" for end, values in parts.items())
            expected = ", ".join(f"{end} {list(shape)}" for end, shape in wanted.items())
            problems.append(f"{module} with {found}, expected {expected}")
        else:
            result[name] = (parts["lora_A"], parts["lora_B"] * np.float32(factor))
    if not changes and not problems:
        problems.append("no tensor")
    if problems:
        ends = sorted({name.rpartition(".")[2] for name in (*known, *others)})
        raise CheckpointError(
            f"{file}: the adapter does not fit the bundle: found {few(problems, _SHOWN)}",
            hint=f"{f'build with targets = {json.dumps(ends)} in' if others else 'give one for'} "
            "[adapters], or list it in [model] adapters, which merges it",
        )
    if bad := [
        name for name, both in result.items() if not all(np.isfinite(v).all() for v in both)
    ]:
        raise CheckpointError(
            f"{file}: expected finite numbers, found others in {few(bad, _SHOWN)}"
        )
    rank = max(len(down) for down, _ in result.values())
    return AdapterValues(digest, rank, result)


_MOVED = (
    # of models that also read images, in the names of transformers 5 and 4
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("model.", "backbone."),  # of Nemotron-H
    *(("", "model."), ("", "backbone.")),  # of models without a head
)
"""Beginnings of names in transformers' classes, and in bundles."""


def _name(module: str, known: Collection[str]) -> str | None:
    """Return the name of an adapter's module in the bundle; None: the bundle has none."""
    moved = (
        ours + module.removeprefix(theirs) for theirs, ours in _MOVED if module.startswith(theirs)
    )
    return next((name for name in (module, *moved) if name in known), None)


def _tensors(content: bytes, file: Path) -> dict[str, Values]:
    """Return the tensors of a safetensors file in float32.

    Raises:
        CheckpointError: the file is damaged, or a tensor has no floating-point numbers.
    """
    try:
        slices = check_weights(memoryview(content), str(file), alignment=1)
    except RejectError as error:
        raise CheckpointError(str(error)) from error  # which begins with the file
    found = {}
    for name, at in slices.items():
        if at.dtype not in _FLOATS:
            wanted = ", ".join(_FLOATS)
            raise CheckpointError(f"{file}: {name}: expected {wanted}; found {at.dtype}")
        values = np.frombuffer(content[at.start : at.end], dtype_of(at.dtype))
        found[name] = values.astype(np.float32).reshape(at.shape)
    return found
