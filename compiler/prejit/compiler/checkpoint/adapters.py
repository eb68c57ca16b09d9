"""Merge adapters in PEFT's layout into a checkpoint, as its `merge_and_unload` does.

    LoRA    w + s B A, s = alpha / r, with rsLoRA alpha / sqrt(r)       arXiv 2106.09685 and 2312.03732
    DoRA    m (w + s B A) / |w + s B A|, by the norms of the outputs    arXiv 2402.09353

A [r, in] and B [out, r]. Rows are merged in float32 when they are used, before they are rounded to a stored
dtype: no second copy of the model is in memory. Each tensor of an adapter is used, or is an error.

`describe_adapter` returns what a manifest has to say of one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.checkpoint.parameter_sources import (
    SHOWN,
    ParameterSource,
    TensorSource,
    checked,
    not_float,
)
from prejit.compiler.checkpoint.tensor_files import tensors
from prejit.runtime.base.wording import few
from prejit.runtime.errors import CheckpointError
from prejit.runtime.lora.peft_files import (
    CONFIG,
    MERGE,
    PREFIX,
    adapter_files,
    left_out_by,
    rank_and_factor,
    read_config,
)

if TYPE_CHECKING:
    from prejit.compiler.models.layers.layer_config import Naming
    from prejit.compiler.models.parameters import Parameter

Values = np.ndarray[Any, Any]
_A = ("lora_A.weight", "lora_embedding_A")
_B = ("lora_B.weight", "lora_embedding_B")
_MAGNITUDE = ("lora_magnitude_vector", "lora_magnitude_vector.weight")


@dataclass(frozen=True)
class MergedSource(ParameterSource):
    """A matrix with the change of an adapter.

    Attributes:
        base: the matrix.
        inputs, outputs: A and B.
        scale: s.
        is_in_out: whether the matrix is (in, out).
        magnitude: m of DoRA; None: it is LoRA.
    """

    base: ParameterSource
    inputs: TensorSource
    outputs: TensorSource
    scale: float
    is_in_out: bool
    magnitude: TensorSource | None = None

    @property
    def first(self) -> TensorSource:
        """See ParameterSource: the change is in floats, whatever the matrix is in."""
        return self.inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """See ParameterSource."""
        return self.base.shape

    def __getitem__(self, part: slice) -> Values:
        values = self._sum(part)
        if self.magnitude is not None:
            if self.is_in_out:
                values *= self._factors
            else:
                values *= _quotient(self.magnitude[part], np.linalg.norm(values, axis=1))[:, None]
        return checked(values, self)

    def _sum(self, part: slice) -> Values:
        rows, columns = self.outputs, self.inputs
        if self.is_in_out:
            rows, columns = self.inputs, self.outputs
        left = rows.read().T[part] if self.is_in_out else rows[part]
        right = columns.read().T if self.is_in_out else columns.read()
        with np.errstate(over="ignore", invalid="ignore"):
            change = left @ right
            change *= np.float32(self.scale)
            change += self.base[part]
        return change

    @cached_property
    def _factors(self) -> Values:
        """The factor of each output of a matrix (in, out): the norms need all rows."""
        from prejit.compiler.models.quantizing import blocks

        assert self.magnitude is not None
        squares = np.zeros(self.shape[1], np.float64)
        for part in blocks(self.shape):
            squares += np.square(self._sum(part), dtype=np.float64).sum(axis=0)
        return _quotient(self.magnitude.read(), np.sqrt(squares).astype(np.float32))


def _quotient(magnitude: Values, norm: Values) -> Values:
    with np.errstate(divide="ignore", invalid="ignore"):  # an output of zeros is refused as NaN
        found: Values = magnitude / norm
    return found


def merged(
    found: Mapping[str, ParameterSource],
    directory: Path,
    naming: Naming,
    parameters: Mapping[str, Parameter],
    name_of: Callable[[str], str],
) -> dict[str, ParameterSource]:
    """Return the parameters of a model with those that an adapter changes or replaces.

    Raises:
        CheckpointError: the adapter is of another model or kind, or a file is damaged. The error names all
            tensors that do not fit.
    """
    config_file, weights = adapter_files(directory)
    config = read_config(config_file, config_file.read_bytes())
    lora: dict[str, dict[str, TensorSource]] = {}
    new: dict[str, TensorSource] = {}
    problems: list[str] = []
    for published, tensor in tensors(weights).items():
        problems += not_float(published, tensor)
        name = published.removeprefix(PREFIX)
        if naming.ignores(name, name_of(name)):
            continue
        end = next((end for end in (*_A, *_B, *_MAGNITUDE) if name.endswith(f".{end}")), None)
        if end is not None:
            module = name.removesuffix(f".{end}")
            if end in lora.setdefault(module, {}):
                problems.append(f"{published}, which another tensor gives too")
            lora[module][end] = TensorSource(published, tensor)
            continue
        module, _, last = name.rpartition(".")
        module = module.removesuffix(".base_layer")
        ours = name_of(f"{module}.{last}")
        # PEFT saves the whole layers of embedding and head beside their changes.
        kept = f"{ours.rpartition('.')[0]}.weight" in (naming.embedding, naming.head)
        if not kept and not _is_replaced(config, module, last):
            problems.append(f"{published}, which {CONFIG} does not name")
        if ours in new:
            problems.append(f"{published}, which another tensor gives too")
        in_out = f"{module}.{last}".endswith(naming.in_out)
        parameter = parameters.get(ours)
        transposed = in_out != (parameter is not None and parameter.in_out)
        new[ours] = TensorSource(published, tensor, transposed)
    result = {**found, **new}
    copies = {naming.head, *naming.copies} - parameters.keys() - {""}
    for module, parts in lora.items():
        ours = name_of(f"{module}.weight")
        if copies and ours in (naming.embedding, *copies):
            problems.append(f"{module}, whose matrix the model uses twice (tie_word_embeddings)")
        elif key := left_out_by(config, module, is_end=ours in (naming.embedding, naming.head)):
            problems.append(f"{module}, which {key} of {CONFIG} leaves out")
        elif ours not in parameters:
            problems.append(f"{module}, which is no matrix of the model")
        else:
            made = _change(result[ours], module, parts, parameters[ours], config, config_file)
            if isinstance(made, str):
                problems.append(made)
            else:
                result[ours] = made
    problems += _misplaced(new, found, copies, naming, parameters)
    if not lora and not new:
        problems.append("no tensor")
    if problems:
        raise CheckpointError(
            f"{weights}: the adapter does not fit the model: found {few(problems, SHOWN)}",
            hint=f"give an adapter of this model; where it is one, {MERGE}",
        )
    return {name: source for name, source in result.items() if name in parameters}


def _misplaced(
    new: Mapping[str, ParameterSource],
    found: Mapping[str, ParameterSource],
    copies: set[str],
    naming: Naming,
    parameters: Mapping[str, Parameter],
) -> Iterator[str]:
    """Yield what is wrong with tensors that replace those of the model."""
    for ours, source in new.items():
        parameter = parameters.get(naming.embedding if ours in copies else ours)
        if parameter is None:
            yield f"{source.published}, which the model does not have"
        elif source.shape != parameter.shape:
            yield (
                f"{source.published} of shape {list(source.shape)}, expected {list(parameter.shape)}"
            )
    tied = [name for name in (naming.embedding, *sorted(copies)) if name in new]
    if copies and tied and all(new[name].shape == found[naming.embedding].shape for name in tied):
        embedding = new.get(naming.embedding, found[naming.embedding]).read()
        for copy in sorted(copies):
            if not np.array_equal(new.get(copy, found[naming.embedding]).read(), embedding):
                yield (
                    f"{new[tied[-1]].published}, which makes {copy} differ from {naming.embedding} "
                    "(tie_word_embeddings)"
                )


def _change(
    base: ParameterSource,
    module: str,
    parts: Mapping[str, TensorSource],
    parameter: Parameter,
    config: Mapping[str, Any],
    file: Path,
) -> MergedSource | str:
    """Return a matrix with the change of an adapter, or what is wrong with its tensors."""
    inputs, outputs, magnitude = (
        next((parts[end] for end in ends if end in parts), None) for ends in (_A, _B, _MAGNITUDE)
    )
    of_embedding = any("embedding" in end for end in parts)
    is_dora = bool(config.get("use_dora"))
    is_whole = len(parts) == 2 + is_dora and (magnitude is not None) == is_dora
    if inputs is None or outputs is None or not is_whole:
        return f"{module} with {few(sorted(parts), SHOWN)} (use_dora = {is_dora})"
    if of_embedding and (magnitude is not None or not {*parts} <= {_A[1], _B[1]}):
        return f"{module}, an embedding with DoRA"
    rank, scale = rank_and_factor(config, file, module)
    is_in_out = parameter.in_out or of_embedding
    shape = parameter.shape[::-1] if is_in_out else parameter.shape
    if len(shape) != 2:
        return f"{module}, which is no matrix of the model"
    given = [source.shape for source in parts.values()]
    wanted = {"A": (rank, shape[1]), "B": (shape[0], rank), "magnitude": (shape[0],)}
    if (inputs.shape, outputs.shape) != (wanted["A"], wanted["B"]) or (
        magnitude is not None and magnitude.shape != wanted["magnitude"]
    ):
        return f"{module} of shapes {given}, expected {[*wanted.values()][: len(given)]}"
    return MergedSource(base, inputs, outputs, scale, is_in_out, magnitude)


def _is_replaced(config: Mapping[str, Any], module: str, last: str) -> bool:
    """Return whether the adapter replaces a tensor of a module."""
    bias = config.get("bias", "none")
    if last == "bias" and (
        bias == "all" or (bias == "lora_only" and not left_out_by(config, module))
    ):
        return True
    return any(f"{saved}." in f"{module}." for saved in config.get("modules_to_save") or ())


def is_adapter(directory: Path) -> bool:
    """Return whether a directory holds an adapter."""
    return (directory / CONFIG).is_file()


def describe_adapter(directory: Path) -> str:
    """Return what a manifest has to say so that a bundle takes an adapter.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter is of a kind that is not supported.
    """
    config_file, file = adapter_files(directory)
    config = read_config(config_file, config_file.read_bytes())
    names = [name.removeprefix(PREFIX) for name in tensors(file)]
    modules = [name.rpartition(".lora_A.")[0] for name in names if ".lora_A." in name]
    if not modules:
        raise CheckpointError(f"{file}: expected matrices lora_A and lora_B, found none")
    rank = max(rank_and_factor(config, config_file, module)[0] for module in modules)
    targets = sorted({module.rpartition(".")[2] for module in modules})
    merged = (
        f"adapters = {json.dumps([str(directory)])} # in [model]: merged when the bundle is built"
    )
    first = f"an adapter of rank {rank} that changes {', '.join(targets)}"
    saved = config.get("modules_to_save")
    if config.get("use_dora") or config.get("bias") not in (None, "none") or saved:
        return f"{first}, and more than LoRA does\n\n{merged}"
    room = f"slots = 8\nrank = {rank}\ntargets = {json.dumps(targets)}"
    return f"{first}\n\n{merged}\n\n[adapters] # or kept apart, beside others\n{room}"
