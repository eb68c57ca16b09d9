"""The settings of jax in keys: all that decide what a function lowers to, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from prejit.compiler.store.jax_settings import jax_configuration

SETTINGS = {
    "JAX_ENABLE_X64": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "JAX_DEFAULT_PRNG_IMPL": "rbg",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_THREEFRY_PARTITIONABLE": "off",
    "JAX_RANDOM_SEED_OFFSET": "3",
}
BEFORE_AND_AFTER = """
import json, os
from prejit.compiler.store.jax_settings import jax_configuration
before = jax_configuration(os.environ)
import jax
print(json.dumps([before, jax_configuration(os.environ)]))
"""


@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["defaults", "set"])
def test_jax_is_configured_as_its_environment_says_before_it_is_imported(
    settings: dict[str, str],
) -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE_AND_AFTER],
        env={**plain, **settings},
        capture_output=True,
        check=True,
    )
    before, after = json.loads(done.stdout)
    assert before == after
    assert len(before.split()) == len(settings)


def test_what_decides_no_program_is_no_part_of_jaxs_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    assert jax_configuration({"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "/x"}) == ""
    assert jax_configuration({"JAX_ENABLE_X64": "true"}) == "jax_enable_x64=True"
