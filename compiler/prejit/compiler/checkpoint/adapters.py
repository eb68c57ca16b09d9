"""Merge adapters in PEFT's layout into a checkpoint, as its `merge_and_unload` does.

    LoRA    w + s B A, s = alpha / r, with rsLoRA alpha / sqrt(r)       arXiv 2106.09685 and 2312.03732
    DoRA    m (w + s B A) / |w + s B A|, by the norms of the outputs    arXiv 2402.09353

A [r, in] and B [out, r]. Rows are merged in float32 when they are used, before they are rounded to a stored
dtype: no second copy of the model is in memory. Each tensor of an adapter is used, or is an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import shown
from prejit.compiler.checkpoint.parameter_sources import (
    SHOWN,
    ParameterSource,
    TensorSource,
    checked,
    not_float,
)
from prejit.compiler.checkpoint.tensor_files import Tensor, tensors
from prejit.runtime.base.wording import few
from prejit.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from prejit.compiler.models.layers.layer_config import Naming
    from prejit.compiler.models.parameters import Parameter

Values = np.ndarray[Any, Any]
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_HINT = (
    "merge it with PEFT's merge_and_unload, save that model, and give its directory as the source"
)
_PREFIX = "base_model.model."
_A = ("lora_A.weight", "lora_embedding_A")
_B = ("lora_B.weight", "lora_embedding_B")
_MAGNITUDE = ("lora_magnitude_vector", "lora_magnitude_vector.weight")
_READ = frozenset(
    (
        *("peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules"),
        *("modules_to_save", "bias", "use_rslora", "use_dora", "init_lora_weights"),
    )
)
_WITHOUT_EFFECT = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode"),
        *("peft_version", "lora_dropout", "megatron_config", "megatron_core", "eva_config"),
        *("qalora_group_size", "ensure_weight_tying", "runtime_config"),
        # The names of the tensors show which modules these chose.
        *("exclude_modules", "layers_pattern", "layers_to_transform"),
        # PEFT corrects it by the kind of the layer, which decides here too.
        "fan_in_fan_out",
    )
)
"""Keys that may have any value. A key in neither list must be empty: new ones may change the result."""
_KINDS = ("gaussian", "orthogonal", "eva")
"""The ways to begin that leave the matrices of the model as they are, beside true and false."""


@dataclass(frozen=True)
class MergedSource:
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
    def published(self) -> str:
        """See ParameterSource."""
        return self.inputs.published

    @property
    def tensor(self) -> Tensor:
        """See ParameterSource."""
        return self.inputs.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See ParameterSource."""
        return self.base.shape

    @property
    def form(self) -> str:
        """See ParameterSource: the change is in floats."""
        return ""

    def __getitem__(self, part: slice) -> Values:
        values = self._sum(part)
        if self.magnitude is not None:
            if self.is_in_out:
                values *= self._factors
            else:
                values *= _quotient(self.magnitude[part], np.linalg.norm(values, axis=1))[:, None]
        return checked(values, self)

    def read(self) -> Values:
        """See ParameterSource."""
        return self[slice(None)]

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


def adapter_files(directory: Path) -> tuple[Path, Path]:
    """Return the files of an adapter.

    Raises:
        CheckpointError: one is missing.
    """
    files = (directory / _CONFIG, directory / _WEIGHTS)
    for file in files:
        if not file.is_file():
            others = sorted(path.name for path in directory.glob("adapter_model*"))
            raise CheckpointError(
                f"{file}: expected a file, found {few(others, SHOWN) or 'none'}",
                hint="give the directory that PEFT's save_pretrained wrote, in safetensors",
            )
    return files


def merged(
    found: Mapping[str, ParameterSource],
    directory: Path,
    naming: Naming,
    parameters: Mapping[str, Parameter],
    name_of: Callable[[str], str],
) -> dict[str, ParameterSource]:
    """Return the parameters of a model with those that an adapter changes or replaces.

    Args:
        found: the source of each parameter.
        directory: the adapter's.
        naming: how the family names its tensors.
        parameters: those of the module, by name.
        name_of: returns the parameter's name for a published one.

    Raises:
        CheckpointError: the adapter is of another model or kind, or a file is damaged. The error names all
            tensors that do not fit.
    """
    config_file, weights = adapter_files(directory)
    config = _read_config(config_file)
    lora: dict[str, dict[str, TensorSource]] = {}
    new: dict[str, TensorSource] = {}
    problems: list[str] = []
    for published, tensor in tensors(weights).items():
        problems += not_float(published, tensor)
        name = published.removeprefix(_PREFIX)
        if name.startswith(naming.ignored):
            continue
        end = next((end for end in (*_A, *_B, *_MAGNITUDE) if name.endswith(f".{end}")), None)
        if end is not None:
            module = name.removesuffix(f".{end}")
            lora.setdefault(module, {})[end] = TensorSource(published, tensor)
            continue
        module, _, last = name.rpartition(".")
        module = module.removesuffix(".base_layer")
        ours = name_of(f"{module}.{last}")
        if not _is_replaced(config, module, last) and ours not in (naming.embedding, naming.head):
            problems.append(f"{published}, which {_CONFIG} does not name")
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
        elif not _is_target(config, module):
            problems.append(f"{module}, which target_modules of {_CONFIG} does not name")
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
            hint=f"give an adapter of this model; where it is one, {_HINT}",
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
    rank = _of_pattern(config, "rank_pattern", "r", module)
    if type(rank) is not int or rank < 1:
        raise _wrong(file, "r", "an integer of at least 1", rank)
    alpha = _of_pattern(config, "alpha_pattern", "lora_alpha", module)
    if type(alpha) not in (int, float) or not abs(alpha) < 1e30:
        raise _wrong(file, "lora_alpha", "a number", alpha)
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
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return MergedSource(base, inputs, outputs, scale, is_in_out, magnitude)


def _read_config(file: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    config = read_object(file)
    if config.get("peft_type") != "LORA":
        raise _wrong(file, "peft_type", '"LORA"', config.get("peft_type"))
    begins = config.get("init_lora_weights", True)
    if not isinstance(begins, bool) and begins not in (None, *_KINDS):
        # PiSSA, OLoRA, CorDA and LoftQ change the model's own matrices.
        raise _wrong(file, "init_lora_weights", f"true, false, {', '.join(_KINDS)}", begins)
    for key, value in config.items():
        if value and key not in _READ | _WITHOUT_EFFECT:
            raise _wrong(file, key, "none", value)
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(("rank_pattern", "alpha_pattern"), (dict,)),
        **dict.fromkeys(("use_rslora", "use_dora"), (bool,)),
        **{"target_modules": (list, str), "modules_to_save": (list,), "bias": (str,)},
    }
    for key, allowed in kinds.items():
        value = config.get(key)
        names = value if isinstance(value, list) else []
        if value is not None and not (
            isinstance(value, allowed) and all(isinstance(name, str) for name in names)
        ):
            raise _wrong(file, key, " or ".join(kind.__name__ for kind in allowed), value)
    patterns = [*(config.get("rank_pattern") or ()), *(config.get("alpha_pattern") or ())]
    if isinstance(target := config.get("target_modules"), str):
        patterns.append(target)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            problem = f"a regular expression ({error})"
            raise _wrong(file, "a pattern of modules", problem, pattern) from error
    return config


def _wrong(file: Path, key: str, expected: str, found: object) -> CheckpointError:
    return CheckpointError(f"{file}: {key}: expected {expected}, found {shown(found)}", hint=_HINT)


def _of_pattern(config: Mapping[str, Any], patterns: str, key: str, module: str) -> Any:
    """Return the value of a module: that of the first pattern that matches, or the common one."""
    for pattern, value in (config.get(patterns) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return config.get(key, 8)  # PEFT's default


def _is_target(config: Mapping[str, Any], module: str) -> bool:
    """Return whether the adapter changes a module."""
    targets = config.get("target_modules") or []
    if isinstance(targets, str):
        return targets.lower() == "all-linear" or re.fullmatch(targets, module) is not None
    return any(f".{module}".endswith(f".{target}") for target in targets)


def _is_replaced(config: Mapping[str, Any], module: str, last: str) -> bool:
    """Return whether the adapter replaces a tensor of a module."""
    bias = config.get("bias", "none")
    if last == "bias" and (bias == "all" or (bias == "lora_only" and _is_target(config, module))):
        return True
    return any(f"{saved}." in f"{module}." for saved in config.get("modules_to_save") or ())
