"""Read published checkpoints: from a directory in the Hugging Face layout to the parameters of a module.

Torch's names and flax's names are both accepted:

    torch   h.0.mlp.c_fc.weight, with or without the model's prefix; GPT-2's matrices (in, out)
    flax    h.0.mlp.c_fc.kernel, .scale and .embedding for .weight; matrices (in, out) as flax.linen has
            them, or (out, in) as transformers' FlaxConv1D has them

The module's parameters have torch's names; the module decides which matrices are (out, in) and which
(in, out). Opening reads no tensor and imports neither JAX nor transformers, so that a build that changes
nothing stays fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from prejit.compiler.base.json_file import read_json
from prejit.compiler.base.stored_dtypes import GROUPS_OF_32, Groups
from prejit.compiler.base.suggestions import shown
from prejit.compiler.checkpoint.adapters import merged
from prejit.compiler.checkpoint.gguf_tensors import gguf_groups, gguf_tensors
from prejit.compiler.checkpoint.parameter_sources import (
    FLOATS,
    ParameterSource,
    TensorSource,
    converted,
    not_float,
    piece_of,
    stacked,
)
from prejit.compiler.checkpoint.quantized_tensors import with_whole_matrices
from prejit.compiler.checkpoint.tensor_files import Reading, Tensor, tensors, unwatched
from prejit.compiler.models.families.image_processing import processing_files, sight_files
from prejit.compiler.models.families.sentence_layout import SentenceLayout, read_layout
from prejit.compiler.models.quantization_settings import Quantization, read_quantization
from prejit.runtime.base.wording import few
from prejit.runtime.errors import CheckpointError
from prejit.runtime.lora.peft_files import adapter_files

if TYPE_CHECKING:
    from prejit.compiler.models.int4_rounding import Rows
    from prejit.compiler.models.layers.layer_config import Naming
    from prejit.compiler.models.parameters import Parameter

_SINGLE = ("model.safetensors", "flax_model.safetensors", "flax_model.msgpack")
_INDEX = "model.safetensors.index.json"
_SUFFIX = ".safetensors"
_FLAX_ENDS = {".kernel": ".weight", ".scale": ".weight", ".embedding": ".weight"}
_TENSORFLOW_ENDS = {".gamma": ".weight", ".beta": ".bias"}
"""Names of norms in files that were converted from TensorFlow: bert-base-uncased."""
_PICKLE = "a pickle can run code when it is read: convert it with transformers' save_pretrained"
_GGUF = ".gguf"
_OTHER_FORMATS = {
    _GGUF: "give the GGUF file itself as the source, or put config.json and tokenizer.json beside it",
    **dict.fromkeys((".bin", ".pt", ".pth"), _PICKLE),
}
"""The hint for each kind of file, by its suffix, that holds weights and is not read."""
_SHOWN = 8
_PARTS = 16
"""Parts in which a head is compared with the embedding. A transposed tensor is read anew for each."""


@final
class Checkpoint:
    """The tensors of a model, with the names and in the layout of the module's parameters.

    Attributes:
        directory: the model's directory.
        files: the files that decide the tensors, in a fixed order: config.json, an index, the weights.
        adapter_files: those of the adapters, in the order in which they are merged.
    """

    def __init__(
        self,
        directory: Path,
        files: tuple[Path, ...],
        layout: SentenceLayout | None = None,
        dense: tuple[Path, ...] = (),
        *,
        out_in: bool = False,
        adapters: tuple[Path, ...] = (),
        images: bool = False,
        reading: Reading = unwatched,
    ) -> None:
        """Use `open_checkpoint` or `open_encoder`."""
        self._out_in = out_in
        self._images = images
        self._reading = reading
        self._adapters = adapters
        self.adapter_files = tuple(file for each in adapters for file in adapter_files(each))
        self.directory = directory
        self.files = (*files, *dense)
        self._model_files = files
        self._layout = layout
        self._dense = dense

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters, in alphabetical order.

        Raises:
            CheckpointError: the tensors do not fit config.json; the error names every tensor that is missing,
                unexpected or of the wrong shape.
        """
        return tuple(self._sources)

    @property
    def forms(self) -> dict[str, str]:
        """How matrices were published in few bits, in words, by the names of parameters."""
        sources = self._sources.items()
        found = {name: each.form for name, each in sources if not isinstance(each, np.ndarray)}
        return {name: form for name, form in found.items() if form}

    @property
    def groups(self) -> Groups:
        """The groups of inputs that hold the published integers in int4."""
        weights, quantization = self._model_files[-1], self._quantization()
        if weights.suffix == _GGUF:
            return gguf_groups(weights)
        return quantization.groups if quantization else GROUPS_OF_32

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """Read a parameter: float32, C-contiguous, in the module's shape.

        Nothing stays in memory, except with flax's msgpack, which can only be read whole.

        Raises:
            CheckpointError: as `names`, or the file is damaged, or values are NaN or infinite.
        """
        source = self._sources[name]
        return source if isinstance(source, np.ndarray) else source.read()

    def rows(self, name: str) -> Rows:
        """Return a parameter as `read` does, but its slices are read when they are used."""
        return self._sources[name]

    @cached_property
    def _sources(self) -> dict[str, ParameterSource | np.ndarray[Any, Any]]:
        from prejit.compiler.checkpoint import module_sources
        from prejit.compiler.models import config_file, image_config, model_registry
        from prejit.compiler.models.families.rotary_encoders import derived_of
        from prejit.compiler.models.parameters import parameters_of

        derived: Mapping[str, np.ndarray[Any, Any]] = {}
        published, problems = _published(self._model_files, self._reading)
        if self._layout is None:
            config = config_file.load_config(self.directory, images=self._images)
            parameters = parameters_of(model_registry.make_decoder(config, out_in=self._out_in))
            naming = model_registry.naming_of(config)
            naming = replace(naming, ignored=naming.ignored_in(config))
            for file in self._model_files:
                if file.suffix == _GGUF:
                    names = (*parameters, naming.head)
                    published |= gguf_tensors(file, config, names, self._reading)
        elif self._images:
            made = image_config.published_parameters(self.directory, out_in=self._out_in)
            parameters, naming = made
        else:
            encoder = config_file.load_encoder(self.directory, self._layout)
            module = model_registry.make_encoder(encoder, out_in=self._out_in)
            parameters, derived = parameters_of(module), derived_of(module)
            naming = model_registry.encoder_naming(encoder)
        if (quantization := self._quantization()) is not None:
            published, unfit = with_whole_matrices(published, quantization)
            problems += unfit
        found, misnamed = _named(published, naming, parameters)
        problems += misnamed
        _drop_zero_biases(found, parameters, published)
        for copy in (naming.head, *naming.copies):
            if copy not in parameters:
                problems += _tie(found, copy, naming)
        if self._layout is None and config.model_type == "t5":
            module_sources.copy_embedding(found, parameters, naming)
        if self._layout is not None:
            dense, misfits = module_sources.dense_sources(self._layout, self._dense, parameters)
            problems += misfits
            found |= dense
            if self._layout.answers is not None:
                made_of = (encoder.config, published, found, self._out_in)
                found |= module_sources.answer_row(self._layout, *made_of)
        problems += [f"unexpected {name}" for name in derived if name in found]
        own = {name: each for name, each in parameters.items() if name not in derived}
        problems += _misfits(found, own)
        if problems:
            packed = tuple(end for rule in naming.converted for end in rule.published)
            others = [each for name, each in published.items() if not name.endswith(packed)]
            raise CheckpointError(
                f"{self.directory}: the tensors do not fit config.json: {'; '.join(problems)}",
                hint=_hint(others, problems, complete=parameters.keys() <= {*found, *derived}),
            )
        for adapter in self._adapters:
            found = merged(found, adapter, naming, own, partial(_our_name, naming=naming))
        sources: dict[str, ParameterSource | np.ndarray[Any, Any]] = {**found, **derived}
        return dict(sorted(sources.items()))

    def _quantization(self) -> Quantization | None:
        directory = self.directory if self._layout is None else self._layout.transformer
        file = directory / "config.json"
        # `load_config` has refused a method that the family does not read.
        return read_quantization(file, read_json(file).get("quantization_config"), ("mxfp4",))


def open_checkpoint(
    directory: Path,
    *,
    out_in: bool = False,
    adapters: tuple[Path, ...] = (),
    weights: Path | None = None,
    images: bool = False,
    reading: Reading = unwatched,
) -> Checkpoint:
    """Find the files of a checkpoint. Tensors are first read when they are needed.

    Args:
        directory: in the Hugging Face layout: config.json, and model.safetensors, or
            model.safetensors.index.json with its shards, or flax_model.msgpack, or one .gguf file.
        out_in: whether all matrices are stored (out, in), as in `models.model_registry.make_decoder`.
        adapters: directories of adapters, which are merged in this order.
        weights: a .gguf file in the directory; None: there is one file, or an index.
        images: whether the decoder reads images.
        reading: is called before a tensor is read, unless it is an adapter's or of a later module.

    Raises:
        CheckpointError: files are missing, or the index cannot be read.
    """
    config = directory / "config.json"
    if not config.is_file():
        others, hint = _other_formats(directory)
        raise CheckpointError(
            f"{config}: expected a file, found {others}",
            hint=hint or "expected a directory in the Hugging Face layout, with config.json in it",
        )
    beside = (config, *(sight_files(directory) if images else ()))
    made = partial(
        Checkpoint, directory, out_in=out_in, adapters=adapters, images=images, reading=reading
    )
    if weights is not None:
        return made((*beside, weights))
    index = directory / _INDEX
    if not (directory / _SINGLE[0]).is_file() and index.is_file():
        return made((*beside, index, *_shards(index)))
    for name in _SINGLE:
        if (directory / name).is_file():
            return made((*beside, directory / name))
    found = sorted(directory.glob(f"*{_GGUF}"))
    if len(found) == 1:
        return made((*beside, *found))
    others, hint = _other_formats(directory)
    if found:
        others = few([file.name for file in found], _SHOWN)
        hint = f'give one of them as the source: "{directory / found[0].name}"'
    expected = f"{', '.join((*_SINGLE, _INDEX))}, or one {_GGUF} file"
    wrong = f"{directory}: expected weights in one of {expected}, found {others}"
    raise CheckpointError(wrong, hint=hint)


def open_encoder(
    directory: Path, *, images: bool = False, layout: SentenceLayout | None = None, **options: Any
) -> Checkpoint:
    """Find the files of an encoder: those of its transformer and of its other modules.

    Args:
        directory: in the layout of sentence-transformers, or a plain one.
        images: whether it reads images.
        layout: its modules, with what a manifest says; None: they are read.
        **options: `out_in`, `adapters` and `reading`, as in `open_checkpoint`.

    Raises:
        CheckpointError: as `open_checkpoint`, or a module or setting is not supported.
    """
    from prejit.compiler.checkpoint.module_sources import dense_weights

    layout = layout or read_layout(directory)
    weights = open_checkpoint(layout.transformer).files[1:]
    if weights[0].suffix == _GGUF:
        raise no_encoder(weights[0])
    dense = tuple(dense_weights(part.directory) for part in layout.dense)
    files = (*layout.files, *(processing_files(directory) if images else ()), *weights)
    return Checkpoint(directory, files, layout, dense, images=images, **options)


def no_encoder(file: Path) -> CheckpointError:
    """Return the error for an encoder in a GGUF file."""
    return CheckpointError(
        f"{file}: expected safetensors for an encoder, found GGUF",
        hint="take the checkpoint in safetensors",
    )


def _shards(index: Path) -> list[Path]:
    content = read_json(
        index, "fetch the index again, or save the model again with save_pretrained"
    )
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not files:
        raise CheckpointError(
            f"{index}: weight_map: expected an object that gives each tensor its file, found {shown(files)}"
        )
    for tensor, name in files.items():
        # The files of a checkpoint lie beside its index, so a path is refused.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(_SUFFIX):
            raise CheckpointError(
                f"{index}: weight_map: {shown(tensor)}: expected the name of a {_SUFFIX} file beside it, "
                f"found {shown(name)}",
                hint="fetch the index again, or save the model again with save_pretrained",
            )
    shards = [index.parent / name for name in sorted(set(files.values()))]
    if missing := [shard.name for shard in shards if not shard.is_file()]:
        raise CheckpointError(
            f"{index}: expected {len(shards)} files beside it, missing {few(missing, _SHOWN)}",
            hint="fetch the missing shards into the same directory",
        )
    return shards


def _published(files: Iterable[Path], reading: Reading) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors in files by name, and problems.

    If several files have a tensor of one name, the one in the file that the index gives counts.
    """
    held: dict[str, list[Tensor]] = {}
    where: Mapping[str, str] = {}
    for file in files:
        if file.name == _INDEX:
            where = read_json(file)["weight_map"]
        elif file.suffix not in (".json", ".jinja", ".pt", _GGUF):
            for name, tensor in tensors(file, reading).items():
                held.setdefault(name, []).append(tensor)
    problems = []
    for name, several in held.items():
        if len(several) > 1:
            meant = [tensor for tensor in several if tensor.path.name == where.get(name)]
            if not meant:
                problems.append(
                    f"both {several[0].path.name} and {several[1].path.name} hold {name}"
                )
            held[name] = meant or several
    return {name: several[0] for name, several in held.items()}, problems


def _named(
    published: Mapping[str, Tensor], naming: Naming, parameters: Mapping[str, Parameter]
) -> tuple[dict[str, ParameterSource], list[str]]:
    """Return published tensors by the names of the module's parameters, and problems."""
    kernels_in_out = not _kernels_are_out_in(published, naming, parameters)
    found: dict[str, ParameterSource] = {}
    pieces: dict[str, dict[tuple[int, int], TensorSource]] = {}
    whole, taken, problems = converted(published, naming)
    for name, tensor in published.items():
        if name in taken:
            continue
        ours = _our_name(name, naming)
        if name.endswith(naming.buffers) or naming.ignores(name, ours):
            continue
        if (piece := piece_of(ours, naming)) is not None:
            problems += not_float(name, tensor)
            ours, expert, part = piece
            source = TensorSource(name, tensor)
            first = pieces.setdefault(ours, {}).setdefault((expert, part), source)
            if first is not source:
                problems.append(f"both {first.published} and {name} are given")
            continue
        in_out = kernels_in_out if name.endswith(".kernel") else name.endswith(naming.in_out)
        in_out = in_out and tensor.few_bits is None  # which is (out, in) in each family
        parameter = parameters.get(ours)
        transposed = in_out != (parameter is not None and parameter.in_out)
        if ours in found:
            problems.append(f"both {found[ours].published} and {name} are given")
        else:
            problems += not_float(name, tensor)
        found[ours] = TensorSource(name, tensor, transposed)
    for name, other in whole.items():
        ours = _our_name(name, naming)
        if ours in found or ours in pieces:
            problems.append(f"both {other.published} and another form of it are given")
        found[ours] = other
    for ours, matrices in pieces.items():
        if ours in found:
            problems.append(f"both {found[ours].published} and parts of it are given")
            continue
        stack, missing = stacked(ours, matrices, naming)
        problems += missing
        if stack is not None:
            found[ours] = stack
    return found, problems


def _drop_zero_biases(
    found: dict[str, ParameterSource],
    parameters: Mapping[str, Parameter],
    published: Mapping[str, Tensor],
) -> None:
    """Drop biases that the model does not have: AutoGPTQ writes zeros for matrices without one."""
    for name in found.keys() - parameters.keys():
        # A matrix of an expert is a part of a parameter, so its published name finds it.
        beside = published.get(f"{found[name].published.removesuffix('.bias')}.weight")
        is_beside = name.endswith(".bias") and beside is not None and beside.few_bits is not None
        if is_beside and not found[name].read().any():
            del found[name]


def _our_name(published: str, naming: Naming) -> str:
    """Return the module's name: `h.0.ln_1.scale` of flax becomes `transformer.h.0.ln_1.weight`."""
    name = published.removeprefix("params.")
    for end, ours in (_FLAX_ENDS | _TENSORFLOW_ENDS).items():
        if name.endswith(end):
            name = name.removesuffix(end) + ours
    for end, ours in naming.renamed:
        if name.endswith(end):
            name = name.removesuffix(end) + ours
    for start, ours in naming.moved:
        if name.startswith(start):
            name = ours + name.removeprefix(start)
    head = naming.head.removesuffix("weight")
    is_whole = (head and name.startswith(head)) or name.rpartition(".")[0] in naming.beside
    return name if is_whole or name.startswith(naming.prefix) else naming.prefix + name


def _kernels_are_out_in(
    published: Mapping[str, Tensor], naming: Naming, parameters: Mapping[str, Parameter]
) -> bool:
    """Return whether a flax checkpoint stores matrices (out, in), decided by those that are not square."""
    out_in = []
    for name, tensor in published.items():
        parameter = parameters.get(_our_name(name, naming))
        if name.endswith(".kernel") and parameter and len(set(parameter.shape)) == 2:
            out_in.append((tensor.shape == parameter.shape) != parameter.in_out)
    return bool(out_in) and all(out_in)


def _tie(found: dict[str, ParameterSource], copy: str, naming: Naming) -> list[str]:
    """Keep one tensor for embedding and copy, as transformers does (modeling_utils.py, tie_weights)."""
    other = found.pop(copy, None)
    if other is None:
        return []
    embedding = found.setdefault(naming.embedding, other)
    if embedding is other:
        return []
    if other.shape != embedding.shape or not _are_equal(other, embedding):
        reason = "tie_word_embeddings is true, and " if copy == naming.head else ""
        return [f"{reason}{other.published} differs from {embedding.published}"]
    return []


def _are_equal(one: ParameterSource, other: ParameterSource) -> bool:
    """Return whether two parameters of one shape are equal. A part is in memory at a time: they are large."""
    rows = one.shape[0]
    step = max(1, -(-rows // _PARTS))
    parts = (slice(at, min(at + step, rows)) for at in range(0, rows, step))
    return all(np.array_equal(one[part], other[part]) for part in parts)


def _misfits(
    found: Mapping[str, ParameterSource], parameters: Mapping[str, Parameter]
) -> Iterable[str]:
    """Yield what is missing, unexpected, or of another shape than the module's parameters."""
    if missing := sorted(parameters.keys() - found.keys()):
        yield f"missing {few(missing, _SHOWN)}"
    if unexpected := sorted(found[name].published for name in found.keys() - parameters.keys()):
        yield f"unexpected {few(unexpected, _SHOWN)}"
    wrong = []
    for name, parameter in parameters.items():
        if name in found and (source := found[name]).shape != parameter.shape:
            is_turned = isinstance(source, TensorSource) and source.transposed
            shapes = parameter.shape, source.shape
            expected, there = (list(each[::-1] if is_turned else each) for each in shapes)
            place = f"{source.published} in {source.first.tensor.path.name}"
            wrong.append(f"{place} (expected {expected}, found {there})")
    if wrong:
        yield f"of the wrong shape {few(wrong, _SHOWN)}"


def _hint(published: Iterable[Tensor], problems: Iterable[str], *, complete: bool) -> str:
    """Return what to do about tensors that do not fit. `complete`: every parameter has one."""
    from prejit.compiler.models.layers.layer_config import BRING_YOUR_OWN

    if any(tensor.dtype not in FLOATS for tensor in published):
        return "take the checkpoint in float32, bfloat16 or float16: this one is quantized"
    if any(each.startswith("both ") for each in problems):
        return "keep one of them; of two files that hold a tensor the index may name one"
    if complete:
        return f"the model may have a part that prejit does not build: {BRING_YOUR_OWN}"
    return "config.json and the weights must come from the same model"


def _other_formats(directory: Path) -> tuple[str, str | None]:
    """Return the names of files with weights that are not read, and the hint for one of them."""
    names = sorted(path.name for path in directory.glob("*") if path.suffix in _OTHER_FORMATS)
    return few(names, _SHOWN) or "none", _OTHER_FORMATS[Path(names[0]).suffix] if names else None
