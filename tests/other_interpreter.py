"""A plugin of pytest for the second interpreter: it leaves out what cannot differ there.

Another Python, jax and jaxlib can change what touches them: tracing, lowering, private interfaces, compiled
programs and their loading, and the standard library's own errors. It stays, and so does all that is quick.
Left out are long tests of what none of these takes part in. `make test-other-all` leaves out nothing.
"""

from __future__ import annotations

import re

import pytest

LEFT_OUT = {
    "test_kernel_linear.py": "C++ called by ctypes: neither jax nor jaxlib takes part",
    "test_kernel_attention.py": "C++ called by ctypes; parity tests call it from programs",
    "test_kernel_norm.py": "C++ called by ctypes; parity tests call it from programs",
    "test_kernel_threads.py": "C++ in processes that import no jax",
    "test_layout.py": "files, links and renames, by calls of the operating system",
    "test_bounds.py": "sizes and memory of tables that are refused before jaxlib sees them",
    "test_corruption.py": "files and digests; test_verify.py has each check",
    "test_compile_cache.py": "files, locks and kills; test_fallback.py compiles into the cache",
    "test_receipt.py": "identities of files",
    "test_pool.py": "processes, signals and time limits; builds compile in workers",
    "test_bundle.py": "the spelling of JSON, by our own encoder",
    "test_fleet.py": "fingerprints compared with each other",
    "test_import_rules.py": "the text of modules",
    "test_import_graph.py": "the text of modules",
    "test_alerts.py": "rules of Prometheus, by promtool",
    "test_with_prometheus.py": "pages read by Prometheus",
}
"""Files, and why they cannot differ."""
ALL_CASES = ("tests/unit/runtime/device/", "tests/unit/runtime/base/", "tests/format/")
"""Directories of tests that run with all their cases. They touch jaxlib's private interfaces, the standard
library, or bundles of old formats.

Other tests run with their first case only. It shows that the code works there; the other cases have other
values."""
FAMILIES = {
    "test_logits_and_greedy_tokens_equal_those_that_torch_gave": r"[a-z]+\d?",
    "test_the_portable_form_gives_the_same": r"[a-z]+\d?",
    "test_results_equal_those_that_torch_gave": r"[a-z]+-[a-z]+",
}
"""Tests of all model families, and what of a case's id names the family: its first case runs."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is left out."""
    seen = set[str]()
    kept, left = [], []
    for item in items:
        (kept if _can_differ(item, seen) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _can_differ(item: pytest.Item, seen: set[str]) -> bool:
    if item.path.name in LEFT_OUT:
        return False
    if item.nodeid.startswith(ALL_CASES):
        return True
    name, _, case = item.name.partition("[")
    family = re.match(FAMILIES.get(name, ""), case)
    assert family is not None, item.nodeid
    kind = f"{item.parent and item.parent.nodeid}::{name}[{family[0]}"
    is_first = kind not in seen
    seen.add(kind)
    return is_first
