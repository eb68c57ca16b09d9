"""Constants of results that stand for those of the arguments."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from prejit.runtime.format.constants import Constant, EncodedConstant, dumps
from prejit.runtime.format.trees import Node, Tree


def without_references(tree: Tree) -> Tree:
    """Return a tree of results with the constants of the arguments that its own ones refer to.

    So the next state of a training step has the structure of the state, whose optimizer no bundle holds.
    """
    if not isinstance(tree, Node):
        return tree
    aux: Any = _referred(tree.aux)
    return replace(
        tree,
        children=tuple(map(without_references, tree.children)),
        constants=tuple((name, _referred(constant)) for name, constant in tree.constants),
        aux=aux,
    )


def _referred(constant: Constant) -> Constant:
    if isinstance(constant, EncodedConstant):
        match json.loads(constant.text):
            case ["argument", value]:
                return EncodedConstant(dumps(value))
    return constant
