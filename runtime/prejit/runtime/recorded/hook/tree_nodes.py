"""Make the nodes of jax's trees of classes and the values beside their children."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def structure_of(class_: Any, beside: Any, children: Sequence[Any]) -> Any:
    """Return jax's structure of an object of a registered class, with a value beside these children.

    jaxlib, up to 0.12 at least, takes a class of named tuples for a plain one, although it is registered: it
    loses the value, and gives the children to the fields in order. So the class's own function makes those.

    Raises:
        ValueError: that function makes another structure of placeholders.
        Exception: of that function.
    """
    from jax._src.tree_util import _registry as registered
    from jax.tree_util import PyTreeDef, default_registry

    if not _is_registered_tuple(class_):
        return PyTreeDef.from_node_data_and_children(default_registry, (class_, beside), children)
    parts = [child.unflatten([object() for _ in range(child.num_leaves)]) for child in children]
    found = default_registry.flatten(registered[class_].from_iter(beside, parts))[1]
    if found.node_data() != (class_, beside) or found.children() != [*children]:
        raise ValueError(f"{class_.__qualname__}: expected {children}, found {found}")
    return found


def _is_registered_tuple(class_: Any) -> bool:
    """Return whether a class of named tuples is registered with jax, which plain ones are not."""
    from jax._src.tree_util import _registry as registered

    is_named = isinstance(class_, type) and issubclass(class_, tuple) and hasattr(class_, "_fields")
    return is_named and class_ in registered
