"""A lowered program, as every kind of lowering returns it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from prejit.runtime.format.arrays import Array

Shapes = dict[str, jax.ShapeDtypeStruct]
"""Shapes and dtypes of weights, by name."""


@dataclass(frozen=True)
class SizedTrial:
    """A function of the user at other sizes than a bucket's, to compare the program with.

    Attributes:
        sizes: the size of each variable that differs.
        padded: whether the bucket's program is padded to them; if not, the one with symbolic sizes has them.
        portable: the function at these sizes as StableHLO for CPUs.
    """

    sizes: Mapping[str, int]
    padded: bool
    portable: bytes


@dataclass(frozen=True)
class LoweredProgram:
    """A program that can be compiled for any target.

    Attributes:
        portable: StableHLO as a versioned portable artifact (openxla/stablehlo, docs/vhlo.md).
        platforms: the platforms that it is lowered for, in the order of its platform index.
        weights: names of the tensors that come first among the arguments, in order.
        arguments: the other arguments, in order.
        results: the results, in order.
        symbolic: the same program for any size of some variables; None: there is none.
        arguments_tree, results_tree: how they are nested, as `trees.to_text` writes it; None for a model's.
        weight_shardings: the mesh axis that splits each dimension, for each weight that is split.
        weight_sets: every set of tensors that may come first, by the set's name. Empty means `weights` only.
        decoder: the fields of `schema.Decoder` that a decoder decides; empty for other programs.
        estimated_microseconds: estimated duration on a CPU, for targets that cannot be measured; 0 means no
            estimate.
        traced: the operations of a function of the user; None for other programs.
        settings: jax's settings that the trace depended on, where they were not jax's defaults; None: it was
            not traced here.
        narrowed: the arguments that jax takes for narrower ones than the manifest gives, in words.
        trials: lowers the function at other sizes; empty: it has none, or they are not to be compared.
    """

    portable: bytes
    platforms: tuple[str, ...]
    weights: tuple[str, ...]
    arguments: tuple[Array, ...]
    results: tuple[Array, ...]
    weight_shardings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    weight_sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    estimated_microseconds: int = 0
    arguments_tree: str | None = None
    results_tree: str | None = None
    symbolic: bytes | None = None
    decoder: Mapping[str, Any] = field(default_factory=dict)
    traced: ClosedJaxpr | None = None
    settings: dict[str, str] | None = None
    narrowed: tuple[str, ...] = ()
    trials: Callable[[], tuple[SizedTrial, ...]] = tuple
