"""A plugin of pytest for the second interpreter: it leaves out what cannot differ there.

Another Python, jax and jaxlib can change what touches them: tracing, lowering, private interfaces, compiled
programs and their loading, and the standard library's own errors. It stays, and so does all that is quick.
Left out are long tests of what none of these takes part in. `make test-other-all` leaves out nothing.
"""

from __future__ import annotations

import re

import pytest

LEFT_OUT = {
    "unit/benchmarks/": "figures, tables and pages, which no server runs",
    "unit/compiler/bench/": "clocks and tables around calls that other tests make",
    "unit/compiler/checking/": "calls of a model, as in tests of models",
    "unit/compiler/checkpoint/test_tokenizer_check.py": "time and memory limits around tokenizers",
    "unit/compiler/compile/test_pool.py": "processes, signals, time limits; builds compile in workers",
    "unit/compiler/fleet/": "fingerprints compared with each other",
    "unit/compiler/lowering/test_sampling_programs.py": "arithmetic; bundles of format/ sample as built",
    "unit/compiler/models/": "arithmetic; parity/ computes a model of each family",
    "unit/compiler/native/test_kernel_attention.py": "C++ called by ctypes; parity/ calls it from programs",
    "unit/compiler/native/test_kernel_library.py": "C++ compilers and what they print",
    "unit/compiler/native/test_kernel_linear.py": "C++ called by ctypes; parity/ calls it from programs",
    "unit/compiler/native/test_kernel_norm.py": "C++ called by ctypes; parity/ calls it from programs",
    "unit/compiler/native/test_kernel_threads.py": "C++ in processes that import no jax",
    "unit/compiler/pipeline/measure/": "sums over what a model says, as in tests of models",
    "unit/compiler/pipeline/test_plan.py": "keys and their words; test_run.py builds",
    "unit/compiler/store/test_own_code.py": "the text of modules",
    "unit/compiler/store/test_directory_store.py": "files, locks, kills",
    "unit/compiler/store/test_k": "keys and digests",
    "unit/runtime/format/test_bounds.py": "sizes and memory of tables that are refused before a load",
    "unit/runtime/format/test_bundle.py": "the spelling of JSON, by our own encoder",
    "unit/runtime/format/test_fuzz.py": "hostile bytes; test_verify.py has each check",
    "unit/runtime/format/test_layout.py": "files, links and renames, by calls of the operating system",
    "unit/runtime/programs/test_compile_cache.py": "files, locks, kills; test_fallback.py compiles into it",
    "unit/runtime/store/test_receipt.py": "identities of files",
    "unit/runtime/test_corruption.py": "files and digests; test_verify.py has each check",
    "unit/runtime/text/": "calls of the packages tokenizers and jinja2",
    "unit/runtime/trust/test_enforcing.py": "signatures by cryptography around a load",
    "unit/server/engine/": "queues and slots above the calls; format/ generates, test_close.py has threads",
    "unit/server/grammar/": "masks by llguidance",
    "unit/server/inference/": "messages and routes above the calls of a bundle",
    "unit/server/observe/": "rules and pages, by promtool and Prometheus",
    "unit/server/openai/": "messages and routes above the calls of a bundle",
    "unit/server/page/": "the text of a page",
    "unit/test_changed_tests.py": "the text of modules",
    "unit/test_import_rules.py": "the text of modules",
}
"""Files and directories of tests, and why they cannot differ."""
RANDOM = {
    "test_a_manifest_with_one_thing_changed_is_read_or_refused",
    "test_any_mix_of_row_counts_equals_single_calls",
    "test_every_right_manifest_is_read_as_it_was_meant",
    "test_random_damage_is_never_served",
    "test_whatever_a_batch_a_session_and_load_get_they_say_what_is_wrong",
    "test_whatever_is_passed_gives_a_result_or_an_error_of_prejit",
}
"""Long tests of random values. Their files have tests with chosen values, which run."""
ALL_CASES = ("tests/unit/runtime/device/test_executable.py", "tests/unit/runtime/base/")
"""Tests that run with all their cases. They touch jaxlib's private interfaces or the standard library.

Other tests run with their first case only. It shows that the code works there; the other cases have other
values."""
_LEFT_OUT = tuple(f"tests/{path}" for path in LEFT_OUT)
FAMILIES = {
    "test_logits_and_greedy_tokens_equal_those_that_torch_gave": r"[a-z]+\d?",
    "test_the_portable_form_gives_the_same": r"[a-z]+\d?",
    "test_results_equal_those_that_torch_gave": r"[a-z]+-[a-z]+",
}
"""Tests of all model families, and what of a case's id names the family: its first case runs."""


@pytest.hookimpl(trylast=True)  # what `make test` leaves out on each interpreter is left out before
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what is left out."""
    seen = set[str]()
    kept, left = [], []
    for item in items:
        (kept if _can_differ(item, seen) else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


def _can_differ(item: pytest.Item, seen: set[str]) -> bool:
    if item.nodeid.startswith(_LEFT_OUT) or item.name in RANDOM:
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
