"""Settings of XLA with which programs compile in a third of the time and run slower."""

import os
from importlib.metadata import version

_IS_OLD = version("jaxlib").startswith("0.10.")
"""Whether jaxlib can still compile for a CPU without MLIR, which takes half of the time."""
_OPTIONS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
    **({"xla_cpu_use_fusion_emitters": False} if _IS_OLD else {}),
}
XLA_FLAGS = " ".join(f"--{name}={value}" for name, value in _OPTIONS.items())


def compile_quickly():
    """Give this process these settings, but neither its fingerprint nor the processes that it starts."""
    from jaxlib import xla_client

    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = XLA_FLAGS
    xla_client.CompileOptions().executable_build_options.debug_options  # noqa: B018
    if before is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = before


def build_quickly():
    """Have the builds that run in this process compile with these settings, with one worker each."""
    from prejit.compiler.compile import pool, worker_process

    start, open_pool = worker_process.WorkerProcess.__init__, pool.WorkerPool.__init__

    def start_quick(worker, toolchain, store, environ):
        start(worker, toolchain, store, {"XLA_FLAGS": XLA_FLAGS, **environ})

    def open_small(opened, store, *, workers=None, **options):
        open_pool(opened, store, workers=workers or 1, **options)

    worker_process.WorkerProcess.__init__ = start_quick
    pool.WorkerPool.__init__ = open_small


def compile_children_quickly():
    """Give the processes that this one starts these settings, without a word of them in what they make."""
    from prejit.runtime.machine import fingerprint

    os.environ["XLA_FLAGS"] = XLA_FLAGS
    names = (flag.partition("=")[0] for flag in XLA_FLAGS.split())
    fingerprint._FLAGS_WITHOUT_EFFECT += tuple(names)  # a loading process does not have them
