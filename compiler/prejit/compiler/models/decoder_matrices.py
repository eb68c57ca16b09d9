"""The matrices of a decoder that adapters may change while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from flax import nnx

from prejit.compiler.base.suggestions import did_you_mean
from prejit.compiler.models.families.decoders import Block, TextDecoder
from prejit.compiler.models.layers.linear import Linear
from prejit.compiler.models.layers.row_adapters import AdapterStacks, Stack, StackPlace
from prejit.runtime.errors import ManifestError


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
