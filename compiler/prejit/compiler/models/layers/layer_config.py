"""The description that every model family gives: sizes, tensor names, the split over a mesh.

Figures in comments of the layers are of XLA:CPU on two threads, with jax 0.10.2 and 0.12.0 alike. No layer
depends on the platform for its values.

Shapes: B batch, T new positions, S cache positions, L layers, N query heads, K key/value heads,
H head size, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prejit.compiler.base.suggestions import did_you_mean, shown
from prejit.runtime.errors import CheckpointError

BRING_YOUR_OWN = (
    'write the model yourself, in flax or plain JAX: [model] with module = "my_package.model:model" for a '
    'decoder, [[program]] with function = "my_package.model:model" for any other'
)
"""The hint of errors about a model that is not supported."""


@dataclass(frozen=True)
class DecoderConfig:
    """The facts about a decoder that lowering and generation need.

    Attributes:
        family: model_type of config.json: `gpt2`, `llama`, `gemma3_text`; or the name of a user's model.
        vocab_size: V, the number of logits.
        cache_dtype: dtype of keys and values in the cache, in NumPy's name.
        max_positions: the longest context that the model was made for.
    """

    family: str
    vocab_size: int
    cache_dtype: str
    max_positions: int


@dataclass(frozen=True)
class Stacked:
    """A parameter [E, outputs, inputs] that checkpoints hold as matrices of each of the E experts.

    Attributes:
        name: suffix of the parameter: `.mlp.experts.down_proj.weight`.
        experts: what precedes the number of the expert in published names: `.mlp.experts.`.
        parts: suffixes of the matrices of an expert, whose outputs are joined in this order.
    """

    name: str
    experts: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Converted:
    """A parameter of experts that checkpoints hold in another form (see checkpoint/parameter_sources.py).

    Attributes:
        name: suffix of the parameter.
        published: suffixes of its tensors.
        form: `mxfp4` for blocks and their exponents, `in out` for (inputs, outputs), or `vector`.
        is_interleaved: whether outputs of gate and up come in turns.
    """

    name: str
    published: tuple[str, ...]
    form: Literal["mxfp4", "in out", "vector"]
    is_interleaved: bool


@dataclass(frozen=True)
class Naming:
    """How the tensor names of a family's published checkpoints differ from its module's parameter names.

    Attributes:
        prefix: prefix that is missing in checkpoints of the model without a head: `transformer.`.
        head: name of the head's matrix.
        embedding: name of the embedding's. A checkpoint of a tied model may hold either, or both if equal.
        in_out: suffixes of matrices that torch publishes (in, out).
        buffers: suffixes of tensors that are not parameters.
        ignored: prefixes of tensors that the model does not use, such as those of an image encoder, as
            published or with the prefixes of the module.
        moved: pairs of a published prefix and the module's.
        copies: other names under which checkpoints may hold the embedding once more.
        renamed: pairs of a published suffix and the module's.
        stacked: the parameters that checkpoints hold in parts.
        converted: the parameters that checkpoints hold in another form.
        beside: names of modules beside the transformer, such as a classifier, which get no prefix.
        unused: returns such prefixes that a configuration adds.
        drafts: key of the number of layers behind the last one that draft tokens, which are not used; empty:
            there are none.
    """

    prefix: str
    head: str
    embedding: str
    in_out: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    copies: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    stacked: tuple[Stacked, ...] = ()
    converted: tuple[Converted, ...] = ()
    beside: tuple[str, ...] = ()
    unused: Callable[[Any], Iterable[str]] = lambda config: ()
    drafts: str = ""

    def ignores(self, published: str, ours: str) -> bool:
        """Return whether the model does not use a tensor, by its published name and the module's."""
        return published.startswith(self.ignored) or ours.startswith(self.ignored)

    def ignored_in(self, config: Any) -> tuple[str, ...]:
        """Return the prefixes of tensors that a model of this configuration does not use."""
        drafts, last = getattr(config, self.drafts or "", None) or 0, 0
        if drafts:
            last = config.num_hidden_layers
        layers = range(last, last + drafts)
        ignored = (*self.ignored, *self.unused(config))
        return (*ignored, *(f"{self.prefix}layers.{layer}." for layer in layers))


@dataclass(frozen=True)
class Split:
    """The layers of a family that the `tensor` axis of a mesh splits, each by the last part of its name.

    As in Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3: a block sums over the devices
    twice, after attention and after the MLP. All other parameters are on every device.

    Attributes:
        outputs: linear layers split by their outputs, with their biases: a device has some of the heads,
            or a part of the MLP.
        inputs: linear layers split by their inputs: the results of the devices are added, then the bias.
        vocabulary: tables and heads split by tokens, if the mesh divides the vocabulary.
    """

    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    vocabulary: tuple[str, ...]


def require(config: Any, key: str, value: Any, allowed: Iterable[Any]) -> None:
    """Check that a value of config.json is one of the allowed ones.

    `key` is the key in config.json; a dot leads into an object.

    Raises:
        CheckpointError: the value is not allowed.
    """
    allowed = list(allowed)
    if value not in allowed:
        words = [each for each in allowed if isinstance(each, str)]
        guess = did_you_mean(value, words) if isinstance(value, str) else ""
        raise unsupported(
            config,
            f"{key}: expected {' or '.join(map(shown, allowed))}, found {shown(value)}{guess}",
        )


def refused(file: Path, key: str, wanted: str, found: Any) -> CheckpointError:
    """Return the error for a value of a checkpoint's file that no supported model has."""
    return CheckpointError(
        f"{file}: {key}: expected {wanted}, found {shown(found)}", hint=BRING_YOUR_OWN
    )


def unsupported(config: Any, message: str) -> CheckpointError:
    """Return the error for a model that is not supported, with the path of its config.json."""
    return CheckpointError(
        f"{Path(config.name_or_path, 'config.json')}: {message}", hint=BRING_YOUR_OWN
    )
