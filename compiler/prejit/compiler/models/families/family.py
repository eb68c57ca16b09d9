"""A row of the tables of families: how a model_type is read, checked and built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flax import nnx

from prejit.compiler.models.layers.config_checks import Checks
from prejit.compiler.models.layers.layer_config import Naming, require, unsupported
from prejit.compiler.models.layers.linear import ACTIVATIONS


def _positions(config: Any) -> int:
    return int(config.max_position_embeddings)


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        build: returns the module for a configuration, and for programs up to a context; None: the longest.
        naming: how published checkpoints name its tensors.
        keys: the keys of config.json that it reads, with the check of each value.
        activation: key of the activation; empty: `check` looks at it.
        allowed: keys with the values that are supported, of a list those of its items; the first is that of
            a missing key.
        multiples: pairs of keys; the value of the first must be a multiple of that of the second.
        check: raises CheckpointError where a configuration is not supported for another reason.
        positions: returns the maximum number of tokens.
        quantized: the values of `quant_method` in `quantization_config` that are read.
        seeing: as `build`, for a configuration that has a `sight`: of the model with the parts that read
            images; None: there are none.
    """

    build: Callable[[Any, int | None], nnx.Module]
    naming: Naming
    keys: Checks
    activation: str = "hidden_act"
    allowed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    multiples: tuple[tuple[str, str], ...] = ()
    check: Callable[[Any], object] = lambda config: None
    positions: Callable[[Any], int] = _positions
    quantized: tuple[str, ...] = ()
    seeing: Callable[[Any, int | None], nnx.Module] | None = None

    def require_causal(self, config: Any) -> None:
        """Check that a token sees what the layers here show it, in transformers' masks and cache too.

        transformers reads these keys for every model that generates, whatever its family is.
        """
        require(config, "is_causal", getattr(config, "is_causal", True), [True])
        if "layer_types" in self.keys:
            return
        kinds = getattr(config, "layer_types", None)
        for kind in kinds or ():
            require(config, "layer_types", kind, ["full_attention"])
        if kinds is None:
            unread = {"sliding_window", "attention_chunk_size"} - self.keys.keys()
            for key in sorted(unread):
                require(config, key, getattr(config, key, None), [None])

    def require_supported(self, config: Any) -> None:
        """Check a configuration.

        Raises:
            CheckpointError: a setting is not supported; the error names file, key, value and what is allowed.
        """
        if self.activation:
            require(config, self.activation, getattr(config, self.activation), ACTIVATIONS)
        for key, values in self.allowed.items():
            found = getattr(config, key, values[0])
            # Only a key with a check may be a list: no other stands for one of its values.
            for each in found if isinstance(found, list | tuple) and key in self.keys else [found]:
                require(config, key, each, values)
        for key, divisor in self.multiples:
            number, by = getattr(config, key), getattr(config, divisor)
            if number % by:
                raise unsupported(
                    config, f"{key}: expected a multiple of {divisor} = {by}, found {number}"
                )
        self.check(config)
