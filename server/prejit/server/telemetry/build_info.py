"""The info metric of what runs: bundles, targets and versions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import InfoMetricFamily, Metric

if TYPE_CHECKING:
    from prejit.server.served.served import Served


def builds_metric(served: Sequence[Served]) -> Metric:
    """Return which bundles these are."""
    family = InfoMetricFamily(
        "prejit_build",
        "What runs: model_name, bundle, digest, target, and versions of prejit, jax, jaxlib and cuda.",
    )
    for one in served:
        family.add_metric((), _build(one))
    return family


def _build(served: Served) -> dict[str, str]:
    """Return the labels of the info metric of one bundle."""
    bundle = served.bundle
    found = {
        axis.name: axis.found
        for verdict in bundle.verdicts
        if verdict.target == bundle.target
        for axis in verdict.axes
    }
    return {
        "model_name": served.name,
        "bundle": bundle.name,
        "digest": bundle.digest,
        "target": bundle.target,
        "prejit": _version("prejit"),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "cuda": found.get("cuda", ""),
    }


# To look for a version takes a millisecond and leaves garbage.
_version = functools.cache(metadata.version)
