"""Settings of XLA with which programs compile in a third of the time and run slower.

For tests of what programs compute, and of what the engine does with them. The bundles of test_stories.py,
test_fleet.py and test_forms.py are compiled as users' are.
"""

from __future__ import annotations

from importlib.metadata import version

_IS_OLD = version("jaxlib").startswith("0.10.")
"""Whether jaxlib can still compile for a CPU without MLIR, which takes half of the time."""
COMPILER_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if _IS_OLD else {}),
}
"""Options of `jax.jit`."""
XLA_FLAGS = " ".join(f"--{name}={value}" for name, value in COMPILER_OPTIONS.items())
"""The same for a build: the value of an environment variable."""
