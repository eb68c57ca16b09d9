"""Sizes up to which the numbers that a function computes of its sizes fit an integer.

jax.jit refuses a Python number that does not fit. A program with symbolic sizes computes it, and would wrap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import reduce

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from prejit.compiler.lowering.user.traced_primitives import equations


def size_limits(traced: ClosedJaxpr, names: Sequence[str]) -> list[str]:
    """Return constraints on symbolic sizes, as jax.export.symbolic_shape takes them.

    Each term of a sum, such as `3*n^2*m - n`, has its share. Of a number with quotients,
    remainders, minima or maxima of sizes nothing is known.

    Args:
        traced: the function at symbolic sizes.
        names: the symbolic sizes.
    """
    found = set[str]()
    largest = int(np.iinfo(jax.dtypes.canonicalize_dtype(np.int64)).max)
    for equation in equations(traced.jaxpr):
        number = str(equation.params.get("dim", ""))
        if equation.primitive.name != "dim_as_value" or "(" in number:
            continue
        terms = re.split(r"[+-]", number.replace(" ", "").lstrip("-"))
        for term in terms:
            factors = [factor.partition("^") for factor in term.split("*")]
            whole = math.prod(int(base) for base, _, _ in factors if base.isdigit())
            powers = [(base, int(power or 1)) for base, _, power in factors if base in names]
            sizes = [base for base, power in powers for _ in range(power)]
            if sizes and (len(sizes) > 1 or whole > 1 or len(terms) > 1):
                most = str(largest // len(terms) // whole)
                limit = reduce(lambda rest, size: f"floordiv({rest}, {size})", sizes[1:], most)
                found.add(f"{sizes[0]} <= {limit}")
    return sorted(found)
