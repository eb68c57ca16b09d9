"""The matrices of a decoder: which of them a mesh splits, and which adapters may change while it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from prejit.compiler.base.suggestions import did_you_mean
from prejit.compiler.models.families.decoders import Block, TextDecoder
from prejit.compiler.models.layers.layer_config import Split
from prejit.compiler.models.layers.linear import Embedding, Linear
from prejit.compiler.models.layers.row_adapters import AdapterStacks, Stack, StackPlace
from prejit.runtime.errors import ManifestError
from prejit.runtime.format.arrays import Mesh


def make_room(
    module: Any, slots: int, rank: int, targets: Sequence[str], where: str
) -> AdapterStacks:
    """Return the room for adapters of a decoder, and mark the matrices that they change.

    Args:
        module: from `model_registry.make_decoder`.
        slots: how many adapters are loaded at most.
        rank: the largest rank.
        targets: ends of names of matrices; empty: all that adapters may change.
        where: the manifest, for errors.

    Raises:
        ManifestError: a target is no such matrix, or the model takes no adapters.
    """
    found: dict[tuple[str, int, int], list[tuple[str, Linear]]] = {}
    for path, name, part in _matrices(module):
        found.setdefault((name, part.inputs, part.outputs), []).append((path, part))
    names = tuple(dict.fromkeys(name for name, _, _ in found))
    if not found:
        raise ManifestError(f"{where}: adapters: expected none, as this family takes none")
    for place, target in enumerate(targets):
        if not any(_is_end(target, name) for name in names):
            ends = [name.rpartition(".")[2] for name in names]
            raise ManifestError(
                f"{where}: adapters.targets[{place}]: expected {', '.join(ends)}; found {target!r}"
                f"{did_you_mean(target, ends)}",
                hint="adapters that change other matrices are merged: list them in [model] adapters",
            )
    stacks: list[Stack] = []
    for (name, inputs, outputs), matrices in found.items():
        if targets and not any(_is_end(target, name) for target in targets):
            continue
        # Layers may differ in the sizes of one matrix.
        taken = name in {each.name for each in stacks}
        stack = f"{name}-{inputs}x{outputs}" if taken else name
        stacks.append(Stack(stack, inputs, outputs, tuple(path for path, _ in matrices)))
        for layer, (_, part) in enumerate(matrices):
            part.adapters = StackPlace(stack, layer)
    return AdapterStacks(slots, rank, tuple(stacks))


def _matrices(module: Any) -> Iterator[tuple[str, str, Linear]]:
    """Yield the matrices of attention and MLP: the whole name, the name inside of the layer, and itself."""
    if not isinstance(module, TextDecoder):
        return
    parts = {".".join(map(str, path)): part for path, part in nnx.iter_modules(module)}
    for at, block in parts.items():
        if not isinstance(block, Block):
            continue
        names = block.names
        inner = (*names.shared_up, names.shared_down) if block.has_shared else ()
        read = () if block.is_latent else names.qkv  # latent attention has other products
        own = (names.attention_gate, names.output)
        for name in dict.fromkeys((*read, *own, *names.up, names.down, *inner)):
            if isinstance(part := parts.get(f"{at}.{name}"), Linear):
                yield f"{at}.{name}", name, part


def _is_end(target: str, name: str) -> bool:
    return f".{name}".endswith(f".{target}")


def shardings(module: Any, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Return the mesh axis that splits each dimension, for each parameter that is split, by name.

    The module is from `make_decoder`, and `check_mesh` accepts it.
    """
    found: dict[str, tuple[str, ...]] = {}
    rules: Split = module.mesh_split
    for path, part in nnx.iter_modules(module):
        name = ".".join(map(str, path))
        last = str(path[-1]) if path else ""
        if isinstance(part, Embedding):
            if last in rules.vocabulary and part.weight.shape[0] % mesh.tensor == 0:
                found[f"{name}.weight"] = ("tensor", "")
                if part.weight_scale is not None:
                    found[f"{name}.weight_scale"] = ("tensor",)
        elif isinstance(part, Linear):
            by_outputs = last in rules.outputs
            if last in rules.vocabulary:
                by_outputs = _extent(part, outputs=True) % mesh.tensor == 0
            if by_outputs or last in rules.inputs:
                first = by_outputs != part.in_out
                found[f"{name}.weight"] = ("tensor", "") if first else ("", "tensor")
            for key in ("bias", "weight_scale") if by_outputs else ():
                if getattr(part, key) is not None:
                    found[f"{name}.{key}"] = ("tensor",)
    return found


def check_mesh(mesh: Mesh, module: Any, at: str, config: Path) -> None:
    """Check that a decoder can be split over a mesh.

    The module is from `make_decoder`. `at` is the manifest and `config` the model's config.json, for
    errors.

    Raises:
        ManifestError: models of this family are not split, or `mesh.tensor` does not divide the heads or a
            matrix.
    """
    if not hasattr(module, "mesh_split"):
        raise ManifestError(
            f"{at}: mesh: expected none, because the family of {config} is not "
            f"split over devices; found data = {mesh.data}, tensor = {mesh.tensor}",
            hint="remove [mesh]: each device can run a bundle of its own",
        )
    keys = jax.tree.leaves(jax.eval_shape(lambda: module.make_cache(1, 1, "float32")))[0]
    sizes = {"key/value heads": keys.shape[1], **_split_sizes(module)}
    for name, size in sizes.items():
        if size % mesh.tensor:
            common = math.gcd(*sizes.values())
            fitting = [n for n in range(1, common + 1) if common % n == 0]
            raise ManifestError(
                f"{at}: mesh.tensor: expected a divisor of {size}, the {name} that {config} gives the "
                f"model; found {mesh.tensor}",
                hint=f"{' or '.join(map(str, fitting))} would fit",
            )


def _split_sizes(module: Any) -> dict[str, int]:
    """Return the size of the split dimension of each linear layer that is always split, by name."""
    rules: Split = module.mesh_split
    return {
        ".".join(map(str, path)): _extent(part, outputs=path[-1] in rules.outputs)
        for path, part in nnx.iter_modules(module)
        if isinstance(part, Linear) and path[-1] in (*rules.outputs, *rules.inputs)
    }


def _extent(part: Linear, *, outputs: bool) -> int:
    return part.weight.shape[1 if outputs == part.in_out else 0]
